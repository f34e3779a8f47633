"""PURE. Readings over time -> what happened a second, and what each worker did.

Counters are cumulative and carry their process: what a router counted is the difference of
two of its readings, all of it for one that was born in between, and nothing when its past is
unknown. So neither a restart of a router nor one of ours is a spike.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from pd_operator.api import Role
from pd_operator.measured import Counters, Length, RouterReading, Samples, WorkerReading
from pd_operator.scaling.types import (
    Answered,
    Flow,
    Flows,
    Observations,
    PoolSignals,
    PromptSums,
    Spec,
    Work,
)

AVERAGE_S = 60.0
HEARD_S = 10.0
"""A worker that was silent for so long isn't counted as there."""
_MIN_SPAN_S = 4.0
_KEEP_S = 600.0
_WARM_STEPS = 16  # before that libraries load, kernels compile, caches fill
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.COLOCATED}


@dataclass(frozen=True, slots=True)
class _Point:
    """Everything counted since the history began, until `at`."""

    at: float
    total: Counters


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered between readings. Bounded: the longest window's points."""

    points: tuple[_Point, ...] = ()
    routers: Mapping[str, RouterReading] = field(default_factory=dict)
    workers: Mapping[tuple[str, str], WorkerReading] = field(default_factory=dict)
    work: Mapping[Role, tuple[Work, ...]] = field(default_factory=dict)
    latest: Samples = field(default_factory=Samples)


def extend(history: History, samples: Samples, window_s: float = AVERAGE_S) -> History:
    """Takes the next reading in, and forgets what is older than the longest window. A
    reading without any router changes nothing but what is silent."""
    now = samples.read_at
    if now is None or (history.points and now <= history.points[-1].at):
        return replace(history, latest=replace(history.latest, silent=samples.silent or 1))
    total = history.points[-1].total if history.points else Counters()
    for router in samples.routers:
        total = _add(total, _counted(history, router, now))
    points = (*history.points, _Point(now, total))
    # One point at or before the window's start is its base.
    oldest = now - max(window_s, AVERAGE_S)
    kept = [i for i, point in enumerate(points) if point.at <= oldest]
    points = points[kept[-1] :] if kept else points
    routers = {**history.routers, **{one.process: one for one in samples.routers}}
    workers = {**history.workers, **{(one.worker, one.epoch): one for one in samples.workers}}
    return History(
        points=points,
        routers={k: one for k, one in routers.items() if one.read_at > now - _KEEP_S},
        workers={k: one for k, one in workers.items() if one.heard_at > now - _KEEP_S},
        work=_work(history, samples),
        latest=samples,
    )


def observe(history: History, spec: Spec) -> Observations:
    """What the readings so far say to these pools."""
    latest, points = history.latest, history.points
    if not points:
        return Observations()
    base = _base(points, AVERAGE_S)
    spent = _minus(points[-1].total, base.total) if base else Counters()
    return Observations(
        read_at=points[-1].at,
        complete=latest.silent == 0,
        flows={
            pool.role: Flows(_flow(points, pool.window_s), _flow(points, pool.panic_window_s))
            for pool in spec.pools
        },
        uncached_share=_ratio(spent.uncached_tokens, spent.started_tokens),
        output_tokens=_ratio(spent.ended_tokens, spent.ended_sequences),
        answers={
            which: Answered(length.ended, length.tokens)
            for which, length in spent.lengths.items()
            if length.ended
        },
        overhead_s=_ratio(spent.overhead_s, spent.started_requests),
        queued_requests=sum(one.queued_requests for one in latest.routers),
        queued_tokens=sum(one.queued_tokens for one in latest.routers),
        queued_sequences=sum(one.queued_sequences for one in latest.routers),
        held_requests=sum(one.held_requests for one in latest.routers),
        ttft=latest.ttft,
        own_ttft=latest.own_ttft,
        tpot=latest.tpot,
        uncached=latest.uncached,
        prompts=PromptSums(
            spent.uncached_tokens,
            spent.uncached_squared,
            spent.uncached_cubed,
            spent.prefill_s,
            spent.prefill_token_s,
        ),
        pools=_pools(history),
    )


