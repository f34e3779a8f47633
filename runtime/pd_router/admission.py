"""Which requests run now, which wait, and which are told at once to come again. Pure: time
is an argument.

Beyond `max_running` requests, or where classes have a goal for the first token beyond
what the workers' queues allow, requests wait in a bounded queue (`queues`). A full queue,
waiting too long in it, a tenant's rate, or a goal that can't be met any more is OVERLOADED
(429), with the seconds after which another try makes sense.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pd_core.failures import Failure, FailureKind
from pd_router.classes import NO_PROMISES, Promises, SlaClass
from pd_router.limits import RateLimits
from pd_router.queues import FairQueue, Ticket

__all__ = ["Admission", "AdmissionConfig", "Outlook", "Ticket", "Verdict"]

_AHEAD_SHARE, _MOST_AHEAD_SHARE = 0.25, 0.5
"""Of the tightest goal for the first token: so much work may wait at the workers, where
nobody overtakes. The rest waits here, in the order of classes and shares."""
_LEAST_AHEAD_S = 0.04
"""Less would leave workers idle until somebody looks again who may go; where half of the goal
is less, that."""
_OWN_SHARE = 0.05
"""Of a class's goal: what its own computing may take. Who waits here leaves that much too."""
_MOST_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    max_running: int = 4096
    max_queued: int = 4096
    queue_wait_s: float = 30.0
    promises: Promises = NO_PROMISES

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0 or not self.queue_wait_s > 0:
            raise ValueError(f"{self}: max_running >= 1, max_queued >= 0, queue_wait_s > 0")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the workers' queues are like. Unknown: nobody is refused for them."""

    soonest_s: float = 0.0  # until a worker begins what is sent to it now
    tokens_per_s: float = 0.0  # of all prefill workers together; 0: unknown
    freed_per_s: float = 0.0  # requests that get room on decode; 0: it isn't short of room


UNKNOWN = Outlook()


class Verdict(Enum):
    ADMITTED = "admitted"
    QUEUED = "queued"


