"""The KV geometry of well-known models, for estimates without their files.

Numbers are those of each model's config.json on huggingface.co, in the repository that the
comment names (read in 2025); parameters as its model card gives them, for a mixture of
experts those that one token uses.
"""

from dataclasses import dataclass

from pd_core.geometry import ModelKv


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    kv: ModelKv
    active_parameters: float
    """What a token's computation costs: about two operations each."""


def _grouped(layers: int, kv_heads: int, head_dim: int, dtype: str = "bfloat16") -> ModelKv:
    return ModelKv(layers, 2 * layers * kv_heads, head_dim, dtype)


_MLA = ("latent attention (MLA): one vector a layer; the engine doesn't serve it yet",)
_SLIDING = ("layers with a sliding window are counted in full: all positions are sent",)


def _sliding(layers: int, kv_heads: int, head_dim: int) -> ModelKv:
    return ModelKv(layers, 2 * layers * kv_heads, head_dim, "bfloat16", notes=_SLIDING)


_MODELS = (
    KnownModel("llama-2-7b", _grouped(32, 32, 128, "float16"), 6.7e9),  # meta-llama/Llama-2-7b-hf
    KnownModel("llama-2-13b", _grouped(40, 40, 128, "float16"), 13e9),  # meta-llama/Llama-2-13b-hf
    KnownModel("llama-2-70b", _grouped(80, 8, 128, "float16"), 69e9),  # meta-llama/Llama-2-70b-hf
    KnownModel("llama-3-8b", _grouped(32, 8, 128), 8.0e9),  # meta-llama/Meta-Llama-3-8B
    KnownModel("llama-3-70b", _grouped(80, 8, 128), 70.6e9),  # meta-llama/Meta-Llama-3-70B
    KnownModel("llama-3.1-8b", _grouped(32, 8, 128), 8.0e9),  # meta-llama/Llama-3.1-8B
    KnownModel("llama-3.1-70b", _grouped(80, 8, 128), 70.6e9),  # meta-llama/Llama-3.1-70B
    KnownModel("llama-3.1-405b", _grouped(126, 8, 128), 405e9),  # meta-llama/Llama-3.1-405B
    KnownModel("llama-3.3-70b", _grouped(80, 8, 128), 70.6e9),  # meta-llama/Llama-3.3-70B-Instruct
    KnownModel("mistral-7b", _sliding(32, 8, 128), 7.2e9),  # mistralai/Mistral-7B-v0.1
    KnownModel("mixtral-8x7b", _grouped(32, 8, 128), 12.9e9),  # mistralai/Mixtral-8x7B-v0.1
    KnownModel("qwen2.5-7b", _grouped(28, 4, 128), 7.6e9),  # Qwen/Qwen2.5-7B
    KnownModel("qwen2.5-32b", _grouped(64, 8, 128), 32.5e9),  # Qwen/Qwen2.5-32B
    KnownModel("qwen2.5-72b", _grouped(80, 8, 128), 72.7e9),  # Qwen/Qwen2.5-72B
    KnownModel("qwen3-8b", _grouped(36, 8, 128), 8.2e9),  # Qwen/Qwen3-8B
    KnownModel("qwen3-32b", _grouped(64, 8, 128), 32.8e9),  # Qwen/Qwen3-32B
    KnownModel("gemma-2-9b", _sliding(42, 8, 256), 9.2e9),  # google/gemma-2-9b
    KnownModel("gemma-3-27b", _sliding(62, 16, 128), 27e9),  # google/gemma-3-27b-it
    KnownModel("phi-4", _grouped(40, 10, 128), 14.7e9),  # microsoft/phi-4
    KnownModel("falcon-7b", _grouped(32, 1, 64), 7e9),  # tiiuae/falcon-7b: multi-query
    KnownModel("gpt-oss-120b", _sliding(36, 8, 64), 5.1e9),  # openai/gpt-oss-120b
    KnownModel("smollm2-135m", _grouped(30, 3, 64), 135e6),  # HuggingFaceTB/SmolLM2-135M
    # deepseek-ai/DeepSeek-V3: kv_lora_rank 512 and a roped key of 64
    KnownModel("deepseek-v3", ModelKv(61, 61, 576, "bfloat16", latent=True, notes=_MLA), 37e9),
)
KNOWN_MODELS = {model.name: model for model in _MODELS}

_ENDINGS = ("-hf", "-instruct", "-chat", "-it", "-base", "-v0.1", "-v0.2", "-v0.3")


def find(name: str) -> KnownModel | None:
    """By its name, as people write it: with or without the organisation and `-Instruct`."""
    short = name.lower().rpartition("/")[2].removeprefix("meta-")
    ending: str | None = ""
    while ending is not None:
        if short in KNOWN_MODELS:
            return KNOWN_MODELS[short]
        ending = next((e for e in _ENDINGS if short.endswith(e)), None)
        short = short.removesuffix(ending or "")
    return None
