"""Covers scaling.rates: counters into rates. A restart of a router or of ours is no spike, a
router that is silent makes sums lower bounds, workers that are silent aren't counted."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.api import Role
from pd_operator.measured import Counters, Length, RouterReading, Samples, WorkerReading
from pd_operator.scaling.rates import HEARD_S, History, extend, observe
from pd_operator.scaling.types import Answered, Flow, Observations, Spec
from tests.pd_operator.scaling.world import decode, prefill

SPEC = Spec((prefill(), decode()))
P, D = Role.PREFILL, Role.DECODE


def router(at: float, requests: float, process: str = "a", **fields: Any) -> RouterReading:
    counters = Counters(
        arrived_requests=requests, arrived_sequences=2 * requests, arrived_tokens=100 * requests
    )
    made: dict[str, Any] = {"uptime_s": 1000.0, "counters": counters}
    return RouterReading(process, at, **made | fields)


def worker(at: float, name: str = "p-0", **fields: Any) -> WorkerReading:
    made: dict[str, Any] = {"epoch": "e", "role": "prefill", "heartbeats": 5}
    return WorkerReading(name, heard_at=at, **made | fields)


def read(*samples: Samples) -> Observations:
    history = History()
    for one in samples:
        history = extend(history, one)
    return observe(history, SPEC)


def of(
    *routers: RouterReading, workers: tuple[WorkerReading, ...] = (), silent: int = 0
) -> Samples:
    return Samples(routers=routers, workers=workers, silent=silent)


def long(found: Observations) -> Flow:
    flow = found.flows[P].long
    assert flow is not None
    return flow


def test_one_reading_is_no_rate() -> None:
    found = read(of(router(0, 1000)))
    assert found.flows[P].long is None
    assert found.read_at == 0


def test_two_readings_are_one() -> None:
    found = read(of(router(0, 1000)), of(router(5, 1050)))
    assert long(found) == Flow(10, 20, 1000)


def test_routers_add_up() -> None:
    found = read(of(router(0, 10), router(0, 90, "b")), of(router(5, 20), router(5, 140, "b")))
    assert long(found).requests == 12


def test_a_restarted_router_is_no_spike() -> None:
    """Its counters begin at zero, and all they say has happened since."""
    found = read(of(router(0, 1000)), of(router(5, 1050)), of(router(10, 30, "b", uptime_s=3)))
    assert long(found).requests == 8


def test_a_router_whose_past_is_unknown_begins_to_count() -> None:
    found = read(of(router(0, 0)), of(router(5, 0), router(5, 10**6, "b", uptime_s=9999)))
    assert long(found).requests == 0


def test_counters_that_fall_count_nothing() -> None:
    assert long(read(of(router(0, 1000)), of(router(5, 10)))).requests == 0


def test_the_windows_differ() -> None:
    samples = [of(router(5.0 * i, 10 * i)) for i in range(20)]
    samples.append(of(router(100, 190 + 500)))
    found = read(*samples)
    short = found.flows[P].short
    assert short is not None
    assert short.requests == pytest.approx((500 + 10) / 10)
    assert long(found).requests == pytest.approx((500 + 110) / 60)


def test_those_turned_away_unread_count_as_the_others() -> None:
    after = router(5, 100)
    after = replace(after, counters=replace(after.counters, unread_requests=50))
    assert long(read(of(router(0, 0)), of(after))) == Flow(30, 60, 3000)


def test_a_silent_router_makes_it_incomplete() -> None:
    both = of(router(0, 0), router(0, 0, "b"))
    one = of(router(5, 50), silent=1)
    found = read(both, one)
    assert not found.complete
    assert long(found).requests == 10
    again = read(both, one, of(router(10, 100), router(10, 100, "b")))
    assert again.complete
    assert long(again).requests == 20  # what it counted while it was silent isn't lost


def test_nobody_answers() -> None:
    found = read(of(router(0, 0)), of(router(5, 50)), of(silent=1))
    assert (found.complete, found.read_at) == (False, 5)
    assert not read(of(router(0, 0)), of()).complete


def test_averages_are_of_the_last_minute() -> None:
    def at(time: float, started: float) -> Samples:
        counters = Counters(
            started_requests=started, started_tokens=100 * started, uncached_tokens=25 * started,
            overhead_s=0.5 * started, ended_sequences=started, ended_tokens=40 * started,
        )  # fmt: skip
        return of(router(time, 0, counters=counters))

    found = read(at(0, 7), at(5, 17))
    assert (found.uncached_share, found.overhead_s, found.output_tokens) == (0.25, 0.5, 40)
    quiet = read(at(0, 7), at(5, 7))
    assert (quiet.uncached_share, quiet.overhead_s, quiet.output_tokens) == (None, None, None)


def test_lengths_of_prompts_and_of_their_answers() -> None:
    def at(time: float, **counted: Any) -> Samples:
        return of(router(time, 0, counters=Counters(**counted)))

    before, after = {6: Length(5, 5, 50)}, {6: Length(15, 10, 150), 14: Length(10, 0, 0)}
    found = read(at(0, lengths=before), at(5, arrived_requests=20, lengths=after))
    assert long(found).lengths == {6: 2, 14: 2}
    assert found.answers == {6: Answered(5, 100)}
    unread = read(at(0), at(5, arrived_requests=20, unread_requests=20, lengths=after))
    assert long(unread).lengths == {6: 6, 14: 4}


def test_what_workers_say() -> None:
    workers = (
        worker(9, running=3, pending_tokens=100, kv_tokens=1000, prefill_tokens_per_s=50),
        worker(8, "p-1", running=1, kv_tokens=500, draining=True),
        worker(10 - HEARD_S - 1, "p-2", running=9),
        worker(10, "p-3", heartbeats=0),
        worker(10, "d-0", role="decode", running=70),
        worker(10, "x-0", role="conductor"),
    )
    found = read(of(router(10, 0), workers=workers)).pools
    prefill = found[P]
    assert (prefill.workers, prefill.stale, prefill.running) == (1, 2, 4)
    assert (prefill.kv_tokens_each, prefill.announced_tokens_per_s) == (500, 50)
    assert found[D].running == 70
    assert set(found) == {P, D}


def test_what_workers_did() -> None:
    def at(time: float, steps: float, **fields: Any) -> Samples:
        told = worker(time, steps=steps, busy_s=steps / 10, computed_tokens=7 * steps, **fields)
        return of(router(time, 0), workers=(told,))

    (work,) = read(at(0, 100), at(5, 150)).pools[P].work
    assert (work.steps, work.busy_s, work.tokens, work.warm) == (50, 5, 350, True)
    (cold,) = read(at(0, 3), at(5, 150)).pools[P].work
    assert not cold.warm
    assert read(at(0, 100), at(5, 100)).pools[P].work == ()
    assert read(at(0, 100), at(5, 150, epoch="new")).pools[P].work == ()


@given(st.lists(st.tuples(st.floats(0.5, 30), st.integers(0, 1000), st.booleans()), max_size=60))
def test_no_arrival_is_counted_twice_or_lost(moves: list[tuple[float, int, bool]]) -> None:
    """With restarts of the router in between; and what is kept stays bounded."""
    now, count, born, process, total = 0.0, 0, -1000.0, 0, 0
    history = extend(History(), of(router(0, 0, "0")))
    for pause_s, arrivals, restarts in moves:
        now += pause_s
        if restarts:
            process, count, born = process + 1, 0, now - pause_s / 2
        count += arrivals
        total += arrivals
        history = extend(history, of(router(now, count, str(process), uptime_s=now - born)))
    assert history.points[-1].total.arrived_requests == total
    assert all(point.at >= now - 60 for point in history.points[1:])
