"""The walk, step by step: who is told what, and when, for each rule of the protocol."""

import pytest

from pd_core.failures import Failure, FailureKind
from pd_router.fleet import WorkerId
from pd_router.moves import (
    CancelSide,
    CloseSide,
    Done,
    Fail,
    OpenDecode,
    OpenPrefill,
    Retried,
    Side,
    Token,
    WalkConfig,
)
from pd_router.policy import Exclusions, Need, Unplaced
from pd_router.types import FinishReason
from tests.pd_router.walk_driver import D0, D1, GRANT, P0, P1, PROMPT, Driver, failure, first, kinds

FAULTS = (FailureKind.STEP_FAILED, FailureKind.TRANSFER_FAILED, FailureKind.INTERNAL)


def test_the_straight_line() -> None:
    w = Driver(max_tokens=3)
    (opened,) = w.start()
    assert isinstance(opened, OpenDecode)
    assert (opened.worker, opened.token_ids, opened.choices) == (D0, PROMPT, (0,))
    assert not opened.prefill_here
    (prefill,) = w.granted()
    assert isinstance(prefill, OpenPrefill)
    assert (prefill.worker, prefill.decode, prefill.grant) == (P0, D0, GRANT)
    assert w.prefilled(first()) == list(first())
    assert w.committed(first()) == [CloseSide(Side(1, True))]
    assert w.token(1) == [Token(0, 1, 1)]
    end = w.token(2, finish="length")
    assert end == [Token(0, 2, 2, "length"), CloseSide(Side(1, False)), Done()]
    assert w.walk.ended
    line = w.line
    assert (line.prefill_worker, line.decode_worker, line.attempts) == ("p-0", "d-0", 1)
    assert (line.grant_wait_s, line.prefill_queue_s, line.prefill_s) == (0.5, 0.1, 0.2)
    assert (line.kv_bytes, line.transfer_s, line.transport) == (64, 0.3, "tcp")
    assert (line.cached_tokens, line.reason) == (2, "because")


def test_prefill_here() -> None:
    w = Driver(max_tokens=2, places=[(D0, None)])
    (opened,) = w.start()
    assert isinstance(opened, OpenDecode)
    assert opened.prefill_here
    assert w.prefilled(first(), here=True) == list(first())
    assert kinds(w.token(1, finish="length")) == [Token, CloseSide, Done]
    assert w.line.prefill_worker == w.line.decode_worker == "d-0"
    assert w.line.transport == ""


def test_all_ended_by_token_0_gives_the_grant_back() -> None:
    w = Driver(choices=2)
    w.start()
    w.granted()
    assert kinds(w.prefilled(first(2, finish="stop"))) == [
        Token,
        Token,
        CancelSide,
        CancelSide,
        Done,
    ]


def test_one_choice_ended_by_token_0_isnt_the_end() -> None:
    w = Driver(choices=2, max_tokens=2)
    w.start()
    w.granted()
    tokens = (Token(0, 0, 0, "stop"), Token(1, 0, 100))
    assert w.prefilled(tokens) == list(tokens)
    w.committed(tokens)
    assert kinds(w.token(1, choice=1, finish="length")) == [Token, CloseSide, Done]


def test_the_commit_may_overtake_token_0_from_p() -> None:
    w = Driver()
    w.start()
    w.granted()
    assert w.committed(first()) == list(first())
    assert w.token(1) == [Token(0, 1, 1)]
    assert w.prefilled(first()) == [CloseSide(Side(1, True))]
    assert w.line.prefill_s == 0.2
    w2 = Driver(max_tokens=1)
    w2.start()
    w2.granted()
    ended = w2.committed(first(finish="length"))
    assert kinds(ended) == [Token, CloseSide, CloseSide, Done]


def test_seen_indices_are_dropped_and_later_frames_of_old_attempts_too() -> None:
    w = Driver()
    w.to_decode()
    w.token(1)
    assert w.token(1) == []
    assert w.token(0) == []
    w.failed(FailureKind.WORKER_LOST)
    assert w.token(2) == []
    assert w.granted() == []
    assert w.committed(first()) == []
    assert w.failed(FailureKind.WORKER_LOST) == []
    assert w.retry().token_ids == (*PROMPT, 0, 1)
    assert w.token(2) == []
    assert w.walk.emitted(0) == [0, 1]


def test_p_failing_before_the_commit_cancels_d() -> None:
    w = Driver()
    w.start()
    w.granted()
    told = w.failed(FailureKind.STEP_FAILED, prefill=True)
    assert told == [
        CloseSide(Side(1, True)),
        CancelSide(Side(1, False)),
        Retried(failure(FailureKind.STEP_FAILED)),
    ]
    assert w.retry().side == Side(2, False)
    assert w.asked[1][1].disliked == {P0}


