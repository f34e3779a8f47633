"""Covers pd_router.admission's classes against a queue of workers in simulated time: twice
the capacity for ten minutes, a class that must not starve, displacement, early refusal; and
decode as the bottleneck."""

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import islice

import pytest

from pd_core.failures import Failure
from pd_router.admission import Admission, AdmissionConfig, Outlook, Ticket, Verdict
from pd_router.classes import Promises, SlaClass
from pd_router.costs import Need, outlook, soonest
from pd_router.fleet import LoadReport, WorkerView
from tests.pd_router.test_policy import d, p

HIGH = SlaClass("high", priority=10, ttft_s=1.0, share=0.4)
LOW = SlaClass("low", priority=0, ttft_s=4.0, share=0.2)
BATCH = SlaClass("batch", priority=-10, share=0.1)
TOKENS_PER_S = 10_000.0
WORK = 500.0  # 20 requests a second are the capacity
TICK_S = 0.01


class Site:
    """One queue that computes prompts in order, behind an admission."""

    def __init__(self, promises: Promises, chance: random.Random | None = None) -> None:
        """`chance`: of prompts' lengths, between a fifth and nine fifths of WORK; else equal."""
        self.admission = Admission(AdmissionConfig(max_queued=1000, promises=promises))
        self.chance = chance
        self.now = 0.0
        self.tickets: dict[str, tuple[Ticket, float]] = {}
        self.sent: deque[str] = deque()
        self.left = 0.0
        self.offered: dict[str, int] = defaultdict(int)
        self.good: dict[str, int] = defaultdict(int)
        self.served: dict[str, int] = defaultdict(int)
        self.refused: dict[str, int] = defaultdict(int)

    def outlook(self) -> Outlook:
        waiting = sum(self.tickets[key][0].work for key in islice(self.sent, 1, None))
        return Outlook((self.left + waiting) / TOKENS_PER_S, TOKENS_PER_S)

    def arrive(self, sla: SlaClass, number: int) -> None:
        work = self.chance.uniform(WORK / 5, 9 * WORK / 5) if self.chance else WORK
        ticket = Ticket(f"{sla.name}-{number}", sla, f"t{number % 3}", work)
        self.offered[sla.name] += 1
        verdict = self.admission.offer(
            ticket.key, ticket=ticket, outlook=self.outlook(), now=self.now
        )
        if isinstance(verdict, Failure):
            assert verdict.retry_after_s is not None
            self.refused[sla.name] += 1
            return
        self.tickets[ticket.key] = (ticket, self.now)
        if verdict is Verdict.ADMITTED:
            self._send(ticket.key)
        self._drop(self.admission.displaced())

    def tick(self) -> None:
        self.now += TICK_S
        self.left -= TOKENS_PER_S * TICK_S
        while self.sent and self.left <= 0:
            self._serve(self.sent.popleft())
            self.left += self._next_work()
        self.left = max(self.left, 0.0)
        while got := self.admission.admit(self.outlook, self.now, at_most=1):
            self._send(got[0])
        if round(self.now / TICK_S) % 10 == 0:
            self._give_up()

    def _send(self, key: str) -> None:
        idle = not self.sent
        self.sent.append(key)
        if idle:
            self.left = self._next_work()

    def _next_work(self) -> float:
        return self.tickets[self.sent[0]][0].work if self.sent else 0.0

    def _serve(self, key: str) -> None:
        ticket, arrived = self.tickets.pop(key)
        self.admission.release(key)
        self.served[ticket.sla.name] += 1
        if self.now - arrived <= (ticket.sla.ttft_s or 60.0):
            self.good[ticket.sla.name] += 1

    def _give_up(self) -> None:
        waiting = [k for k in self.tickets if k not in self.sent]
        patience = self.admission.patience_s
        late = [
            k for k in waiting if self.now - self.tickets[k][1] > patience(self.tickets[k][0].sla)
        ]
        for key in late:
            self.admission.release(key)
        self._drop(late)

    def _drop(self, keys: list[str]) -> None:
        for key in keys:
            ticket, _ = self.tickets.pop(key)
            self.refused[ticket.sla.name] += 1


def run(
    seconds: float, rates: Mapping[SlaClass, float], promises: Promises, seed: int | None = None
) -> Site:
    """So many seconds with these requests a second of each class: at even times, or with a
    seed at random ones (Poisson), with prompts of random lengths."""
    chance = None if seed is None else random.Random(seed)
    site = Site(promises, chance)
    due = dict.fromkeys(rates, 0.0)
    count = 0
    while site.now < seconds:
        for sla, rate in rates.items():
            due[sla] += rate * TICK_S
            while due[sla] >= 1:
                due[sla] -= chance.expovariate(1.0) if chance else 1.0
                count += 1
                site.arrive(sla, count)
        site.tick()
    return site


