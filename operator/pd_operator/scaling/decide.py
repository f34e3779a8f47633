"""PURE. decide(spec, observations, state, now) -> (state', one decision a pool).

Up at once, on the demand that is forecast for when another worker would have started; on the
last seconds' where that is a burst (panic). Down only when for a whole window nothing asked
for more, a step at a time. Without data, or with data that may be half of it, a pool never
shrinks; without any it doesn't move at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pd_core import sketch
from pd_operator.api import Role
from pd_operator.scaling import bounds, sizing
from pd_operator.scaling.forecast import UNKNOWN_MARGIN, Ahead, Chance, Course
from pd_operator.scaling.learning import learn, size_variation
from pd_operator.scaling.sizing import Learned, Need
from pd_operator.scaling.starting import Starts
from pd_operator.scaling.types import (
    Decision,
    Flow,
    Flows,
    Hold,
    Numbers,
    Observations,
    PoolSignals,
    PoolSpec,
    Scale,
    Spec,
)

STALE_S = 20.0
GAP_S = 30.0
"""Blind for longer than this, the window before a fall begins anew."""
PANIC = 1.5
"""A burst: the last seconds alone ask for so many times the present workers."""
PANIC_S = 60.0
BURST_CHANCE = 2.0
"""Standard deviations that are taken off the last seconds' demand."""
UP_STEP_S = 15.0
LEAST_UP = 4
TOLERANCE = 0.05
"""A fall needs room for so much more demand than there is: no see-saw at a threshold."""
_OUTPUT_VARIATION = 1.0
"""Of outputs' lengths, the variance over the mean's square: they are about exponential."""
SETTLED_S = 60.0
"""A pool had enough workers for so long: what users got meanwhile tells of the model."""

_SIZERS = {
    Role.PREFILL: sizing.prefill,
    Role.DECODE: sizing.decode,
    Role.COLOCATED: sizing.colocated,
}


