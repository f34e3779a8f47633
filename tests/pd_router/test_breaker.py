"""Lateness and the breaker: when it opens, how it closes again."""

from dataclasses import replace

import pytest

from pd_router.breaker import Breaker, Progress, State
from pd_router.fleet import LoadReport

BUSY = LoadReport(queued=1, running=2, pending_tokens=100, kv_blocks=10, kv_free=5, steps=7)


def test_open_then_one_probe_then_closed() -> None:
    breaker = Breaker()
    assert breaker.lets_through
    breaker.trip("late", 10.0)
    assert not breaker.lets_through
    breaker.alive(11.0)
    assert breaker.state is State.OPEN
    breaker.alive(12.0)
    assert breaker.state is State.HALF_OPEN
    assert breaker.lets_through
    probe = breaker.chosen()
    assert probe
    assert not breaker.lets_through
    assert not breaker.chosen()
    assert breaker.answered(probe)
    assert breaker.state is State.CLOSED
    assert not breaker.answered(probe)


def test_late_again_waits_longer_each_time() -> None:
    breaker = Breaker()
    now = 0.0
    pauses = []
    probe = 0
    for _ in range(7):
        breaker.trip("late", now)
        began = now
        while breaker.state is State.OPEN:
            now += 0.5
            breaker.alive(now)
        pauses.append(now - began)
        probe = breaker.chosen()
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert breaker.answered(probe)
    breaker.trip("late", now)
    breaker.alive(now + 2.0)
    assert breaker.state is State.HALF_OPEN


def half_open(*, faulty: bool = False) -> Breaker:
    """At 5 s; it opened at 0."""
    breaker = Breaker()
    breaker.trip("it fails", 0.0, faulty=faulty)
    breaker.alive(5.0)
    assert breaker.state is State.HALF_OPEN
    return breaker


def test_a_probe_that_told_nothing_makes_room_for_another() -> None:
    breaker = half_open()
    breaker.over(breaker.chosen())
    assert breaker.lets_through
    assert breaker.state is State.HALF_OPEN


def test_old_requests_neither_close_it_nor_end_the_probe() -> None:
    """They were sent before it opened, or are the probe of an earlier time."""
    breaker = half_open()
    first = breaker.chosen()
    breaker.trip("late again", 6.0)
    breaker.alive(20.0)
    second = breaker.chosen()
    for old in (0, first):
        assert not breaker.answered(old)
        assert not breaker.succeeded(old)
        breaker.over(old)
        assert not breaker.lets_through, "the probe is out"
    assert breaker.answered(second)


@pytest.mark.parametrize("probing", [False, True])
def test_old_requests_do_not_open_it_again(probing: bool) -> None:
    """One that was sent while it was closed, or open as the only one there was, fails late."""
    breaker = half_open(faulty=True)
    probe = breaker.chosen() if probing else 0
    for at, sent_at in ((5.0, 0.0), (6.0, 4.9), (7.0, 1.0), (8.0, 4.0), (9.0, 4.0), (9.5, 4.0)):
        assert not breaker.failed(1.0, at, sent_at)
    assert breaker.lets_through is not probing
    probe = probe or breaker.chosen()
    assert breaker.succeeded(probe)
    assert not breaker.failed(1.0, 10.0, 4.0)
    assert not any(breaker.failed(1.0, 11.0 + at, 10.5) for at in range(4)), "it starts anew"
    assert breaker.failed(1.0, 16.0, 10.5)


def test_the_probe_opens_it_again() -> None:
    breaker = half_open(faulty=True)
    assert breaker.chosen()
    assert breaker.failed(1.0, 6.0, 5.0)


def test_late_only_with_work() -> None:
    progress = Progress()
    assert progress.late(0.0, 0, 1e9) is None
    progress.expect(100.0)
    assert progress.late(0.0, 0, 101.9) is None
    late = progress.late(0.0, 0, 102.1)
    assert late is not None
    assert "2.1 s" in late
    progress.moved(102.0)
    assert progress.late(0.0, 0, 103.0) is None
    progress.expect(103.9)  # a second one doesn't set the clock back
    assert progress.late(0.0, 0, 104.1) is not None
    progress.expect_no_more()
    progress.expect_no_more()
    assert progress.late(0.0, 0, 1e9) is None
    progress.expect(200.0)
    assert progress.late(0.0, 0, 201.0) is None


def test_slow_steps_and_long_prompts_are_allowed_for() -> None:
    progress = Progress(prefill_tokens_per_s=1000.0)
    assert progress.allowed_s(0.01, 0) == 2.0
    assert progress.allowed_s(0.5, 0) == 10.0
    assert progress.allowed_s(0.01, 6000) == 60.0
    assert Progress().allowed_s(0.01, 1000) == 100.0


def test_heartbeats_show_that_steps_go_on() -> None:
    progress = Progress()
    progress.expect(0.0)
    assert progress.heartbeat(BUSY, replace(BUSY, steps=8), 5.0)
    assert progress.late(0.0, 0, 6.0) is None
    assert not progress.heartbeat(BUSY, replace(BUSY, queued=9), 7.5)
    assert progress.late(0.0, 0, 7.6) is not None
    assert progress.heartbeat(BUSY, replace(BUSY, queued=0, running=0, pending_tokens=0), 8.0)


def test_an_engine_that_doesnt_count_steps() -> None:
    progress = Progress()
    silent = replace(BUSY, steps=0)
    assert not progress.heartbeat(silent, silent, 1.0)
    assert progress.heartbeat(silent, replace(silent, pending_tokens=50), 2.0)


def test_half_of_the_last_outcomes_failed_is_too_much() -> None:
    for outcomes in ("fffff", "sfsfsfsfsf", "ssssssssssfffff", "sssssfffff"):
        breaker = Breaker()
        verdicts = [outcome(breaker, one, i) for i, one in enumerate(outcomes)]
        assert verdicts == [False] * (len(outcomes) - 1) + [True], outcomes
    for outcomes in ("ffff", "ffffssssssf", "sssf" * 20):
        breaker = Breaker()
        assert not any(outcome(breaker, one, i) for i, one in enumerate(outcomes)), outcomes


def outcome(breaker: Breaker, one: str, at: float) -> bool:
    return breaker.failed(1.0, at, at) if one == "f" else breaker.succeeded(0)


def test_what_failed_at_one_moment_counts_once() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(1.0, 7.0, 6.0) for _ in range(50))


def test_a_shared_fault_counts_in_part() -> None:
    breaker = Breaker()
    assert [breaker.failed(0.5, at, at) for at in range(10)] == [False] * 9 + [True]


def test_after_failures_only_a_probe_that_was_computed_closes_it() -> None:
    breaker = Breaker()
    breaker.trip("it fails", 0.0, faulty=True)
    breaker.alive(2.0)
    probe = breaker.chosen()
    assert not breaker.answered(probe), "a grant, or another failure, shows nothing"
    assert not breaker.succeeded(0), "sent before it opened"
    assert breaker.failed(1.0, 3.0, 2.0)
    breaker.trip("it fails", 3.0, faulty=True)
    breaker.alive(6.9)
    assert breaker.state is State.OPEN
    breaker.alive(7.0)
    assert breaker.succeeded(breaker.chosen())
    assert breaker.state is State.CLOSED
    assert not any(breaker.failed(1.0, at, at) for at in range(8, 12)), "it starts anew"
