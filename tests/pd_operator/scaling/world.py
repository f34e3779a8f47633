"""Observations for scaling tests, and a pool pair that is decided about again and again."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

from pd_core.sketch import WindowSketch
from pd_operator.api import Role
from pd_operator.measured import Sketch
from pd_operator.scaling.capacity import Speed, StepLine
from pd_operator.scaling.decide import PoolState, State, decide
from pd_operator.scaling.sizing import Learned
from pd_operator.scaling.types import (
    Decision,
    Flow,
    Flows,
    Observations,
    PoolSignals,
    PoolSpec,
    Spec,
    Target,
    Work,
)

PROMPT_TOKENS = 1000.0
OUTPUT_TOKENS = 100.0
SPEED = 10_000.0  # uncached prompt tokens a second of one worker
BASE_S, SLOPE_S = 0.010, 0.0005  # a decode step: 10 ms and half a millisecond a sequence
TTFT, TPOT = Target(99, 1.0), Target(99, 0.030)
POLL_S = 5.0


def sketch(values: list[float]) -> Sketch:
    made = WindowSketch()
    for value in values:
        made.add(value, 0.0)
    return made.counts(0.0)


SIZES = sketch([PROMPT_TOKENS] * 20)


def steps(batch: float, worker: str = "w", warm: bool = True) -> Work:
    """What a decode worker does in a poll at this batch."""
    step_s = BASE_S + SLOPE_S * batch
    count = POLL_S / step_s
    return Work(worker, count, POLL_S, count * batch, warm)


def known() -> Learned:
    """Workers whose speed has been seen."""
    line = StepLine().learn([steps(batch) for batch in (1, 4, 16, 32)] * 10, 0.0)
    return Learned(
        speed=Speed(SPEED * 100, 100.0), line=line, spread=1.0, output_tokens=OUTPUT_TOKENS,
        kv_each=PROMPT_TOKENS,
    )  # fmt: skip


def prefill(replicas: int = 2, **fields: Any) -> PoolSpec:
    made: dict[str, Any] = {"minimum": 1, "maximum": 50, "ttft": TTFT, "gpus_each": 1}
    return PoolSpec(Role.PREFILL, replicas, **made | fields)


def decode(replicas: int = 2, **fields: Any) -> PoolSpec:
    made: dict[str, Any] = {"minimum": 1, "maximum": 50, "tpot": TPOT, "gpus_each": 1}
    return PoolSpec(Role.DECODE, replicas, **made | fields)


def flow(requests: float) -> Flow:
    return Flow(requests, requests, requests * PROMPT_TOKENS)


def observations(
    now: float,
    requests: float,
    burst: float | None = None,
    *,
    prefill: PoolSignals | None = None,
    decode: PoolSignals | None = None,
    **fields: Any,
) -> Observations:
    """Requests a second over both windows; `burst`: over the short one."""
    flows = Flows(flow(requests), flow(requests if burst is None else burst))
    made: dict[str, Any] = {
        "read_at": now,
        "complete": True,
        "flows": dict.fromkeys(Role, flows),
        "uncached": SIZES,
        "pools": {
            Role.PREFILL: prefill or PoolSignals(workers=2),
            Role.DECODE: decode or PoolSignals(workers=2, kv_tokens_each=1e6, max_running_each=256),
        },
    }
    return Observations(**made | fields)


@dataclass
class Cluster:
    """Pools that take on what is decided, at once and with workers that are ready."""

    pools: list[PoolSpec] = field(default_factory=lambda: [prefill(), decode()])
    gpus: int | None = None
    now: float = 1000.0
    state: State = field(default_factory=State)
    trail: list[dict[Role, int]] = field(default_factory=list)
    last: dict[Role, Decision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.state.pools:
            self.state = State({role: PoolState(learned=known()) for role in Role})

    def spec(self) -> Spec:
        return Spec(tuple(self.pools), self.gpus)

    def size(self, role: Role) -> int:
        return next(pool.replicas for pool in self.pools if pool.role is role)

    def look(self, seen: Observations | None, after_s: float = POLL_S) -> dict[Role, Decision]:
        """One decision, `after_s` after the last. None: what was seen is as old as it is."""
        self.now += after_s
        found = Observations() if seen is None else seen
        if seen is not None and seen.read_at is not None:
            found = replace(seen, read_at=self.now)
        self.state, self.last = decide(self.spec(), found, self.state, self.now)
        self.pools = [replace(p, replicas=self.last[p.role].replicas) for p in self.pools]
        self.trail.append({pool.role: pool.replicas for pool in self.pools})
        return self.last

    def steady(self, requests: float, for_s: float, **fields: Any) -> None:
        """The same load for a while."""
        end = self.now + for_s
        while self.now < end:
            self.look(observations(self.now, requests, **fields))

    def reversals(self, role: Role) -> int:
        """How often the size of a pool went another way than before."""
        sizes = [sizes[role] for sizes in self.trail]
        moves = [b - a for a, b in itertools.pairwise(sizes) if a != b]
        return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(moves))