PROMISES = Promises((LOW, HIGH, BATCH))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_twice_the_capacity_for_ten_minutes(seed: int | None) -> None:
    """With bursts too: a class that waits lends some seconds of its share to a more important
    one, and has them back when the burst is over."""
    once = run(600, {HIGH: 5, LOW: 10, BATCH: 5}, PROMISES, seed)
    twice = run(600, {HIGH: 10, LOW: 20, BATCH: 10}, PROMISES, seed)
    assert sum(twice.good.values()) >= 0.9 * sum(once.good.values())
    assert twice.good["high"] >= 0.99 * twice.offered["high"]
    total = sum(twice.served.values())
    for sla in (LOW, BATCH):
        assert twice.served[sla.name] >= 0.9 * sla.share * total, (sla.name, twice.served)
    # What was let in was served in time: the rest heard at once or after their patience.
    assert twice.good["low"] >= 0.95 * twice.served["low"]
    assert twice.refused["low"] > 0


def test_a_class_above_its_share_leaves_the_others_theirs() -> None:
    site = run(120, {HIGH: 60, LOW: 20, BATCH: 20}, PROMISES)
    total = sum(site.served.values())
    assert total >= 0.95 * 120 * TOKENS_PER_S / WORK
    assert site.served["low"] >= 0.9 * LOW.share * total
    assert site.served["batch"] >= 0.9 * BATCH.share * total


def test_nothing_is_refused_below_capacity() -> None:
    site = run(60, {HIGH: 5, LOW: 5, BATCH: 5}, PROMISES)
    assert not site.refused


def test_a_hopeless_goal_is_told_at_once_with_a_time() -> None:
    admission = Admission(AdmissionConfig(promises=Promises((HIGH, BATCH))))
    busy = Outlook(soonest_s=7.2, tokens_per_s=1000)
    refusal = admission.offer("a", ticket=Ticket("a", HIGH, work=10), outlook=busy)
    assert isinstance(refusal, Failure)
    assert refusal.retry_after_s == 7
    assert "promises 1 s" in refusal.message
    waits = admission.offer("b", ticket=Ticket("b", BATCH, work=10), outlook=busy)
    assert waits is Verdict.QUEUED, "no goal, no early refusal"


def test_a_full_queue_makes_room_for_what_matters_more() -> None:
    admission = Admission(
        AdmissionConfig(max_running=1, max_queued=2, promises=Promises((BATCH, HIGH)))
    )
    for key in ("runs", "b1", "b2"):
        admission.offer(key, ticket=Ticket(key, BATCH))
    assert isinstance(admission.offer("b3", ticket=Ticket("b3", BATCH)), Failure)
    assert admission.offer("h", ticket=Ticket("h", HIGH)) is Verdict.QUEUED
    assert admission.displaced() == ["b2"]
    assert admission.displaced() == []
    assert admission.release("runs") == []
    assert admission.admit() == ["h"]


# ---- decode as the bottleneck ---------------------------------------------------------

STAY_S = 5.0
NEED = Need(tokens=36, output_tokens=4)
BLOCKS = 10  # of 1000: a hundred requests at once, twenty a second
BEAT_S = 1.0
WARM_S = 20.0


class DecodeSite:
    """Prefill takes no time; a request waits for room at decode, and keeps it for about STAY_S. The
    router knows what the last heartbeat said, and what it did itself since then."""

    def __init__(self, *, sees_decode: bool = True) -> None:
        self.admission = Admission(AdmissionConfig(promises=Promises((HIGH,))))
        self.sees_decode = sees_decode
        self.now = 0.0
        self.decode: WorkerView = d(0, kv_blocks=1000)
        self.prefill: WorkerView = p(0, tokens_per_s=1e6)
        self.free = 1000
        self.waiting: deque[str] = deque()
        self.random = random.Random(7)
        self.stays: dict[str, float] = {}
        self.ends: list[tuple[float, str]] = []
        self.arrived: dict[str, float] = {}
        self.in_time = self.late = self.refused = 0
        self._beat()

    def outlook(self, need: Need | None = None) -> Outlook:
        views = (self.prefill, self.decode)
        return Outlook(*(outlook(views, need) if self.sees_decode else soonest(views)))

    def arrive(self, key: str) -> None:
        ticket = Ticket(key, HIGH, "t", 36.0)
        said = self.admission.offer(key, ticket=ticket, outlook=self.outlook(NEED), now=self.now)
        if isinstance(said, Failure):
            self.refused += 1
            return
        self.arrived[key] = self.now
        if said is Verdict.ADMITTED:
            self._send(key)

    def tick(self) -> None:
        before, self.now = self.now, self.now + TICK_S
        while self.ends and self.ends[0][0] <= self.now:
            _, key = heapq.heappop(self.ends)
            self.free += BLOCKS
            self.decode.end_decode(BLOCKS, 1)
            self.decode.stayed(self.stays.pop(key))
            self.admission.release(key)
        self._grant()
        if before // BEAT_S != self.now // BEAT_S:
            self._beat()
        while got := self.admission.admit(self.outlook, self.now, at_most=1):
            self._send(got[0])
        patience_s = self.admission.patience_s(HIGH)
        for key in [k for k, at in self.arrived.items() if self.now - at > patience_s]:
            if key not in self.waiting:  # it waits in the router
                self.admission.release(key)
                del self.arrived[key]
                self.refused += 1

    def _send(self, key: str) -> None:
        self.decode.assign_decode(BLOCKS, 1)
        self.waiting.append(key)
        self._grant()

    def _grant(self) -> None:
        while self.waiting and self.free >= BLOCKS:
            key = self.waiting.popleft()
            self.free -= BLOCKS
            stay_s = self.random.expovariate(1 / STAY_S)
            self.stays[key] = stay_s
            heapq.heappush(self.ends, (self.now + stay_s, key))
            if self.now - self.arrived.pop(key) <= 1.0:
                self.in_time += 1
            else:
                self.late += 1

    def _beat(self) -> None:
        self.decode.report(
            LoadReport(
                kv_blocks=1000,
                kv_free=self.free,
                running=len(self.ends),
                waiting_grants=len(self.waiting),
            )
        )


