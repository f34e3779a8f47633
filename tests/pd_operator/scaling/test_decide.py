"""Covers scaling.decide: stories of load, each a table or a short run; what holds a pool and why;
windows, panic, step limits, data that is missing, stale or partial, restarts, zero."""

from dataclasses import replace
from typing import Any

import pytest

from pd_operator.api import Role
from pd_operator.scaling.decide import STALE_S, UP_STEP_S, PoolState, State, decide
from pd_operator.scaling.types import (
    Flow,
    Flows,
    Hold,
    Observations,
    PoolSignals,
    Ratio,
    Scale,
    Spec,
    Target,
    Work,
)
from tests.pd_operator.scaling.world import (
    POLL_S,
    PROMPT_TOKENS,
    SPEED,
    Cluster,
    decode,
    known,
    observations,
    prefill,
    sketch,
    steps,
)

P, D = Role.PREFILL, Role.DECODE


def test_a_step_up_moves_at_once_and_says_why() -> None:
    cluster = Cluster()
    cluster.steady(10, 60)
    before = cluster.size(P)
    found = cluster.look(observations(0, 60, burst=10))
    assert isinstance(found[P], Scale)
    assert found[P].reason == "MoreDemand"
    assert cluster.size(P) > before
    assert found[P].numbers["demand"] == found[P].numbers["level"] == 60 * PROMPT_TOKENS
    assert 1 < found[P].numbers["margin"] < 1.3  # little is known yet of how demand moves
    assert found[P].numbers["speed"] == pytest.approx(SPEED, rel=0.01)
    assert f"{found[P].numbers['tokens_per_s']:.3g} tokens/s, 1e+04 a wor" in found[P].message


def test_a_step_down_waits_out_the_window() -> None:
    cluster = Cluster()
    cluster.steady(60, 600)
    high = cluster.size(P)
    cluster.steady(10, 290)
    assert cluster.size(P) == high
    assert cluster.last[P].reason == "Stabilizing"
    cluster.steady(10, 600)
    assert cluster.size(P) < high
    assert cluster.size(P) >= 2  # 10 requests of 1,000 tokens fill one of 10,000 tokens/s


def test_a_fall_goes_by_steps() -> None:
    cluster = Cluster([prefill(20, max_down=3), decode()])
    cluster.steady(1, 305)
    sizes = sorted({sizes[P] for sizes in cluster.trail})
    assert sizes == [17, 20]
    cluster.steady(1, 60)
    assert cluster.size(P) == 14


def test_a_rise_goes_by_steps() -> None:
    cluster = Cluster([prefill(2, max_up=3), decode(50)])
    for expected in (5, 5, 5, 8):
        cluster.look(observations(0, 400))
        assert cluster.size(P) == expected
    assert UP_STEP_S == 3 * POLL_S


def test_a_burst_counts_at_once_and_noise_does_not() -> None:
    cluster = Cluster()
    cluster.steady(10, 400)
    quiet = cluster.size(P)
    cluster.look(observations(0, 10, burst=12))
    assert cluster.size(P) == quiet
    found = cluster.look(observations(0, 10, burst=100))
    assert found[P].reason == "Burst"
    assert cluster.size(P) > quiet
    assert cluster.reversals(P) <= 1
    cluster.steady(10, 200)
    assert cluster.size(P) > quiet  # what asked for more is still within the window


def test_long_prompts_move_prefill_alone() -> None:
    cluster = Cluster()
    cluster.steady(5, 400)
    before = cluster.size(D)
    long = Flow(5, 5, 5 * PROMPT_TOKENS * 12)
    seen = observations(0, 5, uncached=sketch([PROMPT_TOKENS * 12] * 20))
    flows = dict.fromkeys(Role, Flows(long, long))
    found = cluster.look(replace(seen, flows=flows))
    assert found[P].replicas > 2
    assert cluster.size(D) == before


def test_more_sequences_move_decode_alone() -> None:
    cluster = Cluster()
    cluster.steady(5, 60)
    before = cluster.size(P)
    busy = PoolSignals(workers=2, running=300, kv_tokens_each=1e6, max_running_each=256)
    found = cluster.look(observations(0, 5, decode=busy))
    assert found[D].replicas > 2
    assert found[D].numbers["batch"] == pytest.approx(40, rel=0.05)  # 10 + 40 x 0.5 ms = 30 ms
    assert cluster.size(P) == before


