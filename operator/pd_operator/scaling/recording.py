"""PURE. What a decision was made from, as a JSON line, and the same decisions from it again.

A recording holds each look since an operator's start: the time, what the object said, what
routers told, and what was decided. Replayed from its first line it gives the same decisions,
by whatever version of `decide` there is: so a decision that looks odd can be looked into.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pd_operator.api import Role
from pd_operator.measured import (
    Counters,
    RouterReading,
    Samples,
    Sketch,
    WorkerReading,
    lengths,
)
from pd_operator.scaling.decide import State, decide
from pd_operator.scaling.rates import History, extend, observe
from pd_operator.scaling.spec import longest_window_s
from pd_operator.scaling.types import Decision, PoolSpec, Ratio, Spec, Target

_SKETCHES = ("ttft", "tpot", "own_ttft", "uncached")


class BadRecording(ValueError):
    """A line that isn't one; the message says which."""


@dataclass(frozen=True, slots=True)
class Look:
    """Everything that a decision depends on, but what was remembered from looks before."""

    cluster: str
    now: float
    spec: Spec
    samples: Samples


@dataclass(frozen=True, slots=True)
class Replayed:
    """`same`: whether the sizes and reasons are those that were recorded."""

    look: Look
    decisions: Mapping[Role, Decision]
    same: bool


def to_json(look: Look, decisions: Mapping[Role, Decision]) -> dict[str, Any]:
    """JSON-ready: no NaN, no infinity."""
    spec = asdict(look.spec)
    if math.isinf(look.spec.ratio.high):
        spec["ratio"]["high"] = None
    return {
        "cluster": look.cluster,
        "now": look.now,
        "spec": spec,
        "samples": asdict(look.samples),
        "decided": _decided(decisions),
    }


def from_json(data: Mapping[str, Any]) -> Look:
    try:
        return Look(
            str(data["cluster"]), float(data["now"]), _spec(data["spec"]), _samples(data["samples"])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRecording(f"{type(error).__name__}: {error}") from None


def replay(lines: Iterable[Mapping[str, Any]]) -> Iterator[Replayed]:
    """Each cluster's looks in order, from what nobody remembers anything of."""
    memories: dict[str, tuple[History, State]] = {}
    for number, line in enumerate(lines, 1):
        try:
            look = from_json(line)
        except BadRecording as error:
            raise BadRecording(f"line {number}: {error}") from None
        history, state = memories.get(look.cluster, (History(), State()))
        history = extend(history, look.samples, longest_window_s(look.spec))
        state, decisions = decide(look.spec, observe(history, look.spec), state, look.now)
        memories[look.cluster] = history, state
        yield Replayed(look, decisions, line.get("decided") == _decided(decisions))


def _decided(decisions: Mapping[Role, Decision]) -> dict[str, Any]:
    return {role.value: [one.replicas, one.reason] for role, one in decisions.items()}


def _spec(data: Mapping[str, Any]) -> Spec:
    ratio = data["ratio"]
    high = math.inf if ratio["high"] is None else float(ratio["high"])
    return Spec(
        tuple(_pool(one) for one in data["pools"]), data["gpus"], Ratio(float(ratio["low"]), high)
    )


def _pool(data: Mapping[str, Any]) -> PoolSpec:
    targets = {name: Target(**data[name]) if data[name] else None for name in ("ttft", "tpot")}
    return PoolSpec(**{**data, "role": Role(data["role"]), **targets})


def _samples(data: Mapping[str, Any]) -> Samples:
    routers = (RouterReading(**{**r, "counters": _counters(r["counters"])})
               for r in data["routers"])  # fmt: skip
    return Samples(
        **{name: _sketch(data[name]) for name in _SKETCHES},
        routers=tuple(routers),
        workers=tuple(WorkerReading(**one) for one in data["workers"]),
        silent=int(data["silent"]),
    )


def _counters(data: Mapping[str, Any]) -> Counters:
    return Counters(**{**data, "lengths": lengths(data.get("lengths", {}))})


def _sketch(data: Mapping[str, int]) -> Sketch:
    return {int(bucket): int(count) for bucket, count in data.items()}
