"""A walk whose prefill produces nothing for long: a second one, and which of the two counts."""

from typing import Any

import pytest

from pd_core.failures import FailureKind
from pd_router.fleet import WorkerId
from pd_router.hedging import Hedge, Hedging
from pd_router.moves import (
    CancelSide,
    CloseSide,
    Hedged,
    OpenDecode,
    OpenPrefill,
    Retried,
    Side,
    Token,
)
from pd_router.policy import Unplaced
from tests.pd_router.walk_driver import D0, D1, GRANT, P0, P1, Driver, first, kinds


def slow_prefill(**options: Any) -> Driver:
    """Asked to begin elsewhere after 2 s; the first prefill has said nothing for so long."""
    w = Driver(hedging=Hedging(Hedge(after_s=2.0)), **options)
    w.start()
    w.granted()
    assert w.walk.next_deadline == w.now + 2.0
    return w


def test_a_slow_prefill_is_hedged_and_the_first_token_0_wins() -> None:
    w = slow_prefill()
    (opened,) = w.tick(2.0)
    assert isinstance(opened, OpenDecode)
    assert (opened.side, opened.worker, opened.prefill) == (Side(2, False), D1, P1)
    assert opened.hedge
    assert opened.grant_wait_s == w.config.stale_choice_s, "room is there or it isn't"
    assert w.asked[1][1].disliked == {P0}
    assert kinds(w.granted(2)) == [OpenPrefill]
    assert w.prefilled(first(), 2) == [
        CancelSide(Side(1, False)),
        CancelSide(Side(1, True)),
        Hedged(won=True),
        Token(0, 0, 0),
    ]
    assert w.prefilled(first(), 1) == [], "the loser finds nobody"
    assert w.committed(first(), 1) == []
    assert w.committed(first(), 2) == [CloseSide(Side(2, True))]
    assert w.token(1, attempt=2) == [Token(0, 1, 1)]
    assert (w.line.prefill_worker, w.line.decode_worker, w.line.attempts) == ("p-1", "d-1", 2)
    assert w.line.reason == "because; p-1 computed it too from 2.000 s on, ahead of p-0"
    assert w.hedging.running == 0


@pytest.mark.parametrize("granted", [True, False])
def test_the_first_may_win_after_all(granted: bool) -> None:
    w = slow_prefill()
    w.tick(2.0)
    if granted:
        w.granted(2)
    told = w.prefilled(first())
    cancelled = [CancelSide(Side(2, False)), *([CancelSide(Side(2, True))] if granted else [])]
    assert told == [*cancelled, Hedged(won=False), Token(0, 0, 0)]
    assert w.granted(2) == []
    assert w.line.reason == "because; p-1 computed it too from 2.000 s on, behind p-0"
    assert w.line.prefill_worker == "p-0"
    assert w.line.grant_wait_s == GRANT.wait_s, "once"


def test_a_commit_decides_it_too() -> None:
    w = slow_prefill()
    w.tick(2.0)
    w.granted(2)
    assert Hedged(won=True) in w.committed(first(), 2)
    assert w.prefilled(first(), 1) == []


@pytest.mark.parametrize("first_fails", [True, False])
def test_of_two_attempts_the_one_that_lives_is_the_retry(first_fails: bool) -> None:
    w = slow_prefill()
    w.tick(2.0)
    w.granted(2)
    dead, alive = (1, 2) if first_fails else (2, 1)
    told = w.failed(FailureKind.INTERNAL, dead, prefill=True)  # which else would end it
    assert told == [
        CloseSide(Side(dead, True)),
        CancelSide(Side(dead, False)),
        Hedged(won=first_fails),
    ]
    assert w.prefilled(first(), alive) == [Token(0, 0, 0)]
    assert w.hedging.running == 0


def test_the_one_that_lives_may_be_hedged_again() -> None:
    w = slow_prefill()
    w.tick(2.0)
    w.failed(FailureKind.WORKER_LOST)
    w.granted(2)
    w.places = [(D0, P0)]
    assert kinds(w.tick(2.0)) == [OpenDecode]
    assert Hedged(won=False) in w.walk.cancel()
    assert w.hedging.running == 0


def test_when_both_have_failed_it_is_retried() -> None:
    w = slow_prefill()
    w.tick(2.0)
    w.granted(2)
    w.failed(FailureKind.TRANSFER_FAILED, 1)
    assert kinds(w.failed(FailureKind.TRANSFER_FAILED, 2)) == [CloseSide, CancelSide, Retried]
    assert w.retry().side == Side(3, False)
    assert w.asked[2][1].disliked == {D0, P0, D1, P1}


def test_a_hedge_that_finds_no_room_is_dropped_and_bars_nobody() -> None:
    w = slow_prefill()
    w.tick(2.0)
    assert w.failed(FailureKind.NO_CAPACITY, 2) == [CloseSide(Side(2, False)), Hedged(won=False)]
    assert w.walk.next_deadline == 100.0 + w.config.prefill_wait_s, "and not hedged again"
    w.failed(FailureKind.WORKER_LOST)
    w.retry()
    assert not w.asked[2][1].barred


@pytest.mark.parametrize(
    "place", [Unplaced("nobody"), (D0, None), (D1, P0)], ids=["nobody", "decode itself", "the same"]
)
def test_without_another_prefill_worker_it_looks_again_later(
    place: Unplaced | tuple[WorkerId, WorkerId | None],
) -> None:
    w = slow_prefill(places=[(D0, P0), place, (D1, P1)])
    assert w.tick(2.0) == []
    assert w.walk.next_deadline == w.now + 2.0
    assert kinds(w.tick(2.0)) == [OpenDecode]


def test_without_room_for_hedges_there_is_none() -> None:
    w = slow_prefill()
    w.hedging.running = 1
    assert w.tick(2.0) == []
    w.hedging.running = 0
    assert kinds(w.tick(2.0)) == [OpenDecode]


def test_it_waits_until_the_other_would_have_been_sooner() -> None:
    w = slow_prefill(places=[(D0, P0), (D1, P1), (D1, P1)])
    w.ttft_s = 3.0
    assert w.tick(2.0) == []
    assert kinds(w.tick(2.0)) == [OpenDecode]


def test_hedges_end_with_the_request() -> None:
    for end in ("cancel", "deadline"):
        w = slow_prefill()
        w.tick(2.0)
        w.granted(2)
        told = w.walk.cancel() if end == "cancel" else w.tick(600.0)
        assert len([a for a in told if isinstance(a, CancelSide)]) == 4
        assert Hedged(won=False) in told
        assert w.hedging.running == 0