@pytest.mark.parametrize(
    ("signals", "at_least"),
    [
        ({"running": 60.0, "kv_tokens_each": 70_000.0}, 2),  # 60 x 1,000 tokens in 59,500
        ({"running": 60.0, "kv_tokens_each": 20_000.0}, 4),
        ({"running": 10.0, "waiting_grants": 50.0, "kv_tokens_each": 20_000.0}, 4),
        ({"running": 40.0, "waiting_grants": 60.0, "max_running_each": 10.0}, 10),
    ],
)
def test_decode_needs_kv_and_room_to_run(signals: dict[str, float], at_least: int) -> None:
    cluster = Cluster([prefill(), decode(1)])
    busy = PoolSignals(workers=4, **{"max_running_each": 256.0, "kv_tokens_each": 1e6} | signals)
    for _ in range(20):
        cluster.look(observations(0, 0.1, decode=busy))
    assert cluster.size(D) >= at_least


def test_where_kv_bounds_the_batch_steps_are_short_and_stays_too() -> None:
    """Batches of 10 by KV: 15 ms a step, not the 30 ms of the largest batch within TPOT."""
    cluster = Cluster([prefill(), decode(1)])
    busy = PoolSignals(workers=1, running=10, kv_tokens_each=11_765.0, max_running_each=256)
    found = cluster.look(observations(0, 10, decode=busy))[D]
    # 10 a second x 100 tokens x 15 ms are 15 at once; by chance up to 27, 11 a worker.
    assert found.numbers["concurrency"] == pytest.approx(15, rel=0.1)
    assert found.numbers["batch"] == pytest.approx(11.2, rel=0.01)
    assert found.replicas == 3


def test_decode_full_while_prefill_looks_slow_moves_decode() -> None:
    """TTFT is bad since grants are waited for: that says nothing of prefill."""
    cluster = Cluster()
    cluster.steady(5, 400)
    before = cluster.size(P)
    full = PoolSignals(
        workers=2, running=80, waiting_grants=200, kv_tokens_each=1e6, max_running_each=40
    )
    found = cluster.look(observations(0, 5, decode=full))
    assert found[D].replicas > 2
    assert cluster.size(P) == before


def test_prefill_too_slow_while_decode_looks_full_does_not_move_decode() -> None:
    """Decode's KV is granted to prompts that wait for prefill: others wait for grants, and
    it is prefill that has to grow."""
    cluster = Cluster()
    cluster.steady(5, 400)
    before = cluster.size(D)
    granted = PoolSignals(
        workers=2, running=5, waiting_grants=200, kv_used_tokens=200_000, kv_tokens_each=100_000,
        max_running_each=256,
    )  # fmt: skip
    behind = PoolSignals(workers=2, pending_tokens=4_000_000)
    found = cluster.look(observations(0, 5, prefill=behind, decode=granted))
    assert found[P].replicas > 2
    assert found[D].replicas == before


@pytest.mark.parametrize("requests", [0.0, 1.0, 5.0, 17.0, 40.0, 123.0])
def test_constant_load_settles_without_a_see_saw(requests: float) -> None:
    cluster = Cluster()
    cluster.steady(requests, 3600)
    assert len({sizes[P] for sizes in cluster.trail[-100:]}) == 1
    assert len({sizes[D] for sizes in cluster.trail[-100:]}) == 1
    assert cluster.reversals(P) <= 1
    assert cluster.reversals(D) <= 1


def test_load_that_swings_around_a_threshold_does_not_swing_the_pool() -> None:
    cluster = Cluster()
    for number in range(240):
        cluster.look(observations(0, 33.5 + (number % 2)))
    assert cluster.reversals(P) <= 1


# ---- what is missing ----------------------------------------------------------------------


def busy_cluster() -> Cluster:
    cluster = Cluster()
    cluster.steady(60, 400)
    return cluster


NOT_A_NUMBER = Flow(float("nan"), 1, 1)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Observations(), "NoData"),
        (Observations(read_at=0.0, complete=True), "NoData"),
        (
            Observations(
                read_at=0.0,
                complete=True,
                flows=dict.fromkeys(Role, Flows(NOT_A_NUMBER, NOT_A_NUMBER)),
            ),
            "NoData",
        ),
    ],
)
def test_no_data_holds(seen: Observations, reason: str) -> None:
    cluster = busy_cluster()
    sizes = cluster.trail[-1]
    for _ in range(200):
        found = cluster.look(seen)
    assert cluster.trail[-1] == sizes
    assert {(type(one), one.reason) for one in found.values()} == {(Hold, reason)}


def test_stale_data_holds() -> None:
    cluster = busy_cluster()
    seen = observations(cluster.now, 0)
    _, found = decide(cluster.spec(), seen, cluster.state, cluster.now + STALE_S + 1)
    assert {one.reason for one in found.values()} == {"StaleData"}


