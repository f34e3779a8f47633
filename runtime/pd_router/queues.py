"""Whose turn it is: classes by priority and share, tenants of a class fairly. Pure, bounded.

Among classes the larger priority goes first, unless a smaller one is owed its share: each
piece of work that starts is credited to all classes that wait, by their shares, and paid by
the one that got it. Among a class's tenants it is start-time fair queueing: who has had
less work of late, by its weight, goes first. Among a tenant's requests: larger priority, then
arrival.
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pd_router.classes import SlaClass

_SPARE = 64  # entries of those who gave up, before they are swept out
_RATE_MEMORY_S = 5.0
_LENT_S = 5.0  # of its share, a class that waits lends to who is more important
_LEAST_SHARE = 0.01  # of the work, for predictions: nobody waits for ever


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits. `work`: tokens to compute, as a weight among tenants; `tokens`:
    what counts for the tenant's rate, asked-for output included."""

    key: str
    sla: SlaClass = field(default_factory=SlaClass)
    tenant: str = ""
    work: float = 1.0
    priority: int = 0
    tokens: int = 0
    weight: float = 1.0  # of its tenant: twice the weight, twice the work


@dataclass(slots=True)
class _Tenant:
    """`start`: the virtual time at which its next request's turn is. `waiting` holds those
    who gave up, too, until they come to its top or are too many."""

    start: float
    waiting: list[tuple[int, int, Ticket]] = field(default_factory=list)
    live: int = 0


class _Rate:
    """Of something, a second, of late."""

    def __init__(self) -> None:
        self._rate = self._at = 0.0

    def count(self, amount: float, now: float) -> None:
        self._rate = self.at(now) + amount / _RATE_MEMORY_S
        self._at = now

    def at(self, now: float) -> float:
        return self._rate * math.exp(-max(now - self._at, 0.0) / _RATE_MEMORY_S)


