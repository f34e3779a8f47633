"""Keys that wait for a reconcile: each once, one runner a key, back-off after failures."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
log = logging.getLogger("pd_operator.queue")

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 60.0


class Again(Exception):
    """A failure that is part of the world's ways: the key comes back, without a trace in the
    log. `after_s` None: after the usual back-off."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


class Queue(Generic[Key]):
    """`add` may be called at any time; the work of one key never overlaps itself.

    The worker returns when it wants the key again (seconds), or None. When it raises,
    the key comes back after a back-off that doubles.
    """

    def __init__(self, work: Callable[[Key], Awaitable[float | None]]) -> None:
        self._work = work
        self._ready: deque[Key] = deque()
        self._queued: set[Key] = set()
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._wake = asyncio.Event()

    def add(self, key: Key) -> None:
        """Asks for a run of the key, now or as soon as its present run ends."""
        self._cancel_timer(key)
        if key in self._running:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        """Asks for a run later; an earlier request, made before or after, wins."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        timer = self._timers.get(key)
        if key in self._queued or key in self._again or (timer and timer.when() <= due):
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_at(due, self.add, key)

    def depth(self) -> int:
        """Keys that wait for a runner."""
        return len(self._queued)

    async def run(self, runners: int = 1) -> None:
        """Works until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(runners):
                    group.create_task(self._run_one())
        finally:
            for key in list(self._timers):
                self._cancel_timer(key)

    async def _run_one(self) -> None:
        while True:
            while not self._ready:
                self._wake.clear()
                await self._wake.wait()
            key = self._ready.popleft()
            self._queued.discard(key)
            self._running.add(key)
            try:
                await self._attempt(key)
            finally:
                self._running.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)

    async def _attempt(self, key: Key) -> None:
        try:
            after_s = await self._work(key)
        except Again as error:
            retry_s = self._back_off_s(key) if error.after_s is None else error.after_s
            log.info("reconcile again key=%s retry_s=%.1f: %s", key, retry_s, error)
            self._later(key, retry_s)
            return
        except Exception:  # one key's failure is no other key's
            retry_s = self._back_off_s(key)
            log.exception("reconcile failed key=%s retry_s=%.1f", key, retry_s)
            self._later(key, retry_s)
            return
        self._failures.pop(key, None)
        if after_s is not None:
            self._later(key, after_s)

    def _back_off_s(self, key: Key) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(failures - 1, 20))

    def _later(self, key: Key, delay_s: float) -> None:
        if key not in self._again:
            self.add_after(key, delay_s)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
