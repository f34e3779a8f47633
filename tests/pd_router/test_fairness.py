"""Covers pd_router.queues, limits and classes: turns, rates, and the document they come from."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router import classes
from pd_router.classes import BadAdmission, RateLimit, SlaClass
from pd_router.limits import MAX_TENANTS, RateLimits
from pd_router.queues import FairQueue, Ticket

ONE = SlaClass("one")


def taken(queue: FairQueue, count: int) -> list[str]:
    tickets = [queue.pop() for _ in range(count)]
    return [ticket.tenant for ticket in tickets if ticket is not None]


def test_a_tenant_with_a_flood_gets_no_more_than_the_others() -> None:
    queue = FairQueue((ONE,))
    for number in range(100):
        queue.push(Ticket(f"a{number}", ONE, "flood"))
    for number in range(10):
        queue.push(Ticket(f"b{number}", ONE, "calm"))
    assert Counter(taken(queue, 20)) == {"flood": 10, "calm": 10}


def test_work_counts_not_requests() -> None:
    queue = FairQueue((ONE,))
    for number in range(100):
        queue.push(Ticket(f"a{number}", ONE, "long", work=900))
        queue.push(Ticket(f"b{number}", ONE, "short", work=100))
    got = Counter(taken(queue, 50))
    assert 44 <= got["short"] <= 46


def test_weights_share_the_work_out() -> None:
    queue = FairQueue((ONE,))
    for number in range(100):
        queue.push(Ticket(f"a{number}", ONE, "three", work=5, weight=3.0))
        queue.push(Ticket(f"b{number}", ONE, "one", work=5))
        queue.push(Ticket(f"c{number}", ONE, "half", work=5, weight=0.5))
    got = Counter(taken(queue, 90))
    assert got == {"three": 60, "one": 20, "half": 10}


def test_who_was_away_has_saved_up_nothing() -> None:
    queue = FairQueue((ONE,))
    for number in range(50):
        queue.push(Ticket(f"a{number}", ONE, "busy"))
    taken(queue, 30)
    for number in range(50):
        queue.push(Ticket(f"b{number}", ONE, "back"))
    assert Counter(taken(queue, 20))["back"] in (10, 11)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(-1, 1), st.booleans()),
        max_size=80,
    )
)
def test_all_come_out_once_whoever_gives_up(events: list[tuple[str, int, int, bool]]) -> None:
    slas = (SlaClass("x", 1, share=0.2), SlaClass("y", 0, share=0.5), SlaClass("z", -1))
    queue = FairQueue(slas)
    live: set[str] = set()
    for number, (tenant, sla, priority, gives_up) in enumerate(events):
        queue.push(Ticket(str(number), slas[sla], tenant, 1.0 + number % 5, priority))
        live.add(str(number))
        if gives_up:
            key = min(live)
            assert queue.remove(key)
            assert not queue.remove(key)
            live.discard(key)
    out = []
    while (ticket := queue.pop()) is not None:
        out.append(ticket.key)
    assert sorted(out) == sorted(live)
    assert len(queue) == queue.backlog == 0


def test_a_rate_with_its_burst() -> None:
    limits = RateLimits(lambda _: RateLimit(requests_per_minute=60, burst_s=5))
    assert [limits.take("a", 1, 0.0) for _ in range(5)] == [0.0] * 5
    assert limits.take("a", 1, 0.0) == pytest.approx(1.0)
    assert limits.take("b", 1, 0.0) == 0.0
    assert limits.take("a", 1, 1.0) == 0.0
    assert limits.take("a", 1, 1.0, routers=2) == pytest.approx(2.0)


def test_tokens_and_a_request_larger_than_the_bucket() -> None:
    limits = RateLimits(lambda _: RateLimit(tokens_per_minute=600, burst_s=10))
    assert limits.take("a", 1000, 0.0) == 0.0, "full: it passes, and leaves a debt"
    assert limits.take("a", 1, 0.0) == pytest.approx(90.1)
    assert limits.take("a", 1, 91.0) == 0.0


def test_what_was_not_used_comes_back() -> None:
    limits = RateLimits(lambda _: RateLimit(tokens_per_minute=600, burst_s=10))
    assert limits.take("a", 1000, 0.0) == 0.0, "a prompt, and as much as fits the context"
    limits.give_back("a", 950)
    assert limits.take("a", 50, 0.0) == 0.0, "fifty of a hundred were used"
    assert limits.take("a", 1, 0.0) == pytest.approx(0.1)
    limits.give_back("a", 10_000)
    assert limits.take("a", 100, 0.0) == 0.0
    assert limits.take("a", 1, 0.0) > 0, "never more than the bucket holds"
    limits.give_back("nobody", 5)


def test_tenants_are_bounded() -> None:
    limits = RateLimits(lambda _: RateLimit(requests_per_minute=1))
    for number in range(MAX_TENANTS + 100):
        limits.take(str(number), 1, 0.0)
    assert len(limits) == MAX_TENANTS


def test_the_document() -> None:
    promises = classes.read(
        {
            "classes": [
                {"name": "std", "ttft": 2, "share": 0.3},
                {"name": "vip", "priority": 5, "ttft": 0.5, "tpot": 0.05, "share": 0.5},
            ],
            "limits": {"requestsPerMinute": 100, "burstSeconds": 10},
            "clients": {"a": {"weight": 2.5}, "b": {"class": "vip"}},
        }
    )
    assert [promises.weight_of(name) for name in ("a", "b", "nobody")] == [2.5, 1.0, 1.0]
    assert promises.tightest_ttft_s == 0.5
    assert promises.named(None) == SlaClass("std", ttft_s=2, share=0.3)
    assert promises.named("vip") == SlaClass("vip", 5, 0.5, 0.05, 0.5)
    assert promises.named("x") is None
    assert promises.limit == RateLimit(100, None, 10)
    assert classes.read({}) == classes.Promises()


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"class": []}, "unknown field 'class'"),
        ({"classes": [{"name": "A"}]}, "classes[0].name"),
        ({"classes": [{"name": "a", "ttft": 0}]}, "classes[0].ttft"),
        ({"classes": [{"name": "a", "share": 2}]}, "classes[0].share"),
        ({"classes": [{"name": "a", "priority": 1.5}]}, "classes[0].priority"),
        ({"classes": [{"name": "a"}, {"name": "a"}]}, "same name"),
        ({"classes": [{"name": "a", "share": 0.6}, {"name": "b", "share": 0.6}]}, "more than 1"),
        ({"classes": 3}, "classes"),
        ({"limits": {"requestsPerMinute": "x"}}, "limits.requestsPerMinute"),
        ({"limits": []}, "limits"),
        ({"clients": {"a": {"weight": 0}}}, "clients.a.weight"),
    ],
)
def test_a_wrong_document_is_told(document: dict[str, Any], says: str) -> None:
    with pytest.raises(BadAdmission) as caught:
        classes.read(document)
    assert says in str(caught.value)