class Admission:
    """Counts who runs, keeps who waits. Keys are the caller's, unique among the live."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self.config = config or AdmissionConfig()
        self._running: set[str] = set()
        self._queue = FairQueue(self.config.promises.classes)
        self._limits = RateLimits(self.config.promises.limit_of)
        self._displaced: list[str] = []
        ttft_s = self.config.promises.tightest_ttft_s
        self._ahead_s = math.inf if ttft_s is None else _ahead_s(ttft_s)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def backlog(self) -> int:
        """Entries kept for the queue, those who gave up included."""
        return self._queue.backlog

    @property
    def holds_back(self) -> bool:
        """Whether requests may wait here though `max_running` isn't reached: then `admit`
        has to be called as time goes on."""
        return self._ahead_s < math.inf

    def offer(
        self,
        key: str,
        priority: int = 0,
        *,
        ticket: Ticket | None = None,
        outlook: Outlook = UNKNOWN,
        now: float = 0.0,
        routers: float = 1.0,
    ) -> Verdict | Failure:
        """A request arrives: it runs, waits, or is refused."""
        if key in self._running or key in self._queue:
            return Failure(FailureKind.INVALID_REQUEST, f"request {key} is live already")
        if ticket is None:
            ticket = Ticket(key, self.config.promises.classes[0], priority=priority)
        refusal = self._hopeless(ticket, outlook, now) or self._too_many(ticket)
        if refusal is not None:
            return refusal
        wait_s = self._limits.take(ticket.tenant, ticket.tokens, now, routers)
        if wait_s > 0:
            return _overloaded("the rate limit is reached", wait_s)
        if not len(self._queue) and self._has_room(outlook):
            self._queue.passed(ticket, now)
            self._running.add(key)
            return Verdict.ADMITTED
        if len(self._queue) >= self.config.max_queued:
            self._displace(ticket)
        self._queue.push(ticket)
        return Verdict.QUEUED

    def release(self, key: str) -> list[str]:
        """A request ended, running or waiting. Returns those that run from now on; none
        where requests are held back: then `admit` says who."""
        self._running.discard(key)
        self._queue.remove(key)
        return [] if self.holds_back else self.admit()

    def give_back(self, tenant: str, tokens: int) -> None:
        """So many of a request's `tokens` were not used: they count against no rate."""
        self._limits.give_back(tenant, tokens)

    def admit(
        self,
        outlook: Callable[[], Outlook] = lambda: UNKNOWN,
        now: float = 0.0,
        at_most: int = 1 << 30,
    ) -> list[str]:
        """Who runs from now on. With goals the outlook changes with each one that starts:
        the caller starts it before it asks for the next."""
        admitted: list[str] = []
        while len(admitted) < at_most and self._has_room(outlook()):
            ticket = self._queue.pop(now)
            if ticket is None:
                break
            self._running.add(ticket.key)
            admitted.append(ticket.key)
        return admitted

    def displaced(self) -> list[str]:
        """Those who had to make room for others: their callers are to be told."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def overdue(self, waited_s: float, patience_s: float = math.inf) -> Failure | None:
        """The failure of a request that has waited so long, if it has waited too long."""
        if waited_s < min(self.config.queue_wait_s, patience_s):
            return None
        return _overloaded(
            f"waited {waited_s:.1f} s for its turn behind {len(self._running)} running requests",
            1.0,
        )

    def patience_s(self, sla: SlaClass) -> float:
        """How long a request of this class waits here at most: after its goal is missed its
        answer is worth less than its place."""
        if sla.ttft_s is None:
            return self.config.queue_wait_s
        left_s = (1 - _OWN_SHARE) * sla.ttft_s - self._ahead_s
        return min(self.config.queue_wait_s, left_s)

    def _has_room(self, outlook: Outlook) -> bool:
        return len(self._running) < self.config.max_running and outlook.soonest_s < self._ahead_s

    def _hopeless(self, ticket: Ticket, outlook: Outlook, now: float) -> Failure | None:
        """Its class's goal for the first token can't be met: better now than too late."""
        goal_s = ticket.sla.ttft_s
        if goal_s is None or not outlook.tokens_per_s:
            return None
        before_s = self._queue.wait_s(ticket.sla, outlook.tokens_per_s, now)
        if outlook.freed_per_s:  # each of those before it needs room, however little it computes
            room_s = self._queue.turns_s(ticket.sla, outlook.freed_per_s, now)
            before_s = max(before_s, room_s)
        predicted_s = outlook.soonest_s + before_s + ticket.work / outlook.tokens_per_s
        if predicted_s <= goal_s:
            return None
        return _overloaded(
            f"the first token would take {predicted_s:.1f} s, class {ticket.sla.name!r} "
            f"promises {goal_s:g} s",
            predicted_s - goal_s,
        )

    def _too_many(self, ticket: Ticket) -> Failure | None:
        if len(self._queue) < self.config.max_queued:
            return None
        if not len(self._queue) and len(self._running) < self.config.max_running:
            return None
        if self._queue.last_below(ticket.sla.priority) is not None:
            return None
        return _overloaded(f"{len(self._running)} requests run and {len(self._queue)} wait", 1.0)

    def _displace(self, ticket: Ticket) -> None:
        key = self._queue.last_below(ticket.sla.priority)
        if key is not None and self._queue.remove(key):
            self._displaced.append(key)


def _ahead_s(goal_s: float) -> float:
    return max(_AHEAD_SHARE * goal_s, min(_MOST_AHEAD_SHARE * goal_s, _LEAST_AHEAD_S))


def displaced_failure() -> Failure:
    return _overloaded("made room for a request of a more important class", 1.0)


def _overloaded(what: str, wait_s: float) -> Failure:
    retry_s = max(1, min(math.ceil(wait_s), _MOST_RETRY_AFTER_S))
    return Failure(FailureKind.OVERLOADED, f"{what}: try again later", retry_after_s=retry_s)
