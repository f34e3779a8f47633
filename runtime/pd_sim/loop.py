"""PURE. Simulated time: what happens next happens next."""

import heapq
from collections.abc import Callable
from typing import Any


class Loop:
    """Calls that are due at a time, in order; those of one time in the order they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(when, self.now), self._count, call, args))

    def clear(self) -> None:
        """Nothing more is due."""
        self._heap.clear()

    def run(self, until: float) -> None:
        """All that is due before or at `until`, whose time it is then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
        self.now = max(self.now, until)
