"""Which workers serve a request: a decode worker first, then a prefill worker for it. Pure.

Least KV in use decides for decode, least tokens to compute for prefill; ties go to the
lower ordinal, which scale-in takes last. Says why in one line.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pd_router.fleet import Role, WorkerId, WorkerView

_SHOWN = 4  # candidates that a reason names
_DECODE_RESERVE_TOKENS = 256

CachedTokens = Callable[[WorkerView], int]
"""Tokens at this prompt's start that a worker has already."""


@dataclass(slots=True)
class Exclusions:
    """What a request has learned from its earlier attempts.

    `barred` workers get it no more; `disliked` ones only when there is nobody else;
    `pairs` (decode, prefill) don't understand each other.
    """

    barred: set[WorkerId] = field(default_factory=set)
    disliked: set[WorkerId] = field(default_factory=set)
    pairs: set[tuple[WorkerId, WorkerId]] = field(default_factory=set)

    def copy(self) -> "Exclusions":
        return Exclusions(set(self.barred), set(self.disliked), set(self.pairs))


@dataclass(frozen=True, slots=True)
class Need:
    """What an attempt takes: tokens to hold at its start, and what may follow."""

    tokens: int  # prompt and tokens already out
    output_tokens: int  # still to come, a choice
    choices: int = 1

    def reserve_blocks(self, worker: WorkerView) -> int:
        """Blocks that the worker will reserve for it."""
        reserve = min(self.output_tokens, _DECODE_RESERVE_TOKENS)
        shared = self.tokens // worker.block_tokens
        each = worker.blocks_for(self.tokens + reserve) - shared
        return shared + each * self.choices


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt goes. No prefill worker: the decode worker computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None
    blocks: int  # that decode will reserve
    compute_tokens: int  # uncached prompt tokens for whoever prefills
    reason: str


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No worker can take it now. `barred`: there are some, but the request has used them up."""

    reason: str
    barred: bool = False


def place(
    need: Need,
    workers: Iterable[WorkerView],
    cached_tokens: CachedTokens,
    exclusions: Exclusions,
    decode_at: WorkerId | None = None,
) -> Placement | Unplaced:
    """Chooses decode (unless it's given), then prefill. O(workers)."""
    usable = [w for w in workers if w.usable]
    decoders = [
        w
        for w in usable
        if w.role is not Role.PREFILL
        and w.holds(need.tokens)
        and (decode_at is None or w.id == decode_at)
    ]
    if not decoders:
        return Unplaced(_why_no_decoder(usable, need))
    open_to_us = [w for w in decoders if w.id not in exclusions.barred]
    if not open_to_us:
        names = ", ".join(w.id.name for w in decoders[:_SHOWN])
        return Unplaced(f"every decode worker has refused this request ({names})", barred=True)
    prefillers = [w for w in usable if w.role is Role.PREFILL and w.holds(need.tokens)]
    decode = min(open_to_us, key=lambda w: _decode_key(w, need, prefillers, exclusions))
    decode_text = _decode_reason(decode, open_to_us)
    partners = _partners(decode, prefillers, exclusions)
    if not partners:
        compute = need.tokens - cached_tokens(decode)
        why = _why_no_prefill(decode, prefillers)
        return Placement(
            decode.id, None, need.reserve_blocks(decode), compute, f"{decode_text}; {why}"
        )
    work = {w.id: need.tokens - cached_tokens(w) for w in partners}
    prefill = min(partners, key=lambda w: _prefill_key(w, decode, work[w.id]))
    reason = f"{decode_text}; {_prefill_reason(prefill, partners, work, need.tokens)}"
    return Placement(decode.id, prefill.id, need.reserve_blocks(decode), work[prefill.id], reason)


def compatible(decode: WorkerView, prefill: WorkerView) -> bool:
    """Whether one's KV blocks are the other's."""
    return decode.model_hash == prefill.model_hash and decode.layout_hash == prefill.layout_hash


def pair_usable(workers: Iterable[WorkerView]) -> bool:
    """Whether a request would find workers: who decodes can prefill as well."""
    return any(w.usable and w.role is not Role.PREFILL for w in workers)


def _partners(
    decode: WorkerView, prefillers: Sequence[WorkerView], exclusions: Exclusions
) -> list[WorkerView]:
    if decode.role is Role.BOTH:
        return []
    return [
        w
        for w in prefillers
        if compatible(decode, w)
        and w.id not in exclusions.barred
        and w.id not in exclusions.disliked
        and (decode.id, w.id) not in exclusions.pairs
    ]


def _decode_key(
    worker: WorkerView, need: Need, prefillers: Sequence[WorkerView], exclusions: Exclusions
) -> tuple[bool, bool, int, float, int, int]:
    """Smallest wins. A decode worker without a prefill partner would have to stop its
    streams for the prompt, so it comes after those that have one."""
    alone = worker.role is Role.DECODE and not any(compatible(worker, p) for p in prefillers)
    used = (worker.kv_used + need.reserve_blocks(worker)) / worker.kv_blocks
    return (
        worker.id in exclusions.disliked,
        alone,
        worker.load.waiting_grants,
        round(used, 3),
        worker.running,
        worker.ordinal,
    )


def _prefill_key(
    worker: WorkerView, decode: WorkerView, compute_tokens: int
) -> tuple[bool, int, int]:
    return (
        worker.revision != decode.revision,
        worker.pending_tokens + compute_tokens,
        worker.ordinal,
    )


def _kv_share(worker: WorkerView) -> str:
    return f"{worker.id.name} {worker.kv_used / worker.kv_blocks:.0%}"


def _listed(texts: Sequence[str]) -> str:
    more = f", {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def _decode_reason(decode: WorkerView, candidates: Sequence[WorkerView]) -> str:
    shares = _listed([_kv_share(w) for w in candidates])
    return f"decode {decode.id.name}: least KV in use of {shares}"


def _prefill_reason(
    prefill: WorkerView,
    partners: Sequence[WorkerView],
    work: dict[WorkerId, int],
    prompt_tokens: int,
) -> str:
    loads = _listed([f"{w.id.name} {w.pending_tokens + work[w.id]}" for w in partners])
    cached = prompt_tokens - work[prefill.id]
    return f"prefill {prefill.id.name}: least tokens to compute of {loads} ({cached} cached)"


def _why_no_prefill(decode: WorkerView, prefillers: Sequence[WorkerView]) -> str:
    if decode.role is Role.BOTH:
        return "prefill there too: its role is both"
    if not prefillers:
        return "prefill there too: no prefill worker is usable"
    return f"prefill there too: none of {_listed([w.id.name for w in prefillers])} can serve it"


def _why_no_decoder(usable: Sequence[WorkerView], need: Need) -> str:
    decoders = [w for w in usable if w.role is not Role.PREFILL]
    if not decoders:
        return "no decode worker is usable"
    return f"no usable decode worker can hold {need.tokens} tokens and more"
