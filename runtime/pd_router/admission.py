"""How many requests run at once, and which wait. Pure: time is an argument.

Beyond `max_running` requests wait in a bounded queue, larger priority first, then in
order of arrival. A full queue, or waiting too long in it, is OVERLOADED (429).
"""

import heapq
from dataclasses import dataclass
from enum import Enum

from pd_core.failures import Failure, FailureKind


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    max_running: int = 4096
    max_queued: int = 4096
    queue_wait_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0 or not self.queue_wait_s > 0:
            raise ValueError(f"{self}: max_running >= 1, max_queued >= 0, queue_wait_s > 0")


class Verdict(Enum):
    ADMITTED = "admitted"
    QUEUED = "queued"


class Admission:
    """Counts who runs, keeps who waits. Keys are the caller's, unique among the live."""

    def __init__(self, config: AdmissionConfig | None = None) -> None:
        self.config = config or AdmissionConfig()
        self._running: set[str] = set()
        # Left-over heap entries of those who gave up are skipped: the number tells.
        self._waiting: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []
        self._arrivals = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def backlog(self) -> int:
        """Entries kept for the queue, those who gave up included."""
        return len(self._heap)

    def offer(self, key: str, priority: int = 0) -> Verdict | Failure:
        """A request arrives: it runs, waits, or is refused."""
        if key in self._running or key in self._waiting:
            return Failure(FailureKind.INVALID_REQUEST, f"request {key} is live already")
        if len(self._running) < self.config.max_running and not self._waiting:
            self._running.add(key)
            return Verdict.ADMITTED
        if len(self._waiting) >= self.config.max_queued:
            return Failure(
                FailureKind.OVERLOADED,
                f"{len(self._running)} requests run and {len(self._waiting)} wait: try again later",
            )
        self._arrivals += 1
        self._waiting[key] = self._arrivals
        heapq.heappush(self._heap, (-priority, self._arrivals, key))
        return Verdict.QUEUED

    def release(self, key: str) -> list[str]:
        """A request ended, running or waiting. Returns those that run from now on."""
        self._running.discard(key)
        if self._waiting.pop(key, None) is not None and len(self._heap) > 64:
            self._compact()
        return self._admit()

    def overdue(self, waited_s: float) -> Failure | None:
        """The failure of a request that has waited so long, if it has waited too long."""
        if waited_s < self.config.queue_wait_s:
            return None
        return Failure(
            FailureKind.OVERLOADED,
            f"waited {waited_s:.1f} s for its turn behind {len(self._running)} running "
            "requests: try again later",
        )

    def _admit(self) -> list[str]:
        admitted: list[str] = []
        while self._heap and len(self._running) < self.config.max_running:
            _, arrival, key = heapq.heappop(self._heap)
            if self._waiting.get(key) != arrival:
                continue
            del self._waiting[key]
            self._running.add(key)
            admitted.append(key)
        return admitted

    def _compact(self) -> None:
        """Keeps the heap as small as the queue when many give up."""
        if len(self._heap) > 2 * len(self._waiting):
            self._heap = [e for e in self._heap if self._waiting.get(e[2]) == e[1]]
            heapq.heapify(self._heap)
