"""A thousand restarts of a peer, of either role: no descriptor, thread, shared memory or temporary
file is left of any of them, and the next one is served."""

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pd_engine.kv.plane import KvSettings
from tests.pd_engine.kv_rig import WAIT_S, Worker, epoch, hand_over, transfer, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESTARTS = 1000
SETTLED = 20
"""After so many, whatever is made once has been made."""


Holdings = tuple[int, ...]


def holdings() -> Holdings:
    """Descriptors, threads, mappings of shared memory (pools, and what UCX makes), and temporary
    files."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    mappings = sum("memfd:" in line or "/dev/shm/" in line or "/SYSV" in line for line in lines)
    counts = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return *counts, mappings, len(os.listdir(tempfile.gettempdir()))


@pytest.fixture(autouse=True)
def own_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other processes aren't counted."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


async def no_more_than(before: Holdings) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(now > then for now, then in zip(holdings(), before, strict=True)):
            await asyncio.sleep(0.01)


async def until_gone(one: Worker) -> None:
    async with asyncio.timeout(WAIT_S):
        while one.plane.connections or one.plane.open_imports or one.plane.open_exports:
            await asyncio.sleep(0.001)


async def made(role: str, transport: str, incarnation: str, **options: Any) -> Worker:
    settings = KvSettings(transport=transport)
    seed, shared = (1, transport == "shm") if role == "prefill" else (None, False)
    return await worker(
        role, settings=settings, seed=seed, shared=shared, epoch=incarnation, **options
    )


async def half_a_transfer(number: int, prefill: Worker, decode: Worker) -> None:
    """It has got somewhere when one of both goes: each time a little further."""
    t = transfer(number, 41)
    t.open(prefill, decode)
    prefill.plane.export_progress(t.key, 20)
    for _ in range(number % 23):
        await asyncio.sleep(0)


@pytest.mark.parametrize("transport", ["tcp", "shm", "nixl"])
@pytest.mark.parametrize("restarted", ["prefill", "decode"])
def test_nothing_is_left_of_a_thousand_incarnations(
    run: Callable[[Coroutine[Any, Any, None], float], None], restarted: str, transport: str
) -> None:
    async def body() -> None:
        # For the loop's calls that block, so that the rest can be counted.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        role = "decode" if restarted == "prefill" else "prefill"
        stays = await made(role, transport, epoch())
        before, port = holdings(), 0
        for number in range(1, RESTARTS + 1):
            # Where it is known, and at times elsewhere.
            comes = await made(restarted, transport, epoch(), port=port if number % 5 else 0)
            port = port or int(comes.address.rpartition(":")[2])
            prefill, decode = (comes, stays) if restarted == "prefill" else (stays, comes)
            assert await hand_over(transfer(2 * number, 41), prefill, decode) == transport
            if number % 2:
                await half_a_transfer(2 * number + 1, prefill, decode)
            await comes.plane.close()
            await until_gone(stays)
            stays.told.check_ends()
            stays.told.events.clear()
            if number == SETTLED:
                before = holdings()
        await no_more_than(before)
        await stays.plane.close()

    run(body(), 240.0)
