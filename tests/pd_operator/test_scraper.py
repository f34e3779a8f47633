"""Routers are read beside the reconciles: those that answer are waited for, others aren't."""

import asyncio
from collections.abc import Iterable

import pytest

from pd_operator import scraper
from pd_operator.measured import Samples
from pd_operator.scraper import Scraper


class Routers:
    """Answers by address; those in `mute` don't."""

    def __init__(self) -> None:
        self.mute: set[str] = set()
        self.speak = asyncio.Event()
        self.asked: list[str] = []

    async def __call__(self, addresses: Iterable[str]) -> Samples:
        [address] = addresses
        self.asked.append(address)
        if address in self.mute:
            await self.speak.wait()
            return Samples(silent=1)
        return Samples(ttft={1: 1})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraper, "WAIT_S", 0.05)


def test_samples_of_all_that_answer(run):
    async def scenario() -> None:
        routers = Routers()
        made = Scraper(routers)
        found = await made.read(["a", "b"])
        assert (found.ttft, found.silent) == ({1: 2}, 0)
        await made.close()

    run(scenario())


def test_a_mute_one_is_waited_for_once(run):
    async def scenario() -> None:
        routers, loop = Routers(), asyncio.get_running_loop()
        routers.mute.add("b")
        made = Scraper(routers)
        found = await made.read(["a", "b"])
        assert (found.ttft, found.silent) == ({1: 1}, 1)
        assert routers.asked.count("b") == 1
        await made.read(["b"])  # the reading before is still under way
        assert routers.asked.count("b") == 1
        routers.speak.set()
        await asyncio.sleep(0.01)
        routers.speak.clear()
        began = loop.time()
        for _ in range(20):
            assert (await made.read(["b"])).silent == 1
        assert loop.time() - began < 20 * scraper.WAIT_S
        routers.mute.clear()
        routers.speak.set()
        await asyncio.sleep(0.01)
        await made.read(["b"])
        await asyncio.sleep(0.01)
        assert (await made.read(["b"])).silent == 0  # it answers again
        await made.close()

    run(scenario())


def test_a_reading_that_fails_is_silence(run):
    async def fails(_addresses: Iterable[str]) -> Samples:
        raise RuntimeError("as told")

    async def scenario() -> None:
        made = Scraper(fails)
        assert (await made.read(["a"])).silent == 1
        await made.close()

    run(scenario())


def test_old_routers_are_forgotten(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scraper, "FORGET_S", -1.0)
    monkeypatch.setattr(scraper, "CLEAR_S", 0.0)

    async def scenario() -> None:
        made = Scraper(Routers())
        for number in range(100):
            await made.read([f"10.0.0.{number}"])
        assert len(made._routers) <= 1
        await made.close()

    run(scenario())
