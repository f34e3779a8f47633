"""Small random models of each family that is served, and what transformers writes with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pd_engine.types import Guide

_SMALL: dict[str, Any] = {
    "vocab_size": 512,  # as many as the tiny model's tokenizer knows
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 12, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": _WINDOW,
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 8},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "mixtral": _EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24},
    "gpt_oss": _WINDOW | {"num_local_experts": 4},
    "gpt2": {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


def make_model(family: str, folder: Path) -> None:
    """The same one each time."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **(_SMALL | FAMILIES.get(family, {})))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)


def greedy(
    folder: Path, ids: Sequence[int], count: int, guide: Guide | None = None, eos: int | None = None
) -> list[int]:
    """The likeliest tokens, of those that `guide` allows, without any cache, by the definition
    in transformers. Ends behind `eos`."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = list(ids)
    with torch.inference_mode():
        while len(tokens) < len(ids) + count and (eos is None or tokens[-1] != eos):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            if guide is not None:
                mask = guide.mask(())
                assert mask is not None
                allowed = [bool(mask[t // 8] >> t % 8 & 1) for t in range(len(logits))]
                logits = logits.masked_fill(~torch.tensor(allowed), -torch.inf)
            tokens.append(int(logits.argmax()))
            if guide is not None:
                guide.note(tokens[-1])
    return tokens[len(ids) :]
