"""Loads a model's definition and weights with transformers, with our attention in it.

Any decoder-only model whose layers go through transformers' attention interface works
unchanged; the others are refused by name, before their weights are read where possible.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pd_engine.attention.paged import PagedStep
from pd_engine.attention.rows import Options
from pd_engine.checkpoint import Checkpoint, ModelError
from pd_engine.loading import Progress, unheard

ATTENTION = "pd_paged"

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments that change what attention computes and that ours does not know.
_BOTH_WAYS = (
    "its attention looks in both directions, as an encoder's: text can't be generated with it "
    "token by token; give a decoder-only model"
)
_UNKNOWN_OPTIONS = ("position_bias", "head_mask", "alibi", "block_mask")

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the KV pool must hold for a model."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready for `forward`."""

    module: torch.nn.Module
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_positions: int | None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        attention: "PagedStep | _Probe",
    ) -> torch.Tensor:
        """Flattened batch [T], [T] -> logits [len(keep), vocabulary] of the rows to keep."""
        out = self.module(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            paged=attention,
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def choose_dtype(name: str, device: torch.device, checkpoint_dtype: torch.dtype) -> torch.dtype:
    """`auto`: on CUDA the checkpoint's; on a CPU what it computes faster, see `prefers_bf16`."""
    if name != "auto":
        dtype = getattr(torch, name, None)
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(f"dtype {name!r}: use auto, float32, bfloat16 or float16")
        return dtype
    if device.type == "cuda":
        return checkpoint_dtype
    return torch.bfloat16 if prefers_bf16() else torch.float32


def prefers_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bfloat16 is faster than float32 here: measured on x86, with AMX and with AVX-512."""
    return not {"amx_bf16", "avx512_bf16"}.isdisjoint(_cpu_flags(cpuinfo))


def torch_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has units for bfloat16 that torch uses and our code doesn't."""
    return not {"amx_bf16", "bf16"}.isdisjoint(_cpu_flags(cpuinfo))


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    try:
        text = cpuinfo.read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    names = ("flags", "Features")  # x86, Arm
    line = next((line for line in text.splitlines() if line.startswith(names)), "")
    return frozenset(line.partition(":")[2].split())


def load_model(
    checkpoint: Checkpoint, dtype: str, device: torch.device, progress: Progress = unheard
) -> LoadedModel:
    """Loads the weights; raises ModelError with what to do."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    config = _read_config(checkpoint)
    text = config.get_text_config(decoder=True)
    _refuse_by_config(checkpoint, config, text)
    stored = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
    chosen = choose_dtype(dtype, device, stored)
    module = (
        _read_weights(checkpoint, config, chosen, progress).to(device).eval().requires_grad_(False)
    )
    geometry = _probe(checkpoint, module, int(text.num_hidden_layers), device)
    positions = getattr(text, "max_position_embeddings", None)
    return LoadedModel(
        module=module,
        geometry=geometry,
        dtype=chosen,
        device=device,
        vocab_size=int(text.vocab_size),
        max_positions=int(positions) if positions else None,
    )


def _read_config(checkpoint: Checkpoint) -> Any:
    try:
        return AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model {checkpoint.folder}: config.json (model type {checkpoint.model_type!r}) is not "
            f"understood: {_first_line(error)}. Models that bring code of their own are not "
            f"served; a newer transformers may know this type"
        ) from error


def _refuse_by_config(checkpoint: Checkpoint, config: Any, text: Any) -> None:
    def refuse(why: str) -> ModelError:
        return _refusal(checkpoint, why)

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("it is an encoder-decoder model; only decoder-only models are served")
    if getattr(text, "kv_lora_rank", None):
        raise refuse("its attention is latent (MLA), whose KV has another form than our blocks")
    if getattr(text, "num_kv_shared_layers", 0):
        raise refuse("its layers share KV with one another")
    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise refuse("transformers has no causal language model for it")
    model_class = mapping[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise refuse("it keeps a recurrent state (state-space or linear attention) instead of KV")
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise refuse(f"it has layers of type {', '.join(sorted(map(str, others)))}")
    if not model_class._can_set_attn_implementation():
        raise refuse("its definition in transformers doesn't use the attention interface")
    if getattr(config, "is_decoder", True) is False and _looks_both_ways(model_class, config):
        raise refuse(f"{_BOTH_WAYS} (config.json has no is_decoder: true)")


def _looks_both_ways(model_class: Any, config: Any) -> bool:
    """Whether it does without `is_decoder`; GPT-NeoX has that setting and doesn't ask it."""
    with torch.device("meta"):
        modules = model_class(config).modules()
    return any(getattr(module, "is_causal", True) is False for module in modules)


def _refusal(checkpoint: Checkpoint, why: str) -> ModelError:
    return ModelError(
        f"model {checkpoint.folder}: model type {checkpoint.model_type!r} can't be served: {why}"
    )


class _Counted:
    """In the place of transformers' progress bar: its loop over a model's weights."""

    def __init__(self, weights: Collection[Any], progress: Progress) -> None:
        self._weights, self._progress = weights, progress

    def __iter__(self) -> Iterator[Any]:
        total = len(self._weights)
        for done, one in enumerate(self._weights):
            self._progress("weights", done, total)
            yield one
        self._progress("weights", total, total)


@contextmanager
def _counting(progress: Progress) -> Iterator[None]:
    def hook(factory: Any, arguments: Any, options: Any) -> Any:
        if options.get("desc") == "Loading weights":
            return _Counted(arguments[0], progress)
        return factory(*arguments, **options)

    before = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _read_weights(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, progress: Progress
) -> Any:
    try:
        with _counting(progress):
            return _checked_weights(checkpoint, config, dtype)
    except (MemoryError, ModelError):
        raise
    except Exception as error:  # transformers raises nearly anything on a bad file
        raise ModelError(
            f"model {checkpoint.folder}: the weights cannot be loaded: "
            f"{type(error).__name__}: {_first_line(error)}; copy or convert the model again"
        ) from error


def _checked_weights(checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> Any:
    module, report = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
    )
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(k) for k in report.get(problem, ()))
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"model {checkpoint.folder}: the weights don't fit config.json "
                f"({problem.replace('_', ' ')}: {', '.join(names[:3])}{more}); "
                f"copy the model again"
            )
    return module


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# ---- the hook ---------------------------------------------------------------------