@dataclass(frozen=True, slots=True)
class PoolState:
    """What is remembered of a pool. Times on the operator's clock."""

    learned: Learned = field(default_factory=Learned)
    learned_at: float | None = None  # the reading that was last learned from
    since: float | None = None  # the first of an unbroken row of looks with data
    seen_at: float = -math.inf  # the last of it
    course: Course = field(default_factory=Course)  # of demand
    starts: Starts = field(default_factory=Starts)
    enough_since: float | None = None  # since when it has the workers that it needs
    lasting: Need = field(default_factory=lambda: Need(None, {}))  # as the last look saw it
    wants: tuple[tuple[float, int], ...] = ()  # (when, workers) within the window
    panic_until: float = -math.inf
    up_at: float = -math.inf
    down_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class State:
    pools: Mapping[Role, PoolState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a pool would like, before all pools' bounds."""

    replicas: int
    reason: str
    numbers: Numbers = field(default_factory=dict)
    blind: bool = False  # it holds for want of data


def decide(
    spec: Spec, observations: Observations, state: State, now: float
) -> tuple[State, dict[Role, Decision]]:
    """The next size of each pool. The same input always gives the same output."""
    states: dict[Role, PoolState] = {}
    wishes: dict[Role, _Wish] = {}
    for pool in spec.pools:
        known = state.pools.get(pool.role, PoolState())
        states[pool.role], wishes[pool.role] = _wish(pool, observations, known, now)
    blind = {role for role, wish in wishes.items() if wish.blind}
    wanted = {role: wish.replicas for role, wish in wishes.items()}
    sizes, reasons = bounds.settle(spec, wanted, blind)
    decisions: dict[Role, Decision] = {}
    for pool in spec.pools:
        role, size = pool.role, sizes[pool.role]
        decisions[role] = _decision(pool, size, wishes[role], reasons.get(role))
        if size > pool.replicas:
            serving = observations.pools.get(role, PoolSignals()).workers
            starts = states[role].starts.ask(now, size, serving)
            states[role] = replace(states[role], up_at=now, starts=starts)
        elif size < pool.replicas:
            states[role] = replace(states[role], down_at=now)
    return State(states), decisions


def _wish(
    pool: PoolSpec, seen: Observations, state: PoolState, now: float
) -> tuple[PoolState, _Wish]:
    if pool.fixed:
        return state, _Wish(pool.replicas, "FixedReplicas")
    flows = seen.flows.get(pool.role, Flows())
    problem = _no_data(seen, flows, now)
    if problem or flows.long is None or flows.short is None:
        return state, _Wish(pool.replicas, problem or "NoData", blind=True)
    signals = seen.pools.get(pool.role, PoolSignals())
    state = _learn(pool, seen, signals, state, now)
    state, ahead = _forecast(pool, flows.long, state, now)
    needs = _needs(pool, seen, signals, (flows.long, flows.short), ahead, state.learned)
    if needs is None:
        return state, _Wish(pool.replicas, "NoCapacityYet", blind=True)
    enough = signals.workers >= (needs.steady.workers or 0)
    since = (now if state.enough_since is None else state.enough_since) if enough else None
    state = replace(state, enough_since=since, lasting=needs.steady)
    return _weigh(pool, needs, state, seen.complete and not signals.stale, now)


def _learn(
    pool: PoolSpec, seen: Observations, signals: PoolSignals, state: PoolState, now: float
) -> PoolState:
    """From each reading once."""
    starts = state.starts.look(now, pool.replicas, signals.workers)
    state = replace(state, starts=starts)
    if seen.read_at is None or seen.read_at == state.learned_at:
        return state
    elapsed_s = seen.read_at - state.learned_at if state.learned_at is not None else 0.0
    learned = learn(state.learned, pool, seen, signals, elapsed_s)
    last, since = state.lasting, state.enough_since
    settled = since is not None and now - since >= SETTLED_S and not last.infeasible
    got, target = (seen.tpot, pool.tpot) if pool.role is Role.DECODE else (seen.own_ttft, pool.ttft)
    hopeless = last.numbers.get("hopeless", 0.0)
    waited = _late_by_grants(pool, seen)
    feedback = learned.feedback.learn(
        got,
        target,
        hopeless=hopeless,
        settled=settled,
        elapsed_s=elapsed_s,
        waited=waited,
    )
    # Where bounds held the pool back, a larger margin would be asked for in vain.
    bound = last.infeasible or (last.workers or 0) > pool.maximum
    allowance = learned.allowance.learn({} if bound else got, target, hopeless, elapsed_s, waited)
    learned = replace(learned, feedback=feedback, allowance=allowance, start_s=starts.start_s)
    return replace(state, learned=learned, learned_at=seen.read_at)


def _late_by_grants(pool: PoolSpec, seen: Observations) -> float:
    """The share of requests that decode made late by having no room: late by TTFT, and not by
    what prefill took of it."""
    if pool.role is not Role.DECODE or pool.ttft is None:
        return 0.0
    late, own = (
        sketch.share_above(found, pool.ttft.seconds) for found in (seen.ttft, seen.own_ttft)
    )
    return max(late - own, 0.0) if late is not None and own is not None else 0.0


def _forecast(pool: PoolSpec, long: Flow, state: PoolState, now: float) -> tuple[PoolState, Ahead]:
    """Demand when a worker that is asked for now would serve; half a window is behind us."""
    learned = state.learned
    horizon_s = state.starts.start_s + pool.window_s / 2
    decode = pool.role is Role.DECODE
    variation = _OUTPUT_VARIATION if decode else size_variation(learned)
    chance = Chance(long.requests, variation)
    demand = _work(pool.role, long, learned)
    if demand is None:
        return state, Ahead(horizon_s=horizon_s, margin=UNKNOWN_MARGIN)
    course = state.course.add(now, demand, chance, horizon_s)
    ahead = course.ahead(now, demand, chance, horizon_s, learned.allowance.safe)
    return replace(state, course=course), ahead


def _work(role: Role, flow: Flow, learned: Learned) -> float | None:
    """Tokens a second that a pool's workers have to compute; None: not known yet. Not only
    arrivals change: at times answers are twice as long, or prompts are cached."""
    prompts = flow.prompt_tokens * learned.uncached_share
    if role is Role.PREFILL:
        return prompts
    if not learned.output_tokens:
        return None
    outputs = learned.outputs(flow)
    return outputs if role is Role.DECODE else prompts + outputs


def _no_data(seen: Observations, flows: Flows, now: float) -> str:
    """Confirmed silence is not "no data": then the flows are zeros."""
    if seen.read_at is None:
        return "NoData"
    for flow in (flows.long, flows.short):
        if flow is None or not all(map(math.isfinite, (flow.requests, flow.prompt_tokens))):
            return "NoData"
    return "StaleData" if now - seen.read_at > STALE_S else ""


@dataclass(frozen=True, slots=True)
class _Needs:
    """Workers for the last minute, for the last seconds, and before a fall."""

    steady: Need
    burst: int
    before_fall: int


def _needs(
    pool: PoolSpec,
    seen: Observations,
    signals: PoolSignals,
    flows: tuple[Flow, Flow],
    ahead: Ahead,
    learned: Learned,
) -> _Needs | None:
    """None while it isn't known what a worker can do."""
    sizer = _SIZERS[pool.role]
    long, short = flows
    demand = _work(pool.role, long, learned) or 0.0
    known = demand > 0 and ahead.level > 0
    coming = _times(long, ahead.level * ahead.growth / demand if known else 1.0)
    variation = 0.0 if pool.role is Role.DECODE else size_variation(learned)
    sudden = _beyond_chance(short, pool.panic_window_s, variation)
    most = _times(coming, 1 + TOLERANCE)
    needs = [
        sizer(sizing.Case(pool, seen, signals, flow, learned, margin))
        for flow, margin in ((coming, ahead.margin), (sudden, 1.0), (most, ahead.margin))
    ]
    awake = 1 if seen.held_requests else 0
    found = [need.workers for need in needs if need.workers is not None]
    if len(found) < len(needs):
        # Somebody waits and there is no worker to learn from: the first one is needed anyway.
        if pool.replicas == 0 and (awake or long.requests or short.requests):
            first = Need(1, needs[0].numbers)
            return _Needs(first, 1, 1)
        return None
    steady, burst, before_fall = (max(workers, awake) for workers in found)
    numbers = {
        **needs[0].numbers,
        "demand": demand,
        "level": ahead.level,
        "growth": ahead.growth,
        "margin": ahead.margin,
        "horizon_s": ahead.horizon_s,
        "correction": learned.feedback.factor,
        "used": learned.allowance.used,
    }
    if learned.feedback.late is not None:
        numbers["late"] = learned.feedback.late
    return _Needs(Need(steady, numbers, needs[0].infeasible), burst, max(before_fall, steady))


def _times(flow: Flow, factor: float) -> Flow:
    return Flow(
        flow.requests * factor,
        flow.sequences * factor,
        flow.prompt_tokens * factor,
        {which: count * factor for which, count in flow.lengths.items()},
    )


def _beyond_chance(flow: Flow, window_s: float, variation: float) -> Flow:
    """A few seconds see few requests, of few sizes: what chance explains is no burst."""
    count = flow.requests * window_s
    by_chance = BURST_CHANCE * math.sqrt((1 + variation) / count) if count > 0 else 1.0
    return _times(flow, max(0.0, 1 - by_chance))


def _weigh(
    pool: PoolSpec, needs: _Needs, state: PoolState, complete: bool, now: float
) -> tuple[PoolState, _Wish]:
    """Demand against the windows and the limits of a step."""
    if now - state.seen_at > GAP_S:
        state = replace(state, since=now, wants=())
    steady, present = needs.steady.workers or 0, pool.replicas
    if needs.burst >= PANIC * max(present, 1) and needs.burst > present:
        state = replace(state, panic_until=now + PANIC_S)
    panic = now < state.panic_until
    want = max(steady, needs.burst) if panic else steady
    wants = [one for one in state.wants if one[0] > now - pool.stabilization_s]
    wants.append((now, max(want, needs.before_fall)))
    state = replace(state, seen_at=now, wants=_without_shadowed(wants))
    ceiling = max(workers for _, workers in wants)
    numbers = {
        **needs.steady.numbers,
        "needed": float(steady),
        "needed_burst": float(needs.burst),
        "needed_before_fall": float(needs.before_fall),
        "ceiling": float(ceiling),
        "infeasible": float(needs.steady.infeasible),
    }
    low, high = pool.clamp(want), pool.clamp(ceiling)
    if low > present:
        return state, _rise(pool, state, low, "Burst" if panic else "MoreDemand", numbers, now)
    if high < present:
        return state, _fall(pool, state, high, complete and not panic, numbers, now)
    reason = "AtMaximum" if want > pool.maximum else "AtTarget"
    if low < present:
        reason = "Stabilizing"
    return state, _Wish(present, reason, numbers)


def _rise(
    pool: PoolSpec, state: PoolState, wanted: int, reason: str, numbers: Numbers, now: float
) -> _Wish:
    if now - state.up_at < UP_STEP_S:
        return _Wish(pool.replicas, "StepLimit", numbers)
    step = pool.max_up if pool.max_up is not None else max(pool.replicas, LEAST_UP)
    return _Wish(min(wanted, pool.replicas + step), reason, numbers)


def _fall(
    pool: PoolSpec, state: PoolState, wanted: int, sure: bool, numbers: Numbers, now: float
) -> _Wish:
    if not sure:
        return _Wish(pool.replicas, "PartialData", numbers)
    if state.since is None or now - state.since < pool.stabilization_s:
        return _Wish(pool.replicas, "Stabilizing", numbers)
    if now - state.down_at < pool.step_s:
        return _Wish(pool.replicas, "StepLimit", numbers)
    step = pool.max_down if pool.max_down is not None else max(pool.replicas // 2, 1)
    return _Wish(max(wanted, pool.replicas - step), "LessDemand", numbers)


def _without_shadowed(wants: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Only a later and larger wish matters for the window's maximum: the rest is dropped."""
    kept: list[tuple[float, int]] = []
    for at, workers in wants:
        while kept and kept[-1][1] <= workers:
            kept.pop()
        kept.append((at, workers))
    return tuple(kept)


def _decision(pool: PoolSpec, size: int, wish: _Wish, settled: str | None) -> Decision:
    reason = wish.reason
    if settled:
        reason = settled
    elif size != wish.replicas:
        reason = "OutOfBounds"
    text = _message(pool, size, wish, reason)
    if size == pool.replicas:
        return Hold(size, reason, text, wish.numbers)
    return Scale(size, reason, text, wish.numbers)


def _message(pool: PoolSpec, size: int, wish: _Wish, reason: str) -> str:
    said = {
        "FixedReplicas": "replicas are fixed",
        "NoData": "routers tell nothing yet",
        "StaleData": f"routers have told nothing for {STALE_S:g} s",
        "NoCapacityYet": "no worker has shown yet what it can do",
        "PartialData": "not all routers and workers answer: no worker goes",
        "OutOfBounds": f"the bounds are {pool.minimum} to {pool.maximum}",
        "Budget": "budget.gpus is spent",
        "Ratio": "budget.ratio binds the pools together",
    }
    text = said.get(reason, _demand(wish.numbers))
    if wish.numbers.get("infeasible"):
        text += "; one request alone misses the target, so more workers can't meet it"
    return f"{size} workers: {text}" if size != pool.replicas else text


def _demand(numbers: Numbers) -> str:
    if "concurrency" in numbers:
        text = f"{numbers['concurrency']:.3g} sequences at once, {numbers['batch']:.3g} a worker"
    elif "speed" in numbers:
        text = f"{numbers['tokens_per_s']:.3g} tokens/s, {numbers['speed']:.3g} a worker"
    else:
        text = "no demand"
    return f"{text}: {numbers.get('needed', 0):.0f} needed"
