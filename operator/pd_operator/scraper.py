"""What routers measured, without waiting for those that don't answer.

A reconcile asks for the samples of some routers. Reading one takes a moment where it answers,
and seconds where it doesn't; with a thousand objects that would hold all runners up. So each
router is read in a task of its own, a reconcile waits a moment for it, and else goes on with
none: a router that was silent isn't waited for until it has answered again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pd_operator import measured, samples
from pd_operator.measured import Samples

WAIT_S = 0.25
FORGET_S = 900.0
CLEAR_S = 60.0
MAX_READS = 64


@dataclass(slots=True)
class _Router:
    task: asyncio.Task[Samples]
    asked_at: float
    silent: bool = False


class Scraper:
    """`read` is `reconcile.Reconciler`'s read_samples."""

    def __init__(
        self, read_one: Callable[[Iterable[str]], Awaitable[Samples]] = samples.read
    ) -> None:
        self._read_one = read_one
        self._routers: dict[str, _Router] = {}
        self._slots = asyncio.Semaphore(MAX_READS)
        self._cleared_at = time.monotonic()

    async def read(self, addresses: Iterable[str]) -> Samples:
        asked = [self._ask(address) for address in addresses]
        waiting = [router.task for router in asked if not router.silent]
        if waiting:
            await asyncio.wait(waiting, timeout=WAIT_S)
        self._forget_old()
        return measured.merge([_result(router) for router in asked])

    def _ask(self, address: str) -> _Router:
        """A reading of now, unless the one before is still under way."""
        known = self._routers.get(address)
        if known is not None and not known.task.done():
            return known
        silent = known is not None and known.silent
        task = asyncio.create_task(self._read(address))
        router = self._routers[address] = _Router(task, time.monotonic(), silent)
        return router

    async def _read(self, address: str) -> Samples:
        async with self._slots:
            found = await self._read_one([address])
        self._routers[address].silent = bool(found.silent)
        return found

    def _forget_old(self) -> None:
        now = time.monotonic()
        if now - self._cleared_at < CLEAR_S:
            return  # going through all of them at each look would cost as much as the look
        self._cleared_at = now
        limit = now - FORGET_S
        old = [name for name, one in self._routers.items() if one.asked_at < limit]
        for name in old:
            if self._routers[name].task.done():
                del self._routers[name]

    async def close(self) -> None:
        tasks = [router.task for router in self._routers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _result(router: _Router) -> Samples:
    if router.task.done() and not router.task.cancelled() and not router.task.exception():
        return router.task.result()
    return Samples(silent=1)