def decode_bound(rate: float, *, sees_decode: bool = True) -> DecodeSite:
    """A minute of so many requests a second. Counts begin after a while: until the first
    stays are over nobody knows how long they are, and what was let in by then is late."""
    site = DecodeSite(sees_decode=sees_decode)
    due, count = 0.0, 0
    while site.now < WARM_S + 60:
        if abs(site.now - WARM_S) < TICK_S / 2:
            site.in_time = site.late = site.refused = 0
        due += rate * TICK_S
        while due >= 1:
            due -= 1
            count += 1
            site.arrive(f"r-{count}")
        site.tick()
    return site


def test_what_decode_has_no_room_for_is_refused_at_once() -> None:
    site = decode_bound(40)
    capacity = 60 * 1000 / BLOCKS / STAY_S
    assert site.in_time >= 0.9 * capacity
    assert site.late <= 0.1 * capacity
    assert site.refused >= 0.4 * 40 * 60
    blind = decode_bound(40, sees_decode=False)
    assert blind.in_time < 0.3 * capacity, "prefill alone says nothing of it"


def test_nothing_is_refused_while_decode_has_room() -> None:
    site = decode_bound(18)
    assert site.refused == site.late == 0


CHAT = SlaClass("chat", ttft_s=10.0)
LONG = 5000.0


def behind(queued: int, outlook: Outlook, work: float) -> Verdict | Failure:
    """What a request hears that comes when so many long ones wait."""
    admission = Admission(AdmissionConfig(promises=Promises((CHAT,))))
    full = Outlook(soonest_s=9.0, tokens_per_s=1e6)  # whoever comes is held back
    for number in range(queued):
        key = f"long-{number}"
        assert admission.offer(key, ticket=Ticket(key, CHAT, work=LONG), outlook=full) is (
            Verdict.QUEUED
        )
    return admission.offer("new", ticket=Ticket("new", CHAT, work=work), outlook=outlook)


@pytest.mark.parametrize("work", [20.0, LONG])
def test_room_at_decode_is_counted_in_requests(work: float) -> None:
    """Four wait a second for four that end in it, whatever the newcomer computes itself."""
    frees_four = Outlook(soonest_s=6.0, tokens_per_s=1e6, freed_per_s=4.0)
    assert behind(4, frees_four, work) is Verdict.QUEUED
    assert behind(15, frees_four, work) is Verdict.QUEUED
    refusal = behind(20, frees_four, work)
    assert isinstance(refusal, Failure)
    assert "would take 11.0 s" in refusal.message


def test_the_slower_of_prefill_and_decode_counts() -> None:
    """They work at the same time: their waits aren't added."""
    slow_prefill = Outlook(soonest_s=6.0, tokens_per_s=5000.0, freed_per_s=4.0)
    assert behind(3, slow_prefill, 20.0) is Verdict.QUEUED
    refusal = behind(4, slow_prefill, 20.0)
    assert isinstance(refusal, Failure)
    assert "would take 10.0 s" in refusal.message
    assert refusal.retry_after_s == 1
    alone = behind(0, slow_prefill, 5 * LONG)
    assert isinstance(alone, Failure)
    assert "would take 11.0 s" in alone.message, "its own work comes after"


def test_turns_that_a_more_important_class_takes_are_gone() -> None:
    """Two of four a second went to it of late: the others have two."""
    chat, urgent = CHAT, SlaClass("urgent", priority=10)
    admission = Admission(AdmissionConfig(promises=Promises((chat, urgent))))
    for number in range(10):  # all remembered as of the last five seconds
        key = f"urgent-{number}"
        said = admission.offer(key, ticket=Ticket(key, urgent, work=1.0), outlook=Outlook())
        assert said is Verdict.ADMITTED
    full = Outlook(soonest_s=8.0, tokens_per_s=1e6)
    for key in ("a", "b", "c", "d", "e"):
        admission.offer(key, ticket=Ticket(key, chat, work=1.0), outlook=full)
    frees_four = Outlook(soonest_s=8.0, tokens_per_s=1e6, freed_per_s=4.0)
    refusal = admission.offer("new", ticket=Ticket("new", chat, work=1.0), outlook=frees_four)
    assert isinstance(refusal, Failure)
    assert "would take 10.5 s" in refusal.message
