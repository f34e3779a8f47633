"""Admission: bounds, order, refusals; counts stay right under any sequence of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.failures import Failure, FailureKind
from pd_router.admission import Admission, AdmissionConfig, Outlook, Ticket, Verdict
from pd_router.classes import Promises, SlaClass


def test_runs_then_queues_then_refuses() -> None:
    admission = Admission(AdmissionConfig(max_running=2, max_queued=1))
    assert admission.offer("a") is Verdict.ADMITTED
    assert admission.offer("b") is Verdict.ADMITTED
    assert admission.offer("c") is Verdict.QUEUED
    refused = admission.offer("d")
    assert isinstance(refused, Failure)
    assert refused.kind is FailureKind.OVERLOADED
    assert refused.traits.http_status == 429
    assert refused.traits.retry_after_s
    assert admission.release("a") == ["c"]
    assert admission.release("a") == []
    assert (admission.running, admission.queued) == (2, 0)


def test_priority_first_then_arrival() -> None:
    admission = Admission(AdmissionConfig(max_running=1))
    admission.offer("runs")
    for key, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 5)]:
        admission.offer(key, priority)
    order = []
    key = "runs"
    while True:
        following = admission.release(key)
        if not following:
            break
        key = following[0]
        order.append(key)
    assert order == ["b", "d", "a", "c"]


def test_nobody_overtakes_the_queue() -> None:
    admission = Admission(AdmissionConfig(max_running=1))
    admission.offer("a")
    admission.offer("b")
    assert admission.release("b") == []
    assert admission.release("a") == []
    assert admission.offer("c") is Verdict.ADMITTED


def test_a_live_key_is_refused() -> None:
    admission = Admission(AdmissionConfig(max_running=1))
    admission.offer("a")
    for _ in range(2):
        again = admission.offer("a")
        assert isinstance(again, Failure)
        assert again.kind is FailureKind.INVALID_REQUEST


def test_waiting_has_an_end() -> None:
    admission = Admission(AdmissionConfig(queue_wait_s=2.0))
    assert admission.overdue(1.9) is None
    failure = admission.overdue(2.0)
    assert failure is not None
    assert failure.kind is FailureKind.OVERLOADED


def test_bad_limits() -> None:
    with pytest.raises(ValueError, match="max_running"):
        AdmissionConfig(max_running=0)
    with pytest.raises(ValueError, match="max_running"):
        AdmissionConfig(max_queued=-1)
    with pytest.raises(ValueError, match="max_running"):
        AdmissionConfig(queue_wait_s=float("nan"))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(-1, 1)), max_size=300),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_books_stay_right(
    events: list[tuple[bool, int, int]], max_running: int, max_queued: int
) -> None:
    admission = Admission(AdmissionConfig(max_running, max_queued))
    running: set[str] = set()
    waiting: set[str] = set()
    for arrives, number, priority in events:
        key = str(number)
        if arrives and key not in running | waiting:
            verdict = admission.offer(key, priority)
            if verdict is Verdict.ADMITTED:
                running.add(key)
            elif verdict is Verdict.QUEUED:
                waiting.add(key)
            else:
                assert len(waiting) == max_queued
        elif not arrives:
            running.discard(key)
            waiting.discard(key)
            for admitted in admission.release(key):
                waiting.remove(admitted)
                running.add(admitted)
        assert (admission.running, admission.queued) == (len(running), len(waiting))
        assert len(running) <= max_running
        assert not waiting or len(running) == max_running, "nobody waits beside a free place"


def test_a_burst_that_gives_up_leaves_nothing() -> None:
    admission = Admission(AdmissionConfig(max_running=1, max_queued=10_000))
    admission.offer("runs")
    for round_number in range(20):
        keys = [f"{round_number}/{i}" for i in range(500)]
        for key in keys:
            admission.offer(key)
        for key in keys:
            admission.release(key)
    assert admission.queued == 0
    assert admission.backlog <= 1000


@pytest.mark.parametrize(
    ("ttft_s", "ahead_s"), [(0.05, 0.025), (0.1, 0.04), (0.16, 0.04), (1.0, 0.25), (8.0, 2.0)]
)
def test_workers_have_something_to_do_until_somebody_looks_again(
    ttft_s: float, ahead_s: float
) -> None:
    """So much work is sent ahead, as seconds; what is more waits where others may overtake."""
    goal = SlaClass(ttft_s=ttft_s)
    for waits_s, verdict in ((0.99 * ahead_s, Verdict.ADMITTED), (ahead_s, Verdict.QUEUED)):
        admission = Admission(AdmissionConfig(promises=Promises((goal,))))
        ticket = Ticket("a", goal, work=1.0)
        outlook = Outlook(soonest_s=waits_s, tokens_per_s=1e6)
        assert admission.offer("a", ticket=ticket, outlook=outlook) is verdict
        assert 0.4 * ttft_s < admission.patience_s(goal) <= 0.95 * ttft_s