def test_after_a_time_without_data_the_window_begins_anew() -> None:
    cluster = busy_cluster()
    high = cluster.size(P)
    for _ in range(200):
        cluster.look(Observations())
    cluster.steady(1, 290)
    assert cluster.size(P) == high
    cluster.steady(1, 30)
    assert cluster.size(P) < high


def test_a_single_missed_look_does_not() -> None:
    cluster = busy_cluster()
    high = cluster.size(P)
    cluster.steady(1, 150)
    cluster.look(Observations())
    cluster.steady(1, 160)
    assert cluster.size(P) < high


def test_zero_traffic_is_not_no_data() -> None:
    cluster = busy_cluster()
    cluster.steady(0, 2000)
    assert cluster.trail[-1] == {P: 1, D: 1}
    assert cluster.last[P].reason == "AtTarget"


def test_half_of_the_routers_never_shrink_a_pool_but_may_grow_it() -> None:
    cluster = busy_cluster()
    high = cluster.size(P)
    cluster.steady(1, 1000, complete=False)
    assert cluster.size(P) == high
    assert cluster.last[P].reason == "PartialData"
    cluster.look(observations(0, 100, complete=False))
    assert cluster.size(P) > high


def test_one_stale_worker_keeps_its_pool_and_not_the_other() -> None:
    cluster = busy_cluster()
    high = cluster.size(D)
    stale = PoolSignals(workers=1, stale=1, kv_tokens_each=1e6, max_running_each=256)
    cluster.steady(1, 1500, decode=stale)
    assert cluster.size(D) == high
    assert cluster.size(P) < high


def test_a_restarted_operator_waits_a_window_before_it_shrinks() -> None:
    cluster = busy_cluster()
    high = cluster.size(P)
    cluster.state = State()
    cluster.steady(1, 295, prefill=PoolSignals(workers=2, announced_tokens_per_s=SPEED))
    assert cluster.size(P) == high
    cluster.steady(1, 30, prefill=PoolSignals(workers=2, announced_tokens_per_s=SPEED))
    assert cluster.size(P) < high


def test_a_restart_in_the_burst_goes_on_upwards() -> None:
    cluster = busy_cluster()
    high = cluster.size(P)
    cluster.state = State()
    speed = PoolSignals(workers=2, announced_tokens_per_s=SPEED)
    cluster.look(observations(0, 150, prefill=speed))
    assert cluster.size(P) > high


def test_without_any_idea_of_speed_a_pool_holds() -> None:
    cluster = Cluster(state=State({P: PoolState()}))
    found = cluster.look(observations(0, 1000))
    assert (type(found[P]), found[P].reason) == (Hold, "NoCapacityYet")


def test_workers_that_load_are_no_reason_for_more() -> None:
    """Demand is constant and capacity isn't there yet: the same size is asked for."""
    cluster = Cluster()
    nobody = PoolSignals(workers=0)
    for _ in range(100):
        cluster.look(observations(0, 60, prefill=nobody))
    sizes = {sizes[P] for sizes in cluster.trail[-50:]}
    assert sizes == {cluster.size(P)}
    assert cluster.size(P) <= 10


def test_a_backlog_is_worked_off_and_bounded() -> None:
    cluster = Cluster()
    cluster.steady(20, 400)
    before = cluster.size(P)
    full = PoolSignals(workers=2, pending_tokens=20 * PROMPT_TOKENS * 30)  # thirty seconds' worth
    found = cluster.look(observations(0, 20, prefill=full))
    assert before < found[P].replicas <= before + 3


# ---- targets ------------------------------------------------------------------------------


def test_a_target_that_no_worker_can_meet_is_said_and_not_chased() -> None:
    reachable, hopeless = Cluster(), Cluster([prefill(ttft=Target(99, 0.01)), decode()])
    for cluster in (reachable, hopeless):
        cluster.steady(20, 100)
    found = hopeless.last[P]
    assert found.numbers["infeasible"] == 1.0
    assert "more workers can't meet it" in found.message
    assert hopeless.size(P) <= 3 * reachable.size(P)


def test_a_hopeless_tpot_is_said_too() -> None:
    cluster = Cluster([prefill(), decode(tpot=Target(99, 0.001))])
    cluster.steady(5, 100)
    assert cluster.last[D].numbers["infeasible"] == 1.0


