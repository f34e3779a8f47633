"""The keyed queue: each key once, never two runs of one key, back-off, requeue-after."""

import asyncio
from collections import Counter

import pytest

from pd_operator import queue
from pd_operator.queue import Queue


class Work:
    """A worker that records, and does what the test tells it."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.active: Counter[str] = Counter()
        self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.after: dict[str, float] = {}
        self.failures = 0
        self.ran = asyncio.Condition()

    async def __call__(self, key: str) -> float | None:
        self.active[key] += 1
        self.most = max(self.most, self.active[key])
        await self.gate.wait()
        self.active[key] -= 1
        self.runs[key] += 1
        async with self.ran:
            self.ran.notify_all()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("as told")
        return self.after.get(key)

    async def until(self, key: str, count: int) -> None:
        async with asyncio.timeout(10), self.ran:
            await self.ran.wait_for(lambda: self.runs[key] >= count)


async def turn() -> None:
    """Lets everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_key_that_waits_is_there_once(run) -> None:
    async def scenario() -> None:
        work = Work()
        waiting = Queue(work)
        for _ in range(5):
            waiting.add("a")
        waiting.add("b")
        assert waiting.depth() == 2
        async with asyncio.TaskGroup() as group:
            running = group.create_task(waiting.run())
            await work.until("b", 1)
            await turn()
            running.cancel()
        assert work.runs == {"a": 1, "b": 1}

    run(scenario())


def test_adds_during_a_run_make_one_more(run) -> None:
    async def scenario() -> None:
        work = Work()
        work.gate.clear()
        waiting = Queue(work)
        waiting.add("a")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(waiting.run(3))
            await turn()
            for _ in range(5):
                waiting.add("a")
            work.gate.set()
            await work.until("a", 2)
            await turn()
            running.cancel()
        assert work.runs["a"] == 2
        assert work.most == 1

    run(scenario())


def test_requeue_after_and_an_earlier_request(run) -> None:
    async def scenario() -> None:
        work = Work()
        work.after["a"] = 3600
        waiting = Queue(work)
        waiting.add("a")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(waiting.run())
            await work.until("a", 1)
            await turn()
            waiting.add_after("a", 7200)  # later than what is planned: nothing changes
            waiting.add_after("a", 0.01)
            await work.until("a", 2)
            running.cancel()

    run(scenario())


def test_failures_back_off_and_are_forgotten(run, monkeypatch) -> None:
    monkeypatch.setattr(queue, "FIRST_RETRY_S", 0.01)

    async def scenario() -> float:
        work = Work()
        work.failures = 4
        waiting = Queue(work)
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiting.add("a")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(waiting.run())
            await work.until("a", 5)
            took_s = loop.time() - began
            waiting.add("a")
            await work.until("a", 6)
            running.cancel()
        return took_s

    assert run(scenario()) >= 0.01 + 0.02 + 0.04 + 0.08


def test_one_keys_failure_is_no_other_keys(run) -> None:
    async def scenario() -> None:
        work = Work()
        work.failures = 1
        waiting = Queue(work)
        waiting.add("bad")
        waiting.add("good")
        async with asyncio.TaskGroup() as group:
            running = group.create_task(waiting.run())
            await work.until("good", 1)
            running.cancel()

    run(scenario())


@pytest.mark.parametrize("runners", [1, 4])
def test_every_key_gets_its_turn(run, runners: int) -> None:
    async def scenario() -> None:
        work = Work()
        waiting = Queue(work)
        keys = [str(n) for n in range(50)]
        async with asyncio.TaskGroup() as group:
            running = group.create_task(waiting.run(runners))
            for key in keys:
                waiting.add(key)
            for key in keys:
                await work.until(key, 1)
            running.cancel()
        assert work.most == 1

    run(scenario())
