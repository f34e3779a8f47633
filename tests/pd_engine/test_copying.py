"""Copying and hashing in threads: all bytes, the right hash, and after an end of any kind nothing
is written any more."""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from pd_engine.kv import copying
from pd_engine.kv.copying import Copier

Run = Callable[[Coroutine[Any, Any, None]], None]
MIB = 1 << 20


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier("test")
    yield made
    made.close()


def pieces(data: bytearray | bytes, seed: int, largest: int) -> list[memoryview]:
    """Neighbours of any length."""
    chance, view, found = random.Random(seed), memoryview(data), []
    at = 0
    while at < len(view):
        size = chance.randint(1, largest)
        found.append(view[at : at + size])
        at += size
    return found


@pytest.mark.parametrize(
    ("size", "largest"),
    [(1000, 300), (MIB // 2, MIB), (MIB // 2 + 1, 9999), (5 * MIB + 3, 2 * MIB)],
)
def test_pieces_that_differ_on_both_sides(
    run: Run, copier: Copier, size: int, largest: int
) -> None:
    data, target = os.urandom(size), bytearray(size)

    async def body() -> None:
        found = await copier.copy(pieces(data, 1, largest), pieces(target, 2, largest))
        assert target == data
        assert found == xxhash.xxh3_64(data).intdigest()

    run(body())


def test_several_at_once(run: Run, copier: Copier) -> None:
    async def body() -> None:
        datas = [os.urandom(2 * MIB + number) for number in range(5)]
        targets = [bytearray(len(data)) for data in datas]
        found = await asyncio.gather(
            *(
                copier.copy([memoryview(data)], [memoryview(target)])
                for data, target in zip(datas, targets, strict=True)
            )
        )
        assert targets == datas
        assert found == [xxhash.xxh3_64(data).intdigest() for data in datas]

    run(body())


class Gate:
    """Copies stop before each piece until they are let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Semaphore(0)
        real = np.copyto

        def gated(into: Any, piece: Any) -> None:
            self.reached.set()
            assert self.open.acquire(timeout=30)
            real(into, piece)

        monkeypatch.setattr(copying.np, "copyto", gated)


def test_cancelled_within_a_piece(
    run: Run, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    data, target = b"x" * (4 * MIB), bytearray(4 * MIB)

    async def body() -> None:
        task = asyncio.create_task(copier.copy([memoryview(data)], [memoryview(target)]))
        await asyncio.to_thread(gate.reached.wait, 30)
        task.cancel()
        timer = threading.Timer(0.05, gate.open.release)  # while the loop waits for that piece
        timer.start()
        with pytest.raises(asyncio.CancelledError):
            await task
        timer.join()
        now = bytes(target)
        gate.open.release(100)
        await copier.copy([memoryview(data)], [memoryview(bytearray(len(data)))])
        assert bytes(target) == now, "written after the end"
        assert target.count(b"x") < len(target)

    run(body())


def test_cancelled_before_its_turn(
    run: Run, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    data = b"x" * MIB
    first, second = bytearray(MIB), bytearray(MIB)

    async def body() -> None:
        goes_on = asyncio.create_task(copier.copy([memoryview(data)], [memoryview(first)]))
        waits = asyncio.create_task(copier.copy([memoryview(data)], [memoryview(second)]))
        await asyncio.to_thread(gate.reached.wait, 30)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        gate.open.release(100)
        assert await goes_on == xxhash.xxh3_64(data).intdigest()
        assert first == data
        assert not any(second)
        # And whoever comes next is served.
        assert await copier.copy([memoryview(data)], [memoryview(second)])

    run(body())


def test_what_fails_says_so_and_blocks_nobody(
    run: Run, copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("gone")

    data = b"x" * MIB

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(copying.np, "copyto", broken)
            with pytest.raises(OSError, match="gone"):
                await copier.copy([memoryview(data)], [memoryview(bytearray(MIB))])
        assert await copier.copy([memoryview(data)], [memoryview(bytearray(MIB))])

    run(body())