def test_a_target_is_not_called_hopeless_by_a_guess() -> None:
    """A worker that has only had large batches: by the prior slope a lone sequence's step
    takes twice the target, but nobody has seen one."""
    crowded = PoolSignals(
        workers=1, running=100, kv_tokens_each=1e6, max_running_each=256,
        work=(steps(100),),
    )  # fmt: skip
    cluster = Cluster([prefill(), decode(1)], state=State({D: PoolState()}))
    cluster.look(observations(0, 5, decode=crowded))
    guessed = cluster.state.pools[D].learned.line.step_s(1.0)
    assert guessed is not None
    cluster.pools[1] = replace(cluster.pools[1], tpot=Target(99, guessed / 2))
    found = cluster.look(observations(0, 5, decode=crowded))[D]
    assert found.numbers["infeasible"] == 0.0
    lone = replace(crowded, running=1, work=(steps(1), steps(100), steps(1)))
    cluster.look(observations(0, 5, decode=lone))
    cluster.pools[1] = replace(cluster.pools[1], tpot=Target(99, 0.005))
    found = cluster.look(observations(0, 5, decode=lone))[D]
    assert found.numbers["infeasible"] == 1.0


@pytest.mark.parametrize(("target_s", "at_least"), [(5.0, 3), (0.3, 4), (0.15, 4)])
def test_a_tighter_target_needs_more(target_s: float, at_least: int) -> None:
    cluster = Cluster([prefill(ttft=Target(99, target_s)), decode()])
    cluster.steady(25, 900)
    assert at_least <= cluster.size(P) <= 8


def test_what_workers_do_is_learned() -> None:
    cluster = Cluster(state=State({D: PoolState(learned=known())}))
    fast = Work("p-0", 100, POLL_S, 20_000 * POLL_S, True)
    cold = Work("p-1", 5, POLL_S, 100 * POLL_S, False)
    for _ in range(5):
        cluster.look(observations(0, 30, prefill=PoolSignals(workers=2, work=(fast, cold))))
    assert cluster.last[P].numbers["speed"] == pytest.approx(20_000, rel=0.01)


# ---- all pools together -------------------------------------------------------------------


def test_the_budget_goes_to_who_lacks_most_and_takes_from_nobody() -> None:
    cluster = Cluster([prefill(4), decode(4)], gpus=10)
    cluster.steady(200, 300)
    assert cluster.size(P) + cluster.size(D) == 10
    assert cluster.size(P) >= 4
    assert cluster.last[P].reason == "Budget"


def test_a_fixed_pool_keeps_its_size_and_its_gpus() -> None:
    cluster = Cluster([prefill(2), decode(4, fixed=True)], gpus=8)
    cluster.steady(200, 300)
    assert cluster.trail[-1] == {P: 4, D: 4}
    assert cluster.last[D] == Hold(4, "FixedReplicas", "replicas are fixed")


def test_a_pool_outside_its_new_bounds_comes_back_even_without_data() -> None:
    cluster = Cluster([prefill(8, maximum=5), decode(1, minimum=3)])
    found = cluster.look(Observations())
    assert cluster.trail[-1] == {P: 5, D: 3}
    assert found[P].reason == found[D].reason == "OutOfBounds"


def test_the_ratio_raises_the_smaller_pool() -> None:
    spec = Spec((prefill(2), decode(2)), ratio=Ratio(0.5, 1.0))
    state = State({role: PoolState(learned=known()) for role in Role})
    _, found = decide(spec, observations(100.0, 40), state, 100.0)
    assert found[P].replicas <= found[D].replicas
    assert found[D].reason == "Ratio"


def zero_pools(replicas: int = 1) -> list[Any]:
    return [prefill(replicas, minimum=0), decode(replicas, minimum=0)]


def test_zero_and_back_together() -> None:
    cluster = Cluster(zero_pools())
    cluster.steady(0, 1000)
    assert cluster.trail[-1] == {P: 0, D: 0}
    nobody = {"prefill": PoolSignals(), "decode": PoolSignals()}
    cluster.look(observations(0, 0, held_requests=1.0, **nobody))
    assert cluster.trail[-1] == {P: 1, D: 1}


def test_zero_wakes_without_having_learned_anything() -> None:
    cluster = Cluster(zero_pools(0), state=State({P: PoolState(), D: PoolState()}))
    nobody = {"prefill": PoolSignals(), "decode": PoolSignals()}
    cluster.look(observations(0, 1, **nobody))
    assert cluster.trail[-1] == {P: 1, D: 1}


def test_a_sequence_that_still_runs_keeps_both_awake() -> None:
    cluster = Cluster(zero_pools())
    running = PoolSignals(workers=1, running=1, kv_tokens_each=1e6, max_running_each=256)
    cluster.steady(0, 1000, decode=running)
    assert cluster.trail[-1] == {P: 1, D: 1}
