"""What a token's KV consists of, read from a model's config.json (Hugging Face's format).

Only keys that say it are believed; a model whose cache has another form is refused with
the reason, never guessed at: an estimate that is wrong by 16 looks as plausible as a
right one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Keys under which families have the same number.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
# Families that keep another state than KV, at least in some layers, and say so by their type.
_RECURRENT = ("mamba", "rwkv", "jamba", "bamba", "zamba", "recurrent_gemma", "xlstm", "falcon_h1")
_RECURRENT_KEYS = ("ssm_cfg", "state_size", "mamba_d_state", "ssm_state_size", "block_types")


class UnknownGeometry(ValueError):
    """This config doesn't tell the size of its KV, or it has none; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelKv:
    """A token's KV: so many vectors of so many elements.

    Two for each KV head of each layer (K and V); with latent attention one for each
    layer, from which K and V are computed again.
    """

    layers: int
    vectors: int
    width: int
    dtype: str
    latent: bool = False
    notes: tuple[str, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Unquantized. For grouped queries 2 x layers x kv_heads x head_dim x element bytes."""
        return self.vectors * self.width * ELEMENT_BYTES[self.dtype]

    def describe(self) -> str:
        if self.latent:
            return f"{self.layers} layers x {self.width} latent elements in {self.dtype}"
        heads = self.vectors / 2 / self.layers
        return f"{self.layers} layers x {heads:g} KV heads x {self.width} in {self.dtype}"


def model_kv(config: Config, dtype: str | None = None) -> ModelKv:
    """Reads a config; `dtype` is the KV's where it differs from the weights'."""
    text = _text_config(config)
    _refuse(config, text)
    layers = _integer(text, _LAYERS, "layers")
    notes: list[str] = []
    element = _dtype(config, text, dtype, notes)
    shared = text.get("num_kv_shared_layers") or 0
    if shared:
        notes.append(f"the last {shared} of {layers} layers use the KV of earlier ones")
        layers -= int(shared)
    if _windows(text):
        notes.append("layers with a sliding window are counted in full: all positions are sent")
    if text.get("kv_lora_rank"):
        latent = _integer(text, ("kv_lora_rank",), "latent size")
        latent += _integer(text, ("qk_rope_head_dim",), "size of the roped key")
        notes.append("latent attention (MLA): one vector a layer; the engine doesn't serve it yet")
        return ModelKv(layers, layers, latent, element, latent=True, notes=tuple(notes))
    heads = _kv_heads(text, layers)
    return ModelKv(layers, 2 * heads, _head_dim(text), element, notes=tuple(notes))


def _text_config(config: Config) -> Config:
    """Models that also see or hear have the language model's config inside."""
    for key in ("text_config", "llm_config", "language_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return inner
    return config


def _refuse(config: Config, text: Config) -> None:
    kind = str(text.get("model_type") or config.get("model_type") or "")
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        raise UnknownGeometry("an encoder-decoder model has a second cache, which isn't estimated")
    recurrent = any(name in kind for name in _RECURRENT) or any(k in text for k in _RECURRENT_KEYS)
    if recurrent:
        raise UnknownGeometry(
            f"model type {kind!r} keeps a recurrent state in some layers, which is not KV"
        )
    others = set(text.get("layer_types") or ()) - _ATTENTION
    if others:
        raise UnknownGeometry(f"layers of type {', '.join(sorted(map(str, others)))} keep no KV")
    if text.get("block_configs"):
        raise UnknownGeometry("its layers differ from one another (block_configs)")


def _dtype(config: Config, text: Config, asked: str | None, notes: list[str]) -> str:
    named = asked
    for source in (text, config):
        named = named or source.get("dtype") or source.get("torch_dtype")
    if named is None:
        notes.append("the config names no dtype: two bytes an element are assumed")
        return "float16"
    named = str(named).removeprefix("torch.")
    if named not in ELEMENT_BYTES:
        raise UnknownGeometry(f"dtype {named!r} of the KV: say which ({', '.join(ELEMENT_BYTES)})")
    return named


def _windows(text: Config) -> bool:
    types = text.get("layer_types")
    if types:
        return any(t != "full_attention" and t != "attention" for t in types)
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def _kv_heads(text: Config, layers: int) -> int:
    """KV heads of all layers together."""
    nested = text.get("attn_config")
    if isinstance(nested, Mapping) and nested.get("kv_n_heads"):  # MPT, DBRX
        return layers * _integer(nested, ("kv_n_heads",), "KV heads")
    if text.get("multi_query_attention") and text.get("multi_query_group_num"):  # ChatGLM
        return layers * _integer(text, ("multi_query_group_num",), "KV heads")
    grouped = text.get("new_decoder_architecture")  # Falcon: overrides multi_query
    if text.get("multi_query") and not grouped:  # Falcon-7B, StarCoder
        return layers
    for key in _KV_HEADS:
        named = text.get(key)
        if isinstance(named, list):  # OpenELM: each layer its own
            if len(named) != layers or not all(_is_count(n) for n in named):
                raise UnknownGeometry(f"{key} has {len(named)} entries for {layers} layers")
            return sum(named)
        if named is not None:
            return layers * _integer(text, (key,), "KV heads")
    return layers * _integer(text, _HEADS, "attention heads")


def _head_dim(text: Config) -> int:
    for key in _HEAD_DIM:
        if text.get(key) is not None:
            return _integer(text, (key,), "head size")
    hidden, heads = _integer(text, _HIDDEN, "hidden size"), _integer(text, _HEADS, "heads")
    size, rest = divmod(hidden, heads)
    if rest:
        raise UnknownGeometry(f"no head_dim, and hidden size {hidden} isn't {heads} whole heads")
    return size


def _integer(config: Config, keys: tuple[str, ...], what: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if not _is_count(value):
                raise UnknownGeometry(f"{key} = {value!r}: must be a positive whole number")
            return int(value)
    raise UnknownGeometry(f"the config doesn't say its {what} ({', '.join(keys)})")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