def test_d_failing_before_the_commit_cancels_p() -> None:
    w = Driver()
    w.start()
    w.granted()
    told = w.failed(FailureKind.WORKER_LOST)
    assert kinds(told) == [CloseSide, CancelSide, Retried]
    assert told[1] == CancelSide(Side(1, True))
    w.retry()
    assert w.asked[1][1].disliked == {D0}


def test_p_failing_after_the_commit_is_of_no_interest() -> None:
    w = Driver()
    w.start()
    w.granted()
    w.committed(first())
    assert w.failed(FailureKind.WORKER_LOST, prefill=True) == [CloseSide(Side(1, True))]
    assert w.token(1) == [Token(0, 1, 1)]


@pytest.mark.parametrize("verdict", ["commit", "fail", "silence"])
def test_p_failing_after_token_0_waits_for_ds_verdict(verdict: str) -> None:
    w = Driver()
    w.start()
    w.granted()
    w.prefilled(first())
    told = w.failed(FailureKind.TRANSFER_FAILED, prefill=True)
    assert told == [CloseSide(Side(1, True))]
    assert w.walk.next_deadline == w.now + w.config.verdict_wait_s
    if verdict == "commit":
        assert w.committed(first()) == []
        assert w.token(1) == [Token(0, 1, 1)]
    elif verdict == "fail":
        assert kinds(w.failed(FailureKind.TRANSFER_FAILED)) == [CloseSide, Retried]
        assert w.retry().token_ids == (*PROMPT, 0)
    else:
        assert w.tick(1.9) == []
        assert kinds(w.tick(0.2)) == [CancelSide, Retried]
        assert w.retry().token_ids == (*PROMPT, 0)


def test_p_lost_before_token_0_may_have_sealed() -> None:
    w = Driver()
    w.start()
    w.granted()
    w.failed(FailureKind.WORKER_LOST, prefill=True)
    assert w.committed(first()) == list(first())
    assert w.token(1) == [Token(0, 1, 1)]
    assert w.line.cached_tokens == 2
    other = Driver()
    other.start()
    other.granted()
    other.failed(FailureKind.WORKER_LATE, prefill=True)
    assert kinds(other.tick(0.31)) == [CancelSide, Retried]


def test_a_late_worker_is_told_to_drop_it() -> None:
    w = Driver()
    w.to_decode()
    assert kinds(w.failed(FailureKind.WORKER_LATE)) == [CancelSide, Retried]


def test_resumption_goes_on_at_the_next_index() -> None:
    w = Driver(max_tokens=4)
    w.to_decode()
    w.token(1)
    w.failed(FailureKind.PREEMPTED)
    opened = w.retry()
    assert (opened.side, opened.worker) == (Side(2, False), D1)
    assert opened.token_ids == (*PROMPT, 0, 1)
    assert w.asked[1][0] == Need(tokens=5, output_tokens=2, choices=1)
    w.granted(2)
    assert w.prefilled(first(index=2), 2) == [Token(0, 2, 2)]
    w.committed(first(index=2), 2)
    assert kinds(w.token(3, attempt=2, finish="length")) == [Token, CloseSide, Done]
    assert w.line.reason == "because; attempt 2 after preempted"


def test_several_choices_with_tokens_out_go_on_each_alone() -> None:
    w = Driver(choices=3, max_tokens=3)
    w.to_decode()
    w.token(1, choice=0)
    w.token(1, choice=1)
    w.token(2, choice=1, finish="length")
    w.failed(FailureKind.WORKER_LOST)
    opened = w.tick(1.0)
    assert [
        (a.side.attempt, a.choices, a.token_ids) for a in opened if isinstance(a, OpenDecode)
    ] == [
        (2, (0,), (*PROMPT, 0, 1)),
        (3, (2,), (*PROMPT, 200)),
    ]
    for attempt, choice, index in [(3, 2, 1), (2, 0, 2)]:
        w.granted(attempt)
        finish: FinishReason | None = "length" if index == 2 else None
        token = (Token(choice, index, 0, finish),)
        w.prefilled(token, attempt)
        if finish is None:
            w.committed(token, attempt)
    assert not w.walk.ended
    assert kinds(w.token(2, choice=2, attempt=3, finish="length"))[-1] is Done


def test_several_choices_without_tokens_stay_together() -> None:
    w = Driver(choices=3)
    w.start()
    w.failed(FailureKind.WORKER_LOST)
    assert w.retry().choices == (0, 1, 2)


