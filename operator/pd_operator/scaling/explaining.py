"""PURE. Decisions as JSON lines, and such lines for people: what a pool was given and why."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pd_operator.scaling.types import Decision, Numbers

_MARK = '{"scaling":'


@dataclass(frozen=True, slots=True)
class Told:
    """One decision about one pool."""

    time: str
    cluster: str
    pool: str
    before: int
    after: int
    reason: str
    message: str = ""
    numbers: Numbers = field(default_factory=dict)


def told(cluster: str, pool: str, before: int, decision: Decision, time: str) -> Told:
    return Told(
        time, cluster, pool, before, decision.replicas, decision.reason, decision.message,
        decision.numbers,
    )  # fmt: skip


def line(one: Told) -> str:
    """As it stands in a log; numbers to four digits."""
    numbers = {name: float(f"{value:.4g}") for name, value in one.numbers.items()}
    said = {
        "time": one.time, "cluster": one.cluster, "pool": one.pool, "from": one.before,
        "to": one.after, "reason": one.reason, "message": one.message, "numbers": numbers,
    }  # fmt: skip
    return json.dumps({"scaling": said}, separators=(", ", ": ")).replace(
        '{"scaling": ', _MARK + " ", 1
    )


def read(text: str) -> Told | None:
    """From any line of a log; None when it tells of no decision."""
    start = text.find(_MARK)
    if start < 0:
        return None
    try:
        said = json.loads(text[start:])["scaling"]
        return Told(
            str(said["time"]), str(said["cluster"]), str(said["pool"]), int(said["from"]),
            int(said["to"]), str(said["reason"]), str(said["message"]), _numbers(said["numbers"]),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _numbers(said: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in said.items()}


def sentences(one: Told) -> list[str]:
    """The decision, then how it came about."""
    return [f"{one.time}  {_head(one)}", *(f"    {part}" for part in _details(one))]


def entry(one: Told) -> dict[str, Any]:
    """The same as JSON, as routers are told it (`pd_router.sizes`)."""
    return {
        "time": one.time, "pool": one.pool, "to": one.after, "reason": one.reason,
        "text": _head(one), "details": _details(one),
    }  # fmt: skip


def kept_entry(pool: str, decision: Mapping[str, Any]) -> dict[str, Any]:
    """Likewise, of what a status keeps: the last change, and nothing of what was before it."""
    why = _WHY.get(decision["reason"], decision["reason"])
    message = decision.get("message")
    return {
        "time": decision["time"], "pool": pool, "to": decision["replicas"],
        "reason": decision["reason"], "text": f"{pool} to {decision['replicas']}: {why}",
        "details": [message] if message else [],
    }  # fmt: skip


def _head(one: Told) -> str:
    moved = one.after != one.before
    size = f"from {one.before} to {one.after}" if moved else f"stays at {one.after}"
    return f"{one.pool} {size}: {_WHY.get(one.reason, one.reason)}"


def _details(one: Told) -> list[str]:
    parts = (_demand(one.numbers), _capacity(one.numbers), _outcome(one.numbers))
    return [part for part in parts if part] or ([one.message] if one.message else [])


_WHY = {
    "MoreDemand": "more demand than its workers can meet within the target",
    "Burst": "the last seconds alone ask for far more workers",
    "LessDemand": "nothing has asked for so many for a whole window",
    "AtTarget": "that is what it needs",
    "Stabilizing": "it needs fewer, but not for a whole window yet",
    "StepLimit": "the last change is too recent for another",
    "AtMaximum": "it needs more, and has its maximum",
    "OutOfBounds": "its bounds say so",
    "Budget": "the GPU budget is spent",
    "Ratio": "the ratio of prefill to decode says so",
    "PartialData": "not all routers and workers answer: none goes",
    "NoData": "routers tell nothing",
    "StaleData": "routers have told nothing lately",
    "NoCapacityYet": "no worker has shown yet what it can do",
    "FixedReplicas": "its size is fixed",
}


def _demand(n: Numbers) -> str:
    if "demand" not in n:
        return ""
    unit = "output tokens/s" if "sequences_per_s" in n else "tokens/s"
    return (
        f"demand: {n['demand']:.3g} {unit} now, {n['level']:.3g} without chance, "
        f"x{n['growth']:.2f} by its slope and x{n['margin']:.2f} for what forecasts have missed "
        f"within {n['horizon_s']:.0f} s (a worker's start and half a window)"
    )


def _capacity(n: Numbers) -> str:
    if "concurrency" in n:
        return (
            f"capacity: {n['concurrency']:.3g} sequences at once, {n['batch']:.3g} a worker by "
            f"TPOT and KV, whose steps take {n['step_s'] * 1000:.3g} ms"
        )
    if "service_s" in n:
        return (
            f"capacity: {n['speed']:.3g} tokens/s a worker; a prompt takes {n['service_s']:.3g} s "
            f"on average, with a variation of {n['service_variation']:.2g}; {n['load']:.3g} "
            f"workers are kept busy; {n['backlog_tokens']:.3g} tokens wait"
        )
    return ""


def _outcome(n: Numbers) -> str:
    if "needed" not in n:
        return ""
    text = (
        f"needed: {n['needed']:.0f} workers, {n['needed_burst']:.0f} for the last seconds, "
        f"{n['needed_before_fall']:.0f} before one may go, {n['ceiling']:.0f} in the last window"
    )
    if "correction" in n:
        late = f", {n['late']:.1%} were late in the last minute" if "late" in n else ""
        text += f"; x{n['correction']:.2f} by what users got{late}"
    if "used" in n:
        text += f"; {n['used']:.0%} of the lateness that is allowed is used up"
    if n.get("infeasible"):
        text += "; one request alone misses the target: no number of workers meets it"
    return text