def _counted(history: History, router: RouterReading, now: float) -> Counters:
    """What a router has counted since we last heard of it, as far as we can know."""
    before = history.routers.get(router.process)
    if before is not None:
        return _minus(router.counters, before.counters)
    if history.points and router.uptime_s <= now - history.points[-1].at:
        return router.counters
    return Counters()


def _add(one: Counters, other: Counters) -> Counters:
    return _joined(one, other, operator.add)


def _minus(one: Counters, other: Counters) -> Counters:
    return _joined(one, other, lambda a, b: max(a - b, 0.0))


def _joined(one: Counters, other: Counters, join: Callable[[float, float], float]) -> Counters:
    names = (f.name for f in fields(Counters) if f.name != "lengths")
    lengths = {
        which: Length(
            *map(join, one.lengths.get(which, Length()), other.lengths.get(which, Length()))
        )
        for which in sorted(one.lengths.keys() | other.lengths.keys())
    }
    return Counters(
        **{name: join(getattr(one, name), getattr(other, name)) for name in names},
        lengths=lengths,
    )


def _base(points: tuple[_Point, ...], window_s: float) -> _Point | None:
    """The newest point before the window, or the oldest one if that is long enough ago."""
    now = points[-1].at
    before = [point for point in points if point.at <= now - window_s]
    if before:
        return before[-1]
    return points[0] if now - points[0].at >= _MIN_SPAN_S else None


def _flow(points: tuple[_Point, ...], window_s: float) -> Flow | None:
    base = _base(points, window_s)
    if base is None:
        return None
    came = _minus(points[-1].total, base.total)
    span_s = points[-1].at - base.at
    # Of those that were turned away unread we know no length: they are like the others.
    more = 1 + came.unread_requests / max(came.arrived_requests, 1.0)
    requests = came.arrived_requests + came.unread_requests
    return Flow(
        requests=requests / span_s,
        sequences=came.arrived_sequences * more / span_s,
        prompt_tokens=came.arrived_tokens * more / span_s,
        lengths={
            which: length.arrived * more / span_s
            for which, length in came.lengths.items()
            if length.arrived
        },
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 and math.isfinite(part) else None


def _work(history: History, samples: Samples) -> dict[Role, tuple[Work, ...]]:
    """What each worker did since its last word; a worker of another epoch begins anew."""
    done: dict[Role, list[Work]] = {}
    for one in samples.workers:
        before = history.workers.get((one.worker, one.epoch))
        role = _ROLES.get(one.role)
        if before is None or role is None or one.steps <= before.steps:
            continue
        work = Work(
            one.worker,
            steps=one.steps - before.steps,
            busy_s=one.busy_s - before.busy_s,
            tokens=one.computed_tokens - before.computed_tokens,
            warm=before.steps >= _WARM_STEPS,
        )
        if work.busy_s > 0 and work.tokens > 0:
            done.setdefault(role, []).append(work)
    return {role: tuple(works) for role, works in done.items()}


def _pools(history: History) -> dict[Role, PoolSignals]:
    now = history.points[-1].at
    found: dict[Role, PoolSignals] = {}
    for role in Role:
        all_told = [one for one in history.latest.workers if _ROLES.get(one.role) is role]
        if not all_told:
            continue
        heard = [one for one in all_told if now - one.heard_at <= HEARD_S and one.heartbeats]
        found[role] = PoolSignals(
            workers=sum(not one.draining for one in heard),
            stale=len(all_told) - len(heard),
            running=sum(one.running for one in heard),
            waiting_grants=sum(one.waiting_grants for one in heard),
            pending_tokens=sum(one.pending_tokens for one in heard),
            kv_used_tokens=sum(one.kv_used_tokens for one in heard),
            kv_tokens_each=min((one.kv_tokens for one in heard), default=0.0),
            max_running_each=min((one.max_running for one in heard), default=0.0),
            announced_tokens_per_s=_median([one.prefill_tokens_per_s for one in heard]),
            work=history.work.get(role, ()),
        )
    return found


def _median(values: list[float]) -> float:
    known = sorted(value for value in values if value > 0)
    return known[len(known) // 2] if known else 0.0
