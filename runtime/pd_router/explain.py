"""Why a request went where it went, in one line and in figures. Pure."""

from collections.abc import Sequence

from pd_router.costs import Prefill
from pd_router.fleet import Role, WorkerView

_SHOWN = 4  # candidates that a reason names


def named(texts: Sequence[str]) -> str:
    more = f", {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more


def decode_reason(decode: WorkerView, costs: Sequence[tuple[WorkerView, float]], why: str) -> str:
    if not costs:
        return f"decode {decode.id.name}: {why}"
    listed = named([f"{w.id.name} {s:.3f} s at {_share(w)} KV" for w, s in costs])
    return f"decode {decode.id.name}: {why} of {listed}"


def prefill_reason(
    prefill: Prefill, ways: Sequence[tuple[Prefill, float]], prompt_tokens: int, at_home: bool
) -> str:
    listed = named([f"{p.worker.id.name} {s:.3f} s" for p, s in ways])
    cached = prompt_tokens - prefill.compute_tokens
    why = "its new prefix belongs there, soon enough" if at_home else "first token soonest"
    return f"prefill {prefill.worker.id.name}: {why} of {listed} ({cached} cached)"


def local_reason(
    decode: WorkerView,
    prefillers: Sequence[WorkerView],
    partners: Sequence[WorkerView],
    ttft_s: float,
    disaggregate: str,
) -> str:
    if decode.role is Role.BOTH:
        return "prefill there too: its role is both"
    if disaggregate == "never":
        return "prefill there too: disaggregation is switched off"
    if not prefillers:
        return "prefill there too: no prefill worker is usable"
    if not partners:
        return f"prefill there too: none of {named([w.id.name for w in prefillers])} can serve it"
    return f"prefill there too: first token sooner, {ttft_s:.3f} s"


def _share(worker: WorkerView) -> str:
    return f"{worker.kv_used / worker.kv_blocks:.0%}"