def test_one_choice_failing_for_good_fails_all() -> None:
    w = Driver(choices=2)
    w.to_decode()
    w.failed(FailureKind.WORKER_LOST)
    w.tick(1.0)
    told = w.failed(FailureKind.INTERNAL, 2)
    assert told == [
        CloseSide(Side(2, False)),
        CancelSide(Side(3, False)),
        Fail(failure(FailureKind.INTERNAL)),
    ]
    assert w.walk.ended


def test_retries_are_counted() -> None:
    w = Driver(config=WalkConfig(max_retries=2))
    w.start()
    for attempt in (1, 2):
        assert kinds(w.failed(FailureKind.WORKER_LOST, attempt))[-1] is Retried
        w.retry()
    assert kinds(w.failed(FailureKind.WORKER_LOST, 3)) == [CloseSide, Fail]


def test_a_failed_step_is_retried_once() -> None:
    w = Driver()
    w.start()
    w.failed(FailureKind.STEP_FAILED)
    w.retry()
    assert kinds(w.failed(FailureKind.STEP_FAILED, 2)) == [CloseSide, Fail]


@pytest.mark.parametrize(
    "kind",
    [
        FailureKind.INVALID_REQUEST,
        FailureKind.POOL_TOO_SMALL,
        FailureKind.CONTEXT_TOO_LONG,
        FailureKind.DEADLINE,
        FailureKind.INTERNAL,
    ],
)
def test_some_failures_are_final(kind: FailureKind) -> None:
    w = Driver()
    w.start()
    assert w.failed(kind) == [CloseSide(Side(1, False)), Fail(failure(kind))]


@pytest.mark.parametrize(
    ("kind", "prefill", "expected"),
    [
        (FailureKind.STEP_FAILED, True, [(P0,)]),
        (FailureKind.STEP_FAILED, False, [(D0,)]),
        (FailureKind.INTERNAL, False, [(D0,)]),
        (FailureKind.TRANSFER_FAILED, True, [(D0, P0)]),
        (FailureKind.TRANSFER_FAILED, False, [(D0, P0)]),
        *((kind, False, []) for kind in FailureKind if kind not in FAULTS),
    ],
)
def test_whose_fault_it_was(
    kind: FailureKind, prefill: bool, expected: list[tuple[WorkerId, ...]]
) -> None:
    w = Driver()
    w.start()
    w.granted()
    w.failed(kind, prefill=prefill)
    assert w.blamed == expected


def test_a_fault_is_of_the_time_when_the_worker_got_it() -> None:
    w = Driver()
    w.start()
    began = w.now
    w.now += 0.1
    w.granted()
    w.now += 0.1
    w.failed(FailureKind.TRANSFER_FAILED, prefill=True)
    assert w.sent_at == [(began, began + 0.1)]


def test_a_request_that_fails_wherever_it_goes_is_itself_to_blame() -> None:
    w = Driver()
    w.start()
    w.failed(FailureKind.STEP_FAILED)
    w.retry()
    w.failed(FailureKind.STEP_FAILED, 2)
    assert w.blamed == [(D0,)]


def test_what_an_attempt_learns() -> None:
    for kind, prefill, expected in [
        (FailureKind.NO_CAPACITY, False, Exclusions(barred={D0})),
        (FailureKind.DRAINING, True, Exclusions(barred={P0})),
        (FailureKind.LAYOUT_MISMATCH, True, Exclusions(pairs={(D0, P0)})),
        (FailureKind.TRANSFER_FAILED, True, Exclusions(disliked={D0, P0})),
        (FailureKind.STEP_FAILED, False, Exclusions(disliked={D0})),
    ]:
        w = Driver()
        w.start()
        w.granted()
        w.failed(kind, prefill=prefill)
        w.retry()
        assert w.asked[1][1] == expected


def test_after_a_long_wait_for_the_grant_prefill_is_chosen_anew() -> None:
    w = Driver(places=[(D0, P0), (D0, P1)])
    w.start()
    w.now += 1.0
    (prefill,) = w.granted()
    assert isinstance(prefill, OpenPrefill)
    assert (prefill.worker, prefill.decode, w.decode_at) == (P1, D0, D0)
    assert w.line.prefill_worker == "p-1"
    draining = Driver(places=[(D0, P0), Unplaced("d-0 takes nothing new")])
    draining.start()
    draining.now += 1.0
    (prefill,) = draining.granted()
    assert isinstance(prefill, OpenPrefill)
    assert prefill.worker == P0
    alone = Driver(places=[(D0, P0), (D0, None), (D0, None)])
    alone.start()
    alone.now += 1.0
    assert kinds(alone.granted()) == [CancelSide, Retried]
    assert alone.retry().prefill_here


