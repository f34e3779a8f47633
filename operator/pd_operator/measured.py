"""PURE. What routers measured, and what workers told them. "No data" is a value, never a zero.

A router's document (`pd_router.signals`) becomes a reading: counters since its process began,
with the time at which they were read. Rates come from two of them (`scaling.rates`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from pd_core import sketch

Sketch = Mapping[int, int]


class Length(NamedTuple):
    """Of prompts of about one length: sequences, and the tokens that ended ones put out."""

    arrived: float = 0
    ended: float = 0
    tokens: float = 0


@dataclass(frozen=True, slots=True)
class Counters:
    """Since a router's process began; as `pd_router.signals.Counters`."""

    arrived_requests: float = 0
    arrived_sequences: float = 0
    arrived_tokens: float = 0
    unread_requests: float = 0
    started_requests: float = 0
    started_tokens: float = 0
    uncached_tokens: float = 0
    overhead_s: float = 0
    ended_sequences: float = 0
    ended_tokens: float = 0
    uncached_squared: float = 0
    uncached_cubed: float = 0
    prefill_s: float = 0
    prefill_token_s: float = 0
    lengths: Mapping[int, Length] = field(default_factory=dict)
    """By the power of two that a prompt's tokens are below; an older router tells none."""


_LATER = ("uncached_squared", "uncached_cubed", "prefill_s", "prefill_token_s")
"""Counters that routers of an older version don't have: they teach nothing then."""
_COUNTED = tuple(one.name for one in fields(Counters) if one.name != "lengths")
_MOST_LENGTHS = 64


@dataclass(frozen=True, slots=True)
class RouterReading:
    """One router at one moment. `process` changes when it restarts. `clients`: how many have an
    API key; None where nobody needs one, or an older router doesn't tell."""

    process: str
    read_at: float
    uptime_s: float
    counters: Counters
    queued_requests: float = 0
    queued_tokens: float = 0
    queued_sequences: float = 0
    held_requests: float = 0
    clients: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """What a worker last said of itself, to whichever router. `heard_at` is on our clock."""

    worker: str
    epoch: str
    role: str
    heard_at: float
    heartbeats: float = 0
    draining: bool = False
    usable: bool = False
    kv_tokens: float = 0
    kv_used_tokens: float = 0
    max_running: float = 0
    prefill_tokens_per_s: float = 0
    running: float = 0
    waiting_grants: float = 0
    pending_tokens: float = 0
    steps: float = 0
    busy_s: float = 0
    computed_tokens: float = 0


@dataclass(frozen=True, slots=True)
class Samples:
    """All routers together. Sketches are bucket counts of the last minute; empty is "no data".

    `silent` routers were asked and gave no reading: then sums are lower bounds.
    """

    ttft: Sketch = field(default_factory=dict)
    tpot: Sketch = field(default_factory=dict)
    own_ttft: Sketch = field(default_factory=dict)  # without the wait for decode's grant
    uncached: Sketch = field(default_factory=dict)  # tokens to compute, a request
    routers: tuple[RouterReading, ...] = ()
    workers: tuple[WorkerReading, ...] = ()
    silent: int = 0

    def ttft_s(self, percentile: float) -> float | None:
        return sketch.quantile(self.ttft, percentile / 100)

    def tpot_s(self, percentile: float) -> float | None:
        return sketch.quantile(self.tpot, percentile / 100)

    @property
    def locked(self) -> bool | None:
        """Whether nobody has a key to any router; None: no router tells."""
        told = [one.clients for one in self.routers if one.clients is not None]
        return not any(told) if told else None

    @property
    def read_at(self) -> float | None:
        """When the newest reading was taken; None without any."""
        return max((one.read_at for one in self.routers), default=None)


def merge(many: Sequence[Samples]) -> Samples:
    """The samples of several routers as those of one."""
    newest: dict[str, WorkerReading] = {}
    for worker in (worker for one in many for worker in one.workers):
        known = newest.get(worker.worker)
        if known is None or worker.heard_at > known.heard_at:
            newest[worker.worker] = worker
    return Samples(
        ttft=sketch.merge(one.ttft for one in many),
        tpot=sketch.merge(one.tpot for one in many),
        own_ttft=sketch.merge(one.own_ttft for one in many),
        uncached=sketch.merge(one.uncached for one in many),
        routers=tuple(router for one in many for router in one.routers),
        workers=tuple(newest[name] for name in sorted(newest)),
        silent=sum(one.silent for one in many),
    )


def parse(body: bytes, read_at: float = 0.0) -> Samples:
    """Samples of one router's document; of anything else none, and the router is silent.

    A router of an older version tells latencies alone: they count, but it is silent too.
    """
    try:
        data = json.loads(body)
        latencies = Samples(
            sketch.from_json(data["ttft_s"]), sketch.from_json(data["tpot_s"]), silent=1
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Samples(silent=1)
    try:
        return Samples(
            ttft=latencies.ttft,
            tpot=latencies.tpot,
            own_ttft=sketch.from_json(data["own_ttft_s"]),
            uncached=sketch.from_json(data["uncached_tokens"]),
            routers=(_router(data, read_at),),
            workers=tuple(_worker(one, read_at) for one in data["workers"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return latencies


def _router(data: Mapping[str, Any], read_at: float) -> RouterReading:
    queued = data["queued"]
    return RouterReading(
        process=_text(data["process"]),
        read_at=read_at,
        uptime_s=_number(data["uptime_s"]),
        counters=Counters(
            **{name: _number(_counted(data, name)) for name in _COUNTED},
            lengths=lengths(data.get("lengths", {})),
        ),
        queued_requests=_number(queued["requests"]),
        queued_tokens=_number(queued["tokens"]),
        queued_sequences=_number(queued["sequences"]),
        held_requests=_number(data["held_requests"]),
        clients=None if data.get("clients") is None else _number(data["clients"]),
    )


def lengths(found: Mapping[Any, Sequence[Any]]) -> dict[int, Length]:
    """Raises as `_number` does, and for a class that no prompt can be of."""
    made = {int(which): Length(*map(_number, counts)) for which, counts in found.items()}
    if not all(0 <= which < _MOST_LENGTHS for which in made):
        raise ValueError(f"{sorted(made)} are not powers of two of a prompt's tokens")
    return made


def _counted(data: Mapping[str, Any], name: str) -> object:
    return data["counters"].get(name, 0) if name in _LATER else data["counters"][name]


def _worker(data: Mapping[str, Any], read_at: float) -> WorkerReading:
    numbers = (one.name for one in fields(WorkerReading) if one.type is float)
    return WorkerReading(
        worker=_text(data["worker"]),
        epoch=_text(data["epoch"]),
        role=_text(data["role"]),
        draining=bool(data["draining"]),
        usable=bool(data["usable"]),
        heard_at=read_at - _number(data["heard_s_ago"]),
        **{name: _number(data[name]) for name in numbers if name != "heard_at"},
    )


def _number(value: object) -> float:
    """A count or a duration; NaN, infinities and what is below zero are nobody's data."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is not a name")
    return value
