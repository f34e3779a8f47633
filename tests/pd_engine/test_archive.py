"""KV that outlives its place in the pool: kept in host memory and on disk, brought back right.

Engine cores with the fake runner, whose tokens are right only when all KV behind them is.
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_core.kv import prefix_hashes
from pd_engine.archive import Archive, Policy, Stores
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.slots import DiskSlots, HostSlots
from pd_proto.v1 import engine_pb2 as pb
from tests.pd_engine.core_rig import Engine, generate, hand_over
from tests.pd_engine.fake_runner import LAYOUT, reference

NOTHING_IDLE = Policy(idle_share=0.0, tidy_s=0.02)
SLOW_PREFILL = 1.0  # tokens/s: whatever is kept is worth reading


class Keeper(Engine):
    """A worker with an archive."""

    def __init__(
        self, role: str, blocks: int, stores: Stores, policy: Policy, speed: float
    ) -> None:
        super().__init__(role, blocks, 8)
        memory = KvMemory(self.runner.kv_buffer, self.runner.layout)
        self.archive = Archive(
            self.scheduler, memory, policy, stores, self.core.metrics, prefill_tokens_per_s=speed
        )
        self.core.intake.archive = self.archive
        self._archiving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._archiving = asyncio.create_task(self.archive.run())

    async def close(self) -> None:
        await super().close()
        assert self._archiving is not None
        self._archiving.cancel()
        await asyncio.gather(self._archiving, return_exceptions=True)
        await self.archive.flush(5.0)
        self.archive.close()

    async def rest(self) -> None:
        """Nobody waits for anything, all is copied, and idle blocks have left the pool."""
        await self.idle()
        await self.until(lambda: not self.scheduler.pool.fresh)
        await self.until(lambda: self.scheduler.load().kv_cached == 0)

    async def ask(self, handle: int, prompt: list[int], count: int = 8) -> pb.Prefilled:
        """A whole answer, checked; how its prompt was computed."""
        message = generate(
            handle, prompt, prefill_here=True, sampling=pb.Sampling(max_tokens=count)
        )
        self.send(generate=message)
        first: pb.Prefilled = await self.event("prefilled", handle)
        later = await self.tokens(handle, 0, count - 1) if count > 1 else []
        assert [first.first[0].token, *later] == reference(prompt, count)
        return first

    def counted(self, name: str, **labels: str) -> float:
        own = {"model": "m", "pool": self.name, "worker": f"{self.name}-0"}
        value = self.core.metrics.registry.get_sample_value(
            f"pdcluster_engine_{name}", own | labels
        )
        return value or 0.0


def held_reads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """From now on KV is read back only once the second event is set; the first says that
    somebody waits for it."""
    reading, go_on = threading.Event(), threading.Event()
    real = Archive._read

    def held(self: Archive, *arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(Archive, "_read", held)
    return reading, go_on


@contextlib.asynccontextmanager
async def keeper(
    folder: Path | None = None,
    *,
    blocks: int = 64,
    host: int = 64,
    disk: int = 64,
    policy: Policy = NOTHING_IDLE,
    speed: float = SLOW_PREFILL,
    role: str = "both",
) -> AsyncIterator[Keeper]:
    size = LAYOUT.block_bytes
    stores = Stores(HostSlots(host, size) if host else None)
    if folder is not None:
        stores.disk = DiskSlots(folder, disk, size, LAYOUT.layout_hash)
    made = Keeper(role, blocks, stores, policy, speed)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


def run(work: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


PROMPT = list(range(100, 141))  # 41 tokens: ten whole blocks of four, and one token


def test_the_next_turn_finds_in_host_memory_what_left_the_pool() -> None:
    async def scenario() -> None:
        async with keeper() as one:
            assert (await one.ask(1, PROMPT)).cached_tokens == 0
            await one.rest()
            turn = [*PROMPT, *reference(PROMPT, 8), 7, 8, 9]
            # Of 49 tokens the last one's KV was never computed: twelve whole blocks.
            assert (await one.ask(2, turn)).cached_tokens == 48
            assert one.counted("kv_restored_tokens_total", store="host") == 48
            await one.rest()

    run(scenario())


def test_a_decode_worker_gets_sent_only_what_it_does_not_keep() -> None:
    async def scenario() -> None:
        async with keeper(role="prefill", host=0) as p, keeper(role="decode") as d:
            first = await hand_over(p, d, generate(1, PROMPT))
            await d.tokens(1, 0, 7)
            await d.rest()
            again = await hand_over(p, d, generate(2, PROMPT))
            assert await d.tokens(2, 0, 7) == reference(PROMPT, 8)[1:]
            assert (first.kv_bytes, again.kv_bytes) == (11 * LAYOUT.block_bytes, LAYOUT.block_bytes)
            await d.rest()

    run(scenario())


def test_it_survives_a_restart_on_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with keeper(tmp_path) as one:
            await one.ask(1, PROMPT)
            await one.rest()
        async with keeper(tmp_path) as again:
            known = {*again.core.take_prefix_changes().gained}
            assert known == {*again.core.prefixes()}
            assert len(known) == 12
            assert (await again.ask(1, PROMPT)).cached_tokens == 40
            assert again.counted("kv_restored_tokens_total", store="disk") == 40

    run(scenario())


def test_what_host_memory_has_no_room_for_goes_to_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with keeper(tmp_path, host=8) as one:
            for handle, start in enumerate((0, 1000, 2000, 3000), 1):
                await one.ask(handle, [start + at for at in range(17)], 1)
                await one.rest()
            assert one.archive.kept()["disk"] >= 8
            for handle, start in enumerate((0, 1000, 2000, 3000), 11):
                asked = await one.ask(handle, [start + at for at in range(17)], 1)
                assert asked.cached_tokens == 16
                await one.rest()
            assert one.archive.kept()["host"] <= 8

    run(scenario())


@pytest.mark.parametrize("broken", [0, 4, 9])
def test_a_corrupt_block_is_dropped_and_computed_again(broken: int, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with keeper(tmp_path) as one:
            await one.ask(1, PROMPT)
            await one.rest()
            keys = list(prefix_hashes(PROMPT, LAYOUT.block_tokens))
        disk = DiskSlots(tmp_path, 64, LAYOUT.block_bytes, LAYOUT.layout_hash)
        [slot] = [found.slot for found in disk.scan() if found.key == keys[broken]]
        with disk.path.open("r+b") as file:
            file.seek(slot * (4096 + 4096) + 4096)
            file.write(b"\xff\xff\xff")
        disk.close()
        async with keeper(tmp_path) as again:
            assert (await again.ask(1, PROMPT)).cached_tokens == 4 * broken
            assert again.counted("kv_store_failures_total", store="disk") == 1
            await again.rest()
            assert (await again.ask(2, PROMPT)).cached_tokens == 40

    run(scenario())


def test_a_full_disk_is_told_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def scenario() -> None:
        async with keeper(tmp_path, host=4) as one:
            with monkeypatch.context() as patch:
                patch.setattr(DiskSlots, "write", full)
                await one.ask(1, PROMPT)
                await one.until(lambda: one.counted("kv_store_failures_total", store="disk") > 0)
                await one.ask(2, list(range(30)))
            await one.ask(3, list(range(500, 530)))
            await one.until(lambda: one.archive.kept()["disk"] > 0)
            await one.rest()

    run(scenario())


@pytest.mark.parametrize("noticed_by", ["a look", "a write", "the end"])
def test_a_disks_file_that_is_deleted_is_made_again(noticed_by: str, tmp_path: Path) -> None:
    """Lost is what it alone held; what host memory has is written anew."""
    tidy_s = 0.02 if noticed_by == "a look" else 1000.0
    policy = replace(NOTHING_IDLE, tidy_s=tidy_s)

    def failures(one: Keeper) -> float:
        return one.counted("kv_store_failures_total", store="disk")

    async def scenario() -> None:
        async with keeper(tmp_path, host=8, policy=policy) as one:
            await one.ask(1, PROMPT)  # 12 blocks, more than host memory holds
            await one.until(lambda: one.archive.kept()["disk"] >= 4)
            await one.until(lambda: not one.scheduler.pool.fresh)
            [file] = tmp_path.iterdir()
            file.unlink()
            if noticed_by == "a write":
                await one.ask(2, list(range(500, 540)))
            if noticed_by != "the end":
                await one.until(file.exists)
                assert failures(one) == 1
                await one.until(lambda: one.archive.kept()["disk"] > 0)
            await one.ask(3, PROMPT)
        assert failures(one) == 1
        async with keeper(tmp_path) as again:
            assert len(again.core.prefixes()) >= 8  # what host memory had in the end
            await again.ask(4, PROMPT)
            assert failures(again) == 0

    run(scenario())


def test_reading_is_left_where_computing_is_faster() -> None:
    async def scenario() -> None:
        async with keeper(speed=1e12) as one:
            await one.ask(1, PROMPT)
            await one.rest()
            assert (await one.ask(2, PROMPT)).cached_tokens == 0
            assert one.counted("kv_restores_declined_total", store="host") == 1
            await one.rest()

    run(scenario())


def test_what_nobody_used_for_long_is_dropped_everywhere(tmp_path: Path) -> None:
    policy = Policy(ttl_s=0.5, tidy_s=0.02)

    async def scenario() -> None:
        async with keeper(tmp_path, policy=policy) as one:
            await one.ask(1, PROMPT)
            await one.idle()
            known = set(one.core.take_prefix_changes().gained)
            await one.until(lambda: not one.core.prefixes())
            assert set(one.core.take_prefix_changes().lost) == known
            assert one.archive.kept() == {"host": 0, "disk": 0}
            assert (await one.ask(2, PROMPT)).cached_tokens == 0
        async with keeper(tmp_path, policy=replace(policy, ttl_s=math.inf)) as again:
            await again.idle()

    run(scenario())


def test_tenants_do_not_find_each_others() -> None:
    async def scenario() -> None:
        async with keeper() as one:
            one.send(generate=generate(1, PROMPT, prefill_here=True, cache_salt=b"a"))
            await one.event("prefilled", 1)
            await one.tokens(1, 0, 7)
            await one.rest()
            for handle, salt, cached in ((2, b"b", 0), (3, b"a", 40)):
                one.send(generate=generate(handle, PROMPT, prefill_here=True, cache_salt=salt))
                assert (await one.event("prefilled", handle)).cached_tokens == cached
                await one.tokens(handle, 0, 7)
                await one.rest()

    run(scenario())


def test_a_request_that_is_cancelled_while_its_kv_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with keeper() as one:
            await one.ask(1, PROMPT)
            await one.rest()
            reading, go_on = held_reads(monkeypatch)
            one.send(generate=generate(2, PROMPT, prefill_here=True))
            await one.until(reading.is_set)
            one.scheduler.check()
            one.send(cancel=pb.Cancel(handle=2))
            assert one.scheduler.busy  # the thread may still write the blocks
            go_on.set()
            await one.rest()
            one.scheduler.check()
            assert (await one.ask(3, PROMPT)).cached_tokens == 40

    run(scenario())


def test_no_room_means_no_reading_and_no_harm() -> None:
    async def scenario() -> None:
        async with keeper(blocks=16) as one:
            await one.ask(1, PROMPT)
            await one.rest()
            gate = one.hold_steps()
            one.send(generate=generate(2, list(range(40)), prefill_here=True))
            await one.until(one.runner.started.is_set)
            one.send(generate=generate(3, PROMPT, prefill_here=True))
            gate.release(1000)
            assert (await one.event("prefilled", 3)).cached_tokens == 0
            assert await one.tokens(3, 0, 7) == reference(PROMPT, 8)[1:]
            await one.tokens(2, 0, 7)
            await one.rest()

    run(scenario())


@pytest.mark.slow
def test_two_thousand_idle_sessions_with_a_pool_for_fifty(tmp_path: Path) -> None:
    """All come back once more, and not one block of what they said is computed again."""
    sessions, blocks, at_once = 2000, 50 * 4, 10

    def opening(number: int) -> list[int]:
        return [number, *range(12)]

    def next_turn(number: int) -> list[int]:
        return [*opening(number), *reference(opening(number), 4), 5]

    async def scenario() -> None:
        policy = Policy()
        async with keeper(tmp_path, blocks=blocks, host=1000, disk=9000, policy=policy) as one:
            for first in range(0, sessions, at_once):
                some = range(first, first + at_once)
                await asyncio.gather(*(one.ask(n + 1, opening(n), 4) for n in some))
                await one.until(lambda: not one.scheduler.pool.fresh)
            cached = 0
            for first in range(0, sessions, at_once):
                one.events.clear()
                some = range(first, first + at_once)
                asked = await asyncio.gather(*(one.ask(10_000 + n, next_turn(n), 1) for n in some))
                cached += sum(each.cached_tokens for each in asked)
            assert cached == sessions * 16
            assert one.counted("kv_restored_tokens_total", store="disk") > sessions * 8
            assert one.archive.kept()["host"] <= 1000

    async def bounded() -> None:
        async with asyncio.timeout(110):
            await scenario()

    asyncio.run(bounded())
