"""Event loops in virtual time, one a process: asyncio's tasks and futures run in them unchanged.

A process that crashes is a loop that is never run again; one that is stopped (SIGSTOP) is
a loop that isn't run for a while.
"""

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any


class Clock:
    """The one time of a world, in seconds."""

    def __init__(self, now: float) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now


Executor = Callable[["VirtualLoop", Callable[..., Any], tuple[Any, ...]], "asyncio.Future[Any]"]


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as the product uses."""

    def __init__(self, clock: Clock, host: str, executor: Executor | None = None) -> None:
        self.clock = clock
        self.host = host
        self.problems: list[str] = []
        self.over = False  # what is left of it isn't judged any more
        self.tasks: list[asyncio.Task[Any]] = []
        self._executor = executor
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0

    # ---- for the world ------------------------------------------------------------------

    def due(self) -> float:
        """When it has something to do next."""
        if self._ready:
            return self.clock.now
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else float("inf")

    def run_once(self) -> None:
        """What is ready now; what that makes ready comes with the next call."""
        while self._timers and self._timers[0][0] <= self.clock.now:
            self._ready.append(heapq.heappop(self._timers)[2])
        events._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            events._set_running_loop(None)

    def failed_tasks(self) -> list[str]:
        """Tasks that ended by an exception which nobody looked at."""
        failed = [t for t in self.tasks if t.done() and getattr(t, "_log_traceback", False)]
        return [f"{self.host}: a task failed: {t.exception()!r}" for t in failed]

    def end_tasks(self) -> None:
        """So that no coroutine is left to the garbage collector."""
        self.over = True
        for task in self.tasks:
            task.cancel()
        for _ in range(1000):
            while self._timers:
                self._ready.append(heapq.heappop(self._timers)[2])
            if not self._ready:
                return
            self.run_once()

    # ---- for asyncio ----------------------------------------------------------------------

    def time(self) -> float:
        return self.clock.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.clock.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._number += 1
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._number, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, name=name or "task", context=context)
        self.tasks.append(task)
        if len(self.tasks) > 200:
            kept = [t for t in self.tasks if not t.done() or getattr(t, "_log_traceback", False)]
            self.tasks = kept
        return task

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        del executor
        if self._executor is None:
            raise AssertionError(f"{self.host} has no threads")
        return self._executor(self, func, args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.over:
            error = context.get("exception")
            self.problems.append(f"{self.host}: {context.get('message')}: {error!r}")

    # ---- sockets: those of network.py ------------------------------------------------------

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        while not sock.waiting:
            await sock.wait_readable(self)
        return sock.waiting.popleft(), "peer"

    async def sock_recv_into(self, sock: Any, buf: Any) -> int:
        while True:
            try:
                return int(sock.recv_into(buf))
            except BlockingIOError:
                await sock.wait_readable(self)

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        view = memoryview(data)
        while len(view):
            try:
                view = view[sock.send(view) :]
            except BlockingIOError:
                await sock.wait_writable(self)
