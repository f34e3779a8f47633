"""Sixteen clients that ask without a pause while something else changes; what they got is without
one error, and each client's answers are alike."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from pd_operator.local.cluster import LocalCluster, Options
from pd_operator.local.kubelet import Listener
from pd_operator.podspec import ROLE_LABEL
from tests.client import Streamed, stream
from tests.e2e.asking import COMPLETIONS, body, text_of

STREAMS, TOKENS = 16, 48
NAME = "test"


class Stage:
    """A PDCluster on this machine, and those who ask it."""

    def __init__(self, options: Options) -> None:
        self.secrets: Path = options.state / NAME / "secrets"
        self.results: list[list[Streamed]] = [[] for _ in range(STREAMS)]
        self._port = options.port
        self._local = LocalCluster(NAME, options, Listener())
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def play(self, made: dict[str, Any], story: Callable[["Stage"], Awaitable[None]]) -> None:
        """The story, from when all are ready, with the clients about."""
        self._tasks.append(asyncio.create_task(self._local.run()))
        try:
            self._local.submit(made)
            await self._local.wait_ready()
            clients = [asyncio.create_task(self._ask(number)) for number in range(STREAMS)]
            self._tasks += clients
            await story(self)
            self._stop.set()
            await asyncio.gather(*clients)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._local.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill_a_decoder(self) -> Callable[[], Awaitable[None]]:
        """Returns what waits until it has started anew."""
        victim = next(one for one in self._local.pods if one.labels[ROLE_LABEL] == "decode")
        before = victim.pid
        psutil.Process(before).kill()

        async def back() -> None:
            while not victim.ready or victim.pid in (None, before):
                await asyncio.sleep(0.1)

        return back

    async def each_was_answered(self) -> None:
        while not all(self.results):
            await asyncio.sleep(0.1)

    def assert_flawless(self) -> None:
        for answers in self.results:
            for one in answers:
                assert (one.status, one.error, one.done) == (200, None, True)
                assert one.text == answers[0].text
        assert not self.secrets.exists()

    async def _ask(self, number: int) -> None:
        """The same question again and again."""
        content = body(text_of(40, number), TOKENS)
        while not self._stop.is_set():
            self.results[number].append(await stream("127.0.0.1", self._port, COMPLETIONS, content))
