"""PURE. A trace through a cluster: what users got, and what it cost."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pd_operator.api import Role
from pd_sim.look import look
from pd_sim.loop import Loop
from pd_sim.pools import PoolPlan, Pools
from pd_sim.router import Outcome, RouterPlan, SimRouter
from pd_sim.scalers import Goal, Scaler
from pd_sim.trace import Request, Trace
from pd_sim.worker import GAP_BUCKETS, Worker, gap_s

_JUDGED_EACH = 500
"""Arrivals between two looks at whether a run can still reach what it's to reach."""
_PATIENCE_S = 3600.0
"""After the last arrival: what isn't served by then never will be."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A worker dies."""

    at_s: float
    role: Role
    ordinal: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The cluster that is simulated."""

    pools: tuple[PoolPlan, ...]
    router: RouterPlan
    goal: Goal
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many workers each pool was to have from a moment on, and how many served."""

    at_s: float
    asked: Mapping[Role, int]
    serving: Mapping[Role, int]


@dataclass(frozen=True, slots=True)
class Result:
    """`attainment`: the share of all requests within both targets; refused ones are not.
    `whole`: it wasn't given up; the figures of one that was are those until then."""

    requests: int
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    gpu_hours: float
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    itl_s: Mapping[str, float]
    changes: int  # of a pool's size
    whole: bool = True
    outcomes: Sequence[Outcome] = field(repr=False, default=())
    sizes: Sequence[Sizes] = field(repr=False, default=())

    def document(self) -> dict[str, object]:
        """JSON-ready, without the details."""
        return {
            "requests": self.requests,
            "attainment": round(self.attainment, 5),
            "ttft_attainment": round(self.ttft_attainment, 5),
            "tpot_attainment": round(self.tpot_attainment, 5),
            "gpu_hours": round(self.gpu_hours, 3),
            "size_changes": self.changes,
            **{f"ttft_{name}_s": round(value, 4) for name, value in self.ttft_s.items()},
            **{f"tpot_{name}_s": round(value, 5) for name, value in self.tpot_s.items()},
            **{f"itl_{name}_s": round(value, 5) for name, value in self.itl_s.items()},
        }


class Simulation:
    """One run. GPUs are paid for from the first arrival to the last. With more than
    `most_late` requests late it is given up."""

    def __init__(
        self, plan: Plan, trace: Trace, scaler: Scaler, most_late: int | None = None
    ) -> None:
        self.plan = plan
        self.trace = trace
        self.scaler = scaler
        self.loop = Loop()
        self.pools = Pools(plan.pools, self.loop, self._ready)
        self.router = SimRouter(plan.router, self.loop, self.pools)
        self.sizes: list[Sizes] = []
        self.changes = 0
        self.given_up = False
        self._most_late = most_late
        self._judged = self._late = 0
        self._requests: Iterator[Request] = iter(trace.requests)

    def run(self) -> Result:
        loop, end_s = self.loop, self.trace.seconds
        loop.run(0.0)
        self._note(0.0)
        for fault in self.plan.faults:
            loop.at(fault.at_s, self._fail, fault)
        loop.at(self.scaler.period_s, self._scale)
        self._next()
        loop.run(end_s)
        gpu_hours = self.pools.gpu_seconds() / 3600
        while self.router.live and not self.given_up and loop.now < end_s + _PATIENCE_S:
            loop.run(loop.now + 10.0)
        return self._result(gpu_hours)

    def _next(self) -> None:
        """One arrival at a time is planned: the trace may be long."""
        request = next(self._requests, None)
        if request is not None:
            self.loop.at(request.at_s, self._arrive, request)

    def _arrive(self, request: Request) -> None:
        self.router.arrive(request)
        if self._most_late is not None and len(self.router.outcomes) % _JUDGED_EACH == 0:
            self._judge(self._most_late)
        if not self.given_up:
            self._next()

    def _judge(self, most_late: int) -> None:
        """Counts the late among those whose outcome is known, in order of arrival."""
        goal, now = self.plan.goal, self.loop.now
        for outcome in itertools.islice(self.router.outcomes, self._judged, None):
            late = outcome.ttft_s is None and now - outcome.at_s > goal.ttft_s
            if outcome.tpot_s is None and not late:
                break
            self._judged += 1
            self._late += late or not _in_time(outcome, goal)
        if self._late > most_late:
            self.given_up = True
            self.loop.clear()

    def _ready(self, worker: Worker) -> None:
        del worker
        if self.router.held:
            self.router.place_held()

    def _scale(self) -> None:
        now = self.loop.now
        seen = look(self.router, self.pools, now)
        for role, replicas in self.scaler.sizes(seen).items():
            pool = self.pools.pools[role]
            wanted = max(pool.plan.minimum, min(pool.plan.maximum, replicas))
            if wanted != pool.asked:
                self.changes += 1
                self.pools.resize(role, wanted)
        self._note(now)
        self.loop.at(now + self.scaler.period_s, self._scale)

    def _note(self, now: float) -> None:
        asked = {role: pool.asked for role, pool in self.pools.pools.items()}
        serving = {role: len(pool.serving(now)) for role, pool in self.pools.pools.items()}
        last = self.sizes[-1] if self.sizes else None
        if last is None or last.asked != asked or last.serving != serving:
            self.sizes.append(Sizes(now, asked, serving))

    def _fail(self, fault: Fault) -> None:
        worker = self.pools.fail(fault.role, fault.ordinal)
        if worker is not None:
            self.router.died(worker)

    def _result(self, gpu_hours: float) -> Result:
        goal, outcomes = self.plan.goal, self.router.outcomes
        count = max(len(outcomes), 1)
        in_time = [o.ttft_s is not None and o.ttft_s <= goal.ttft_s for o in outcomes]
        smooth = [o.tpot_s is not None and o.tpot_s <= goal.tpot_s for o in outcomes]
        both = sum(a and b for a, b in zip(in_time, smooth, strict=True))
        return Result(
            requests=len(outcomes),
            attainment=both / count,
            ttft_attainment=sum(in_time) / count,
            tpot_attainment=sum(smooth) / count,
            gpu_hours=gpu_hours,
            ttft_s=_percentiles([o.ttft_s for o in outcomes if o.ttft_s is not None]),
            tpot_s=_percentiles([o.tpot_s for o in outcomes if o.tpot_s]),
            itl_s=self._gaps(),
            changes=self.changes,
            whole=not self.given_up,
            outcomes=outcomes,
            sizes=self.sizes,
        )

    def _gaps(self) -> dict[str, float]:
        """Between tokens of all sequences, to the width of a bucket."""
        total = [0.0] * GAP_BUCKETS
        for pool in self.pools.pools.values():
            for worker in (*pool.live, *pool.leaving, *pool.past):
                total = [a + b for a, b in zip(total, worker.gaps, strict=True)]
        found: dict[str, float] = {}
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            seen, rank = 0.0, share * sum(total)
            for bucket, count in enumerate(total):
                seen += count
                if count and seen >= rank:
                    found[name] = gap_s(bucket)
                    break
        return found


def run(plan: Plan, trace: Trace, scaler: Scaler, most_late: int | None = None) -> Result:
    return Simulation(plan, trace, scaler, most_late).run()


def _in_time(outcome: Outcome, goal: Goal) -> bool:
    return (
        outcome.ttft_s is not None
        and outcome.ttft_s <= goal.ttft_s
        and outcome.tpot_s is not None
        and outcome.tpot_s <= goal.tpot_s
    )


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[max(-(-len(ordered) * percent // 100) - 1, 0)]
        for percent in (50, 90, 99)
    }
