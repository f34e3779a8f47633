"""Covers scaling.decide and scaling.bounds by hypothesis: whatever is observed, never beyond
bounds or budget; more demand never means fewer workers; a pool about which nothing is known
doesn't move; constant input never makes a see-saw; the same input gives the same decision; one
pool's noise doesn't move the other."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_operator.api import Role
from pd_operator.scaling import bounds
from pd_operator.scaling.decide import PoolState, State, decide
from pd_operator.scaling.telling import MOVES
from pd_operator.scaling.types import (
    Answered,
    Flow,
    Flows,
    Hold,
    Observations,
    PoolSignals,
    PoolSpec,
    Ratio,
    Scale,
    Spec,
)
from tests.pd_operator.scaling.world import (
    Cluster,
    decode,
    flow,
    known,
    observations,
    prefill,
)

pytestmark = pytest.mark.slow

P, D = Role.PREFILL, Role.DECODE
LEARNED = State({role: PoolState(learned=known()) for role in Role})
amounts = st.floats(0, 1e6, allow_nan=False)
rates = st.floats(0, 2000, allow_nan=False)
LONG = Answered(50, 100)


@st.composite
def pool_signals(draw: st.DrawFn) -> PoolSignals:
    return PoolSignals(
        workers=draw(st.integers(0, 50)),
        stale=draw(st.integers(0, 3)),
        running=draw(st.floats(0, 5000)),
        waiting_grants=draw(st.floats(0, 5000)),
        pending_tokens=draw(amounts),
        kv_used_tokens=draw(amounts),
        kv_tokens_each=draw(amounts),
        max_running_each=draw(st.sampled_from([0.0, 8.0, 256.0])),
        announced_tokens_per_s=draw(amounts),
    )


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    requests = draw(rates)
    sequences = requests * draw(st.floats(0, 4))
    share = draw(st.floats(0, 1))
    which = draw(st.sampled_from([6, 7, 14]))
    return Flow(requests, sequences, requests * draw(st.floats(0, 1e5)), {which: sequences * share})


@st.composite
def seen(draw: st.DrawFn) -> Observations:
    return Observations(
        read_at=draw(st.none() | st.just(0.0)),
        complete=draw(st.booleans()),
        flows={
            role: Flows(draw(st.none() | flows()), draw(st.none() | flows())) for role in (P, D)
        },
        uncached_share=draw(st.none() | st.floats(0, 1)),
        output_tokens=draw(st.none() | st.floats(0, 1e5)),
        answers=draw(st.sampled_from([{}, {6: Answered(3, 600)}, {6: Answered(9, 9), 14: LONG}])),
        overhead_s=draw(st.none() | st.floats(0, 100)),
        queued_requests=draw(amounts),
        queued_tokens=draw(amounts),
        queued_sequences=draw(amounts),
        held_requests=draw(st.sampled_from([0.0, 3.0])),
        uncached=draw(st.sampled_from([{}, {300: 5}, {100: 1, 400: 2}])),
        tpot=draw(st.sampled_from([{}, {-100: 5}])),
        pools={role: draw(pool_signals()) for role in draw(st.sets(st.sampled_from([P, D])))},
    )


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    pools = []
    for made in (prefill, decode):
        low = draw(st.integers(0, 5))
        high = draw(st.integers(max(low, 1), 40))
        pools.append(
            made(
                draw(st.integers(0, 45)),
                minimum=low,
                maximum=high,
                gpus_each=draw(st.integers(0, 4)),
                max_up=draw(st.none() | st.integers(1, 5)),
                max_down=draw(st.none() | st.integers(1, 5)),
            )
        )
    least = sum(pool.minimum * pool.gpus_each for pool in pools)
    gpus = draw(st.none() | st.integers(least, least + 60))
    low = draw(st.floats(0, 2))
    return Spec(tuple(pools), gpus, Ratio(low, low + draw(st.floats(0, 4))))


HARDLY_A_SPEED = observations(
    0.0, 1.0, uncached={}, prefill=PoolSignals(announced_tokens_per_s=5e-324)
)
HARDLY_ROOM = observations(0.0, 1.0, decode=PoolSignals(kv_tokens_each=5e-324))


@given(specs(), st.lists(seen(), min_size=1, max_size=6), st.sampled_from([State(), LEARNED]))
@example(Spec((prefill(0), decode(0))), [HARDLY_A_SPEED], State())
@example(Spec((prefill(0), decode(0))), [HARDLY_ROOM], LEARNED)
def test_never_beyond_bounds_or_budget(spec: Spec, looks: list[Observations], state: State) -> None:
    now = 0.0
    for found in looks:
        now += 100.0
        if found.read_at is not None:
            found = replace(found, read_at=now)
        again = decide(spec, found, state, now)
        state, decisions = decide(spec, found, state, now)
        assert (state, decisions) == again
        for pool in spec.pools:
            decision = decisions[pool.role]
            assert pool.minimum <= decision.replicas <= pool.maximum
            assert isinstance(decision, Scale) == (decision.replicas != pool.replicas)
            assert decision.reason
            assert isinstance(decision, Hold) or decision.reason in MOVES
            assert all(map(math.isfinite, decision.numbers.values())), decision.numbers
        if spec.gpus is not None:
            sizes = [decisions[pool.role].replicas * pool.gpus_each for pool in spec.pools]
            assert sum(sizes) <= spec.gpus
        pools = [replace(p, replicas=decisions[p.role].replicas) for p in spec.pools]
        spec = replace(spec, pools=tuple(pools))


@given(seen(), rates, st.floats(1, 5), st.sampled_from([P, D]), st.floats(0, 1))
def test_more_demand_never_means_fewer_workers(
    found: Observations, requests: float, factor: float, role: Role, chats: float
) -> None:
    sizes = []
    for load in (requests, requests * factor):
        mix = {6: load * chats, 14: load * (1 - chats)}
        same = Flows(*(replace(flow(load), lengths=mix) for _ in range(2)))
        look = replace(found, read_at=0.0, complete=True, flows=dict.fromkeys(Role, same))
        spec = Spec((prefill(3, maximum=1000, max_up=1000), decode(3, maximum=1000, max_up=1000)))
        _, decisions = decide(spec, look, LEARNED, 0.0)
        sizes.append(decisions[role].replicas)
    assert sizes[0] <= sizes[1]


@given(specs(), seen(), st.sampled_from([P, D]))
def test_a_pool_without_data_does_not_move(spec: Spec, found: Observations, lost: Role) -> None:
    spec = replace(
        spec,
        gpus=None,
        pools=tuple(replace(p, replicas=p.clamp(p.replicas)) for p in spec.pools),
    )
    look = replace(found, read_at=0.0, flows=dict(found.flows) | {lost: Flows()})
    _, decisions = decide(spec, look, LEARNED, 0.0)
    before = spec.pool(lost)
    assert before is not None
    assert decisions[lost].replicas == before.replicas


@settings(max_examples=25)
@given(rates, st.integers(1, 40), st.integers(1, 40))
@example(372.0, 1, 5)  # late: one decode worker more
@example(2e-137, 1, 1)  # its square is 0
def test_constant_input_settles(requests: float, prefills: int, decodes: int) -> None:
    cluster = Cluster([prefill(prefills), decode(decodes)], gpus=60)
    cluster.steady(requests, 1500)
    for role in (P, D):
        assert cluster.reversals(role) <= 1
        late = [sizes[role] for sizes in cluster.trail[-60:]]
        # The longer nothing changes, the less room is kept for what might, and the better is
        # known what a worker can do: that is worth one worker, one way or the other.
        assert abs(late[0] - late[-1]) <= 1
        assert late in (sorted(late), sorted(late, reverse=True))


@given(flows(), flows(), pool_signals())
def test_decodes_noise_does_not_move_prefill(one: Flow, other: Flow, noise: PoolSignals) -> None:
    sizes = []
    for signals, decode_flow in ((PoolSignals(workers=2), one), (noise, other)):
        look = observations(0.0, 20, decode=signals)
        found = {P: look.flows[P], D: Flows(decode_flow, decode_flow)}
        spec = Spec((prefill(2), decode(2)))
        _, decisions = decide(spec, replace(look, flows=found), LEARNED, 0.0)
        sizes.append(decisions[P])
    assert sizes[0] == sizes[1]


@given(flows(), pool_signals(), st.dictionaries(st.integers(-50, 200), st.integers(1, 50)))
def test_prefills_noise_does_not_move_decode(
    other: Flow, noise: PoolSignals, sketches: dict[int, int]
) -> None:
    decisions = []
    for signals, flow_of_prefill, sketch in (
        (PoolSignals(workers=2), flow(20), {}),
        (noise, other, sketches),
    ):
        look = observations(0.0, 20, prefill=signals)
        found = {D: look.flows[D], P: Flows(flow_of_prefill, flow_of_prefill)}
        seen = replace(look, flows=found, own_ttft=sketch, uncached=sketch or look.uncached)
        state = LEARNED
        for now in (0.0, 5.0, 10.0):
            looks = replace(seen, read_at=now)
            state, decided = decide(Spec((prefill(2), decode(2))), looks, state, now)
        decisions.append(decided[D])
    assert decisions[0] == decisions[1]


@given(
    specs(),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sets(st.sampled_from([P, D])),
    st.booleans(),
)
def test_what_all_pools_get_together(
    spec: Spec, prefills: int, decodes: int, holding: set[Role], fixed: bool
) -> None:
    if fixed:
        pools = tuple(
            replace(p, fixed=p.role is D, replicas=p.clamp(p.replicas)) for p in spec.pools
        )
        spec = replace(spec, pools=pools, gpus=None)
    wanted = {P: prefills, D: decodes}
    sizes, reasons = bounds.settle(spec, wanted, holding)
    for pool in spec.pools:
        size = sizes[pool.role]
        assert pool.minimum <= size <= pool.maximum
        if size != pool.clamp(wanted[pool.role]) and not pool.fixed:
            assert reasons[pool.role] in ("Budget", "Ratio")
        if pool.fixed:
            assert size == pool.replicas
    again, _ = bounds.settle(_at(spec, sizes), sizes, holding)
    assert again == sizes or spec.gpus is not None


def _at(spec: Spec, sizes: dict[Role, int]) -> Spec:
    pools: list[PoolSpec] = [replace(p, replicas=sizes[p.role]) for p in spec.pools]
    return replace(spec, pools=tuple(pools))
