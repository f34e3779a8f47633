"""The scheduler's limits, and what they mean for one request. Pure."""

from dataclasses import dataclass

from pd_core.failures import FailureKind, RequestFailure
from pd_engine.blocks import BlockPool
from pd_engine.sequence import Sequence
from pd_engine.types import Mode, Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits. `chunk_tokens` = 0 computes each prompt whole, however long it is."""

    max_batch_tokens: int  # tokens a step
    chunk_tokens: int  # tokens of one prompt a step
    max_running: int  # sequences
    max_queued: int  # requests that wait to be admitted
    max_model_tokens: int  # prompt and output
    recompute_max_tokens: int  # a preempted sequence that is longer goes back to the router
    decode_reserve_tokens: int = 256  # a grant covers so many tokens of output
    draft_tokens: int = 0  # guesses a step for one sequence; a grant covers them too
    patience_s_per_token: float = 0.0  # see `due`
    draft_price: float = 1.0  # what a token more costs, where a step of one token costs 1,
    draft_price_per_token: float = 0.0  # and this for each token that stands before it

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_queued", "max_model_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in (
            "chunk_tokens",
            "recompute_max_tokens",
            "decode_reserve_tokens",
            "draft_tokens",
            "draft_price",
            "draft_price_per_token",
            "patience_s_per_token",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        if self.max_running > self.max_batch_tokens:
            raise ValueError(
                f"max_running = {self.max_running}: at most max_batch_tokens"
                f" ({self.max_batch_tokens}), or some would never get a token into a step"
            )


def due(req: Request, cfg: SchedulerConfig, now: float) -> float:
    """When a prompt that comes `now` goes ahead of whatever comes later, however short that is.

    A short prompt is due soon, a long one in proportion: so the short one doesn't wait for
    the whole of the long one, and the long one is late by so much at most. What only waits
    for KV is due at once.
    """
    patience_s = 0.0 if req.mode is Mode.IMPORT else cfg.patience_s_per_token
    return now + patience_s * len(req.token_ids)


def token_limit(req: Request, cfg: SchedulerConfig, pool: BlockPool) -> int:
    """The most tokens, prompt and output, that a sequence of this request may reach.

    Raises RequestFailure when nothing could be generated at all.
    """
    tokens = len(req.token_ids)
    if not 1 <= req.prompt_tokens <= tokens:
        raise RequestFailure(FailureKind.INVALID_REQUEST, "the prompt is empty")
    if not req.choices or len(set(req.choices)) < len(req.choices):
        raise RequestFailure(FailureKind.INVALID_REQUEST, f"choices {req.choices}")
    if req.sampling.max_tokens <= req.first_index:
        raise RequestFailure(
            FailureKind.INVALID_REQUEST,
            f"max_tokens = {req.sampling.max_tokens} with {req.first_index} tokens written:"
            " nothing is left to generate",
        )
    if tokens >= cfg.max_model_tokens:
        raise RequestFailure(
            FailureKind.CONTEXT_TOO_LONG,
            f"{tokens} tokens and at least one to generate exceed the context of"
            f" {cfg.max_model_tokens} tokens",
        )
    if tokens > pool.tokens:
        raise RequestFailure(
            FailureKind.POOL_TOO_SMALL,
            f"{tokens} tokens need {pool.blocks_for(tokens)} KV blocks, but this worker has"
            f" {pool.num_blocks} of {pool.block_tokens} tokens each ({pool.tokens} tokens)",
        )
    if req.mode is Mode.EXPORT:  # decoding is bounded where it happens
        return cfg.max_model_tokens
    return min(cfg.max_model_tokens, pool.tokens + 1)  # the last token needs no KV


def short_of_kv(context_tokens: int, pool_tokens: int) -> str:
    """What to say of a pool that can't hold the longest request; "" when it can."""
    if context_tokens <= pool_tokens + 1:  # the last token needs no KV
        return ""
    return (
        f"the KV cache holds {pool_tokens} tokens, fewer than the context of {context_tokens}:"
        " longer prompts are refused, answers end there; a larger kvCacheTokens or kvCacheFraction"
        " takes them, a smaller maxModelLen says so to clients"
    )


def grant_reserve(seq: Sequence, cfg: SchedulerConfig, pool: BlockPool) -> int:
    """Blocks beside the prompt's for what an IMPORT will decode, as far as the pool has them.

    Of several choices, each gets one for its copy of a last block that isn't full.
    """
    prompt = len(seq.tokens)
    decoded = seq.task.final_tokens - prompt - 1  # the last token needs no KV
    if decoded == 0:
        return 0
    end = pool.blocks_for(prompt + min(decoded, cfg.decode_reserve_tokens + cfg.draft_tokens))
    begin = prompt // pool.block_tokens if seq.slots > 1 else pool.blocks_for(prompt)
    return min(seq.slots * (end - begin), pool.num_blocks - pool.blocks_for(prompt))
