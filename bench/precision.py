"""What bfloat16 changes: next tokens against float32, and perplexity against transformers in
the same type."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.models import load_tokenizer, prompt_of, story
from pd_engine.runner import Runner
from pd_engine.types import Row, SampleSpec, Sampling

_BLOCK_TOKENS = 16
_PROMPT_TOKENS = 100
# Two tokens that float32 itself finds nearly as likely are no difference.
_TIE = 1e-3


def logits(runner: Runner, ids: Sequence[int]) -> torch.Tensor:
    """Behind each token of a text: [tokens, vocabulary], float32."""
    blocks = range(-(-len(ids) // _BLOCK_TOKENS))
    sample = SampleSpec(0, 0, Sampling(max_tokens=1))
    with torch.inference_mode():
        row = Row(0, ids, 0, blocks, (sample,), drafts=len(ids) - 1)
        return runner._forward((row,), None).float()


def agreement(exact: torch.Tensor, other: torch.Tensor) -> float:
    """The share of positions with the same likeliest token; ties count as the same."""
    top = exact.topk(2)
    tied = top.values[:, 0] - top.values[:, 1] <= _TIE
    same = other.argmax(-1) == top.indices[:, 0]
    return float((same | tied).float().mean())


def perplexity(found: torch.Tensor, ids: Sequence[int]) -> float:
    """Of a text under the logits behind each of its tokens."""
    loss = torch.nn.functional.cross_entropy(found[:-1], torch.tensor(ids[1:]))
    return float(loss.exp())


def theirs(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return found


def bfloat16(folder: Path, prompts: int, text_tokens: int) -> tuple[float, float]:
    """(share of next tokens as in float32, perplexity against that of transformers)."""
    tokenizer = load_tokenizer(folder)

    def runner(dtype: str) -> Runner:
        room = max(text_tokens, _PROMPT_TOKENS) + _BLOCK_TOKENS
        return Runner(folder, dtype=dtype, kv_cache_tokens=room, threads=torch.get_num_threads())

    exact, low = runner("float32"), runner("bfloat16")
    shares = []
    for number in range(prompts):
        ids = tokenizer.encode(prompt_of(tokenizer, _PROMPT_TOKENS, number)).ids
        shares.append(agreement(logits(exact, ids), logits(low, ids)))
    ids = tokenizer.encode(story(1, text_tokens // 50)).ids[:text_tokens]
    ratio = perplexity(logits(low, ids), ids) / perplexity(theirs(folder, ids), ids)
    return sum(shares) / len(shares), ratio