class _ClassQueue:
    """The tenants of one class that have something waiting."""

    def __init__(self, sla: SlaClass) -> None:
        self.sla = sla
        self.credit = 0.0
        self.work = 0.0
        self.arrivals: dict[str, int] = {}  # of those that wait, in order
        self._tenants: dict[str, _Tenant] = {}
        self._virtual = 0.0
        self.work_rate, self.request_rate = _Rate(), _Rate()  # of those that started

    def push(self, ticket: Ticket, arrival: int) -> None:
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            tenant = self._tenants[ticket.tenant] = _Tenant(self._virtual)
        heapq.heappush(tenant.waiting, (-ticket.priority, arrival, ticket))
        tenant.live += 1
        self.arrivals[ticket.key] = arrival
        self.work += ticket.work

    def peek(self) -> Ticket:
        return self._top(self._tenants[self._next()])

    def pop(self) -> Ticket:
        tenant = self._tenants[self._next()]
        ticket = self._top(tenant)
        heapq.heappop(tenant.waiting)
        self._virtual = tenant.start
        tenant.start += ticket.work / ticket.weight
        self._left(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        self._left(ticket)
        tenant = self._tenants.get(ticket.tenant)
        if tenant is not None and len(tenant.waiting) > 2 * tenant.live + _SPARE:
            tenant.waiting = [entry for entry in tenant.waiting if self._waits(entry)]
            heapq.heapify(tenant.waiting)

    def count(self, work: float, now: float) -> None:
        self.work_rate.count(work, now)
        self.request_rate.count(1.0, now)

    @property
    def backlog(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def _top(self, tenant: _Tenant) -> Ticket:
        while not self._waits(tenant.waiting[0]):
            heapq.heappop(tenant.waiting)
        return tenant.waiting[0][2]

    def _waits(self, entry: tuple[int, int, Ticket]) -> bool:
        return self.arrivals.get(entry[2].key) == entry[1]

    def _next(self) -> str:
        return min(self._tenants, key=lambda name: self._tenants[name].start)

    def _left(self, ticket: Ticket) -> None:
        """A tenant that waits for nothing is forgotten: it comes back level with the rest."""
        self.work -= ticket.work
        del self.arrivals[ticket.key]
        tenant = self._tenants[ticket.tenant]
        tenant.live -= 1
        if not tenant.live:
            del self._tenants[ticket.tenant]
        if not self._tenants:
            self.credit = self.work = 0.0


class FairQueue:
    """All that waits."""

    def __init__(self, classes: tuple[SlaClass, ...]) -> None:
        self._queues = {one.name: _ClassQueue(one) for one in classes}
        self._tickets: dict[str, Ticket] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, key: str) -> bool:
        return key in self._tickets

    @property
    def backlog(self) -> int:
        """Entries kept, those who gave up included."""
        return sum(queue.backlog for queue in self._queues.values())

    def get(self, key: str) -> Ticket | None:
        return self._tickets.get(key)

    def push(self, ticket: Ticket) -> None:
        """Of a class that it was made with."""
        self._arrivals += 1
        self._tickets[ticket.key] = ticket
        self._queues[ticket.sla.name].push(ticket, self._arrivals)

    def remove(self, key: str) -> bool:
        """It waits no more. False: it didn't."""
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            self._queues[ticket.sla.name].remove(ticket)
        return ticket is not None

    def pop(self, now: float = 0.0) -> Ticket | None:
        """Whose turn it is."""
        waiting = [queue for queue in self._queues.values() if queue.arrivals]
        if not waiting:
            return None
        lent = self._may_be_lent(waiting, now)
        owed = [q for q in waiting if q.sla.share and q.credit >= max(q.peek().work, lent(q))]
        chosen = max(owed or waiting, key=_rank)
        ticket = chosen.pop()
        chosen.count(ticket.work, now)
        del self._tickets[ticket.key]
        for queue in waiting:
            if queue.arrivals:
                queue.credit += ticket.work * queue.sla.share
        if chosen.arrivals:
            chosen.credit = max(chosen.credit - ticket.work, 0.0)
        return ticket

    def _may_be_lent(
        self, waiting: Sequence["_ClassQueue"], now: float
    ) -> Callable[["_ClassQueue"], float]:
        """How much a class may be owed before it goes ahead of who is more important: a burst
        of these passes first, and the debt is paid once it's over."""
        work_s = sum(queue.work_rate.at(now) for queue in self._queues.values())
        most = max(map(_rank, waiting))

        def lent(queue: _ClassQueue) -> float:
            return 0.0 if _rank(queue) == most else queue.sla.share * work_s * _LENT_S

        return lent

    def passed(self, ticket: Ticket, now: float) -> None:
        """It didn't have to wait."""
        self._queues[ticket.sla.name].count(ticket.work, now)

    def wait_s(self, sla: SlaClass, work_per_s: float, now: float) -> float:
        """How long a newcomer of this class waits, if all goes on as of late: the work of its
        own class before it, at what others leave to it."""
        taken = {name: queue.work_rate.at(now) for name, queue in self._queues.items()}
        return self._queues[sla.name].work / self._left_to(sla, work_per_s, taken, now)

    def turns_s(self, sla: SlaClass, requests_per_s: float, now: float) -> float:
        """The same where it's their number that counts, not their work. A share of the work
        is taken for one of the turns."""
        taken = {name: queue.request_rate.at(now) for name, queue in self._queues.items()}
        left = self._left_to(sla, requests_per_s, taken, now)
        return len(self._queues[sla.name].arrivals) / left

    def _left_to(
        self, sla: SlaClass, per_s: float, of_late: Mapping[str, float], now: float
    ) -> float:
        """What others leave to a class: more important ones take what they took of late,
        lesser ones that wait their shares, unless they lend them."""
        taken = 0.0
        lent_s = sum(queue.work_rate.at(now) for queue in self._queues.values()) * _LENT_S
        for name, queue in self._queues.items():
            if name != sla.name and queue.sla.priority < sla.priority:
                insists = queue.arrivals and queue.credit >= queue.sla.share * lent_s
                taken += queue.sla.share * per_s if insists else 0.0
            elif name != sla.name:
                taken += of_late[name]
        return max(per_s - taken, sla.share * per_s, _LEAST_SHARE * per_s)

    def last_below(self, priority: int) -> str | None:
        """Who makes room in a full queue for one of a larger priority: the youngest of the
        least important class that waits; None: nobody is less important."""
        waiting = [q for q in self._queues.values() if q.arrivals]
        least = min(waiting, key=lambda q: q.sla.priority, default=None)
        if least is None or least.sla.priority >= priority:
            return None
        return next(reversed(least.arrivals))


def _rank(queue: _ClassQueue) -> tuple[int, float]:
    """The largest is the most important."""
    return (queue.sla.priority, queue.sla.share)