def test_no_worker_at_the_start_fails_at_once() -> None:
    w = Driver(places=[Unplaced("nobody")])
    (end,) = w.start()
    assert isinstance(end, Fail)
    assert end.failure == Failure(FailureKind.NO_WORKERS, "nobody")


def test_an_accepted_request_waits_for_a_worker() -> None:
    w = Driver(places=[(D0, P0), *[Unplaced("nobody")] * 3, (D1, P1)])
    w.to_decode()
    w.failed(FailureKind.WORKER_LOST)
    assert w.tick(1.0) == []
    assert w.walk.waiting
    assert w.tick(0.5) == []
    assert w.walk.workers_changed(w.now) == []
    (opened,) = w.walk.workers_changed(w.now + 1.0)
    assert isinstance(opened, OpenDecode)
    assert not w.walk.waiting


def test_waiting_for_a_worker_has_an_end() -> None:
    w = Driver(places=[(D0, P0), *[Unplaced("nobody")] * 100])
    w.to_decode()
    w.failed(FailureKind.WORKER_LOST)
    began = w.now
    while not w.walk.ended:
        actions = w.tick(w.walk.next_deadline - w.now)
    assert isinstance(actions[-1], Fail)
    assert actions[-1].failure.kind is FailureKind.NO_WORKERS
    assert "as told" in actions[-1].failure.message
    assert w.now - began == pytest.approx(30.0, abs=1.0)


def test_every_decode_worker_full() -> None:
    w = Driver(places=[(D0, P0), Unplaced("full", barred=True)])
    w.start()
    w.failed(FailureKind.NO_CAPACITY)
    assert w.tick(1.0) == [Fail(failure(FailureKind.NO_CAPACITY))]


@pytest.mark.parametrize(
    ("stage", "wait_s", "kind"),
    [
        ("reserve", 35.0, FailureKind.WORKER_LATE),
        ("prefill", 300.0, FailureKind.WORKER_LATE),
        ("commit", 30.0, FailureKind.TRANSFER_FAILED),
        ("decode", 120.0, FailureKind.WORKER_LATE),
    ],
)
def test_each_state_has_its_own_deadline(stage: str, wait_s: float, kind: FailureKind) -> None:
    w = Driver()
    w.start()
    if stage != "reserve":
        w.granted()
    if stage in ("commit", "decode"):
        w.prefilled(first())
    if stage == "decode":
        w.committed(first())
        w.now += 100.0
        w.token(1)  # moves the deadline on
    assert w.tick(wait_s - 0.1) == []
    told = w.tick(0.2)
    assert isinstance(told[-1], Retried)
    assert told[-1].failure.kind is kind
    open_sides = {"reserve": 1, "prefill": 2, "commit": 2, "decode": 1}[stage]
    assert kinds(told[:-1]) == [CancelSide] * open_sides


def test_the_requests_deadline() -> None:
    w = Driver()
    w.start()
    w.granted()
    assert w.walk.next_deadline <= 700.0
    told = w.tick(600.0)
    assert kinds(told) == [CancelSide, CancelSide, Fail]
    assert isinstance(told[-1], Fail)
    assert told[-1].failure.kind is FailureKind.DEADLINE
    assert w.tick(1.0) == []


def test_cancel_at_each_stage() -> None:
    w = Driver()
    assert w.walk.cancel() == []
    w = Driver()
    w.start()
    assert w.walk.cancel() == [CancelSide(Side(1, False))]
    assert w.walk.cancel() == []
    w = Driver()
    w.start()
    w.granted()
    assert kinds(w.walk.cancel()) == [CancelSide, CancelSide]
    w = Driver()
    w.to_decode()
    assert w.walk.cancel() == [CancelSide(Side(1, False))]
    assert w.token(1) == []
    assert w.tick(1000.0) == []


@pytest.mark.parametrize("wrong", ["gap", "missing first", "foreign choice", "too early"])
def test_a_worker_that_breaks_the_protocol_is_left(wrong: str) -> None:
    w = Driver(choices=2)
    if wrong == "gap":
        w.to_decode()
        told = w.token(3)
    elif wrong == "missing first":
        w.start()
        w.granted()
        told = w.prefilled(first(1))
        assert told.pop(0) == first(1)[0]
    elif wrong == "foreign choice":
        w.to_decode()
        told = w.token(1, choice=7)
    else:
        w.start()
        w.granted()
        told = w.token(0)
    assert isinstance(told[-1], Retried)
    assert told[-1].failure.kind is FailureKind.TRANSFER_FAILED
    assert all(isinstance(a, CancelSide) for a in told[:-1])