def _no_mask(*_args: object, **_kwargs: object) -> None:
    """Masks are the attention's own business."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: "PagedStep | _Probe | None" = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: [1, H, T, D] -> [1, T, H, D]."""
    if paged is None:
        raise RuntimeError("this model only runs through the engine's Runner")
    if attention_mask is not None:
        raise ModelError("the model brings an attention mask of its own")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(_BOTH_WAYS)
    for name in _UNKNOWN_OPTIONS:
        if others.get(name) is not None:
            raise ModelError(f"the model's attention needs {name!r}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = Options(scale, sliding_window, softcap, s_aux)
    layer: Any = module.layer_idx
    return paged.attend(layer, query[0], key[0], value[0], options)[None], None


@dataclass(slots=True)
class _Probe:
    """Stands in for the paged attention once, to see what the layers ask for."""

    shapes: list[tuple[int, int, int, int]] = field(default_factory=list)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _options: Options,
    ) -> torch.Tensor:
        """As `PagedStep.attend`, for tokens that each stand alone."""
        self.shapes.append((layer, key.shape[0], key.shape[2], value.shape[2]))
        return value.repeat_interleave(query.shape[0] // key.shape[0], 0).transpose(0, 1)


def _probe(
    checkpoint: Checkpoint, module: torch.nn.Module, layers: int, device: torch.device
) -> Geometry:
    """Runs two tokens through the model: each layer must ask the hook once, all alike."""
    probe = _Probe()
    tokens = torch.zeros(2, dtype=torch.int64, device=device)
    try:
        with torch.inference_mode():
            out = module(
                input_ids=tokens[None],
                position_ids=torch.arange(2, device=device)[None],
                use_cache=False,
                logits_to_keep=tokens[:1],
                paged=probe,
            )
    except ModelError as error:
        raise _refusal(checkpoint, str(error)) from error
    except (TypeError, RuntimeError, IndexError, AttributeError) as error:
        raise _refusal(checkpoint, f"a forward pass fails: {_first_line(error)}") from error
    if [shape[0] for shape in probe.shapes] != list(range(layers)):
        raise _refusal(
            checkpoint,
            f"{len(probe.shapes)} of its {layers} layers go through the attention interface",
        )
    if out.logits.shape[1] != 1:
        raise _refusal(checkpoint, "it computes logits for all tokens, asked for one")
    kinds = {shape[1:] for shape in probe.shapes}
    _, kv_heads, key_dim, value_dim = probe.shapes[0]
    if len(kinds) > 1 or key_dim != value_dim:
        raise _refusal(
            checkpoint,
            f"keys and values differ in form between layers or from one another: {sorted(kinds)}",
        )
    return Geometry(layers, kv_heads, key_dim)
