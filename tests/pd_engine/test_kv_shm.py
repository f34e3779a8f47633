"""KV by shared memory: bytes arrive, who chooses it and who doesn't, memory that changes under
the copy fails closed, and nothing is left when either side is killed."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_core.failures import FailureKind
from pd_engine.kv import frames, shm
from pd_engine.kv.plane import KvSettings
from pd_engine.transfer import ExportLimits
from tests.pd_engine.kv_rig import LAYOUT, epoch, hand_over, pair, transfer

pytestmark = pytest.mark.slow

Run = Callable[[Coroutine[Any, Any, None]], None]


def by(transport: str, frame_bytes: int = 1 << 20) -> KvSettings:
    return KvSettings(transport=transport, exports=ExportLimits(frame_bytes=frame_bytes))


@pytest.mark.parametrize("frame_bytes", [1, 5000, 1 << 20])
@pytest.mark.parametrize("prefix_blocks", [0, 2])
def test_bytes_arrive(run: Run, frame_bytes: int, prefix_blocks: int) -> None:
    async def body() -> None:
        settings = by("shm", frame_bytes)
        async with pair(settings, by("shm"), shared=True, epoch=epoch()) as (prefill, decode):
            for number in range(3):  # the connection is used again
                t = transfer(number, 41, prefix_blocks=prefix_blocks)
                assert await hand_over(t, prefill, decode) == "shm"
            assert decode.plane.connections == 1

    run(body())


@pytest.mark.parametrize(
    ("ours", "theirs", "shared", "taken"),
    [
        ("auto", "auto", True, "shm"),
        ("auto", "shm", True, "shm"),
        ("auto", "tcp", True, "tcp"),
        ("tcp", "auto", True, "tcp"),
        ("auto", "auto", False, "tcp"),  # the sender's pool can't be shared
    ],
)
def test_auto_takes_what_both_can_do(
    run: Run, ours: str, theirs: str, shared: bool, taken: str
) -> None:
    async def body() -> None:
        async with pair(by(ours), by(theirs), shared=shared, epoch=epoch()) as (prefill, decode):
            assert await hand_over(transfer(1, 20), prefill, decode) == taken

    run(body())


@pytest.mark.parametrize(
    ("ours", "theirs", "asked", "shared", "says"),
    [
        ("shm", "tcp", "", True, "takes KV by shm"),
        ("shm", "auto", "", False, "not in shared memory"),
        ("tcp", "shm", "", True, "takes KV by shm alone"),
        ("auto", "shm", "tcp", True, "takes KV by shm alone"),
        ("auto", "tcp", "shm", True, "takes KV by shm"),
    ],
)
def test_what_was_asked_for_by_name_has_no_substitute(
    run: Run, ours: str, theirs: str, asked: str, shared: bool, says: str
) -> None:
    async def body() -> None:
        async with pair(by(ours), by(theirs), shared=shared, epoch=epoch()) as (prefill, decode):
            t = transfer(1, 20)
            t.open(prefill, decode, transport=asked)
            failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED
            assert says in failure.message
            decode.plane.cancel_import(t.key)

    run(body())


def test_memory_that_changes_under_the_copy_fails_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the sender gave its blocks away before the target had read them."""
    real = shm.copy

    def late(source: Any, target: Any, hasher: Any) -> Iterator[None]:
        prefill.pool[:] = bytes(len(prefill.pool))
        return real(source, target, hasher)

    prefill: Any = None
    monkeypatch.setattr(shm, "copy", late)

    async def body() -> None:
        nonlocal prefill
        async with pair(by("shm"), by("shm"), shared=True, epoch=epoch()) as (prefill, decode):
            t = transfer(1, 20)
            t.open(prefill, decode)
            t.seal(prefill)
            failure = (await decode.told.wait("import_failed", t.key))[2]
            assert "checksum" in failure.message
            await decode.told.wait("released", t.key)
            await prefill.told.wait_any(("done", "export_failed"), t.key)

    run(body())


@pytest.mark.parametrize("what", ["no pool", "not sealed", "no descriptor", "odd size"])
def test_what_is_no_pool_is_refused(run: Run, what: str) -> None:
    async def body() -> None:
        name = epoch()
        async with pair(by("shm"), by("shm"), shared=True, epoch=name) as (_, decode):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(f"\0pdcluster-kv/{name}")
            fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, LAYOUT.block_bytes)
            pool = shm.SharedMemory(LAYOUT.block_bytes + 1)
            pipe = os.pipe()
            fds = {"no pool": [pipe[0]], "not sealed": [fd], "odd size": [pool.fd]}.get(what, [])
            socket.send_fds(sock, [b"\0"], fds)
            sock.setblocking(False)
            if what == "odd size":  # only a pool's form tells
                hello = frames.encode_hello("p", "p-epoch", name, LAYOUT)
                await asyncio.get_running_loop().sock_sendall(sock, hello)
            async with asyncio.timeout(5):
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
            sock.close()
            for number in (fd, pool.fd, *pipe):
                os.close(number)
            pool.mapping.close()
            assert decode.plane.open_imports == 0

    run(body())


# ---- nothing is left ---------------------------------------------------------------------

_PREFILL = """
import asyncio, sys
from tests.pd_engine.kv_rig import epoch, hand_over, worker
from pd_engine.kv.plane import KvSettings
from tests.pd_engine import kv_rig
from pd_proto.v1 import engine_pb2 as pb

async def main():
    grant, epoch = bytes.fromhex(sys.argv[1]), sys.argv[2]
    settings = KvSettings(transport="shm")
    made = await worker("p", settings=settings, seed=1, shared=True, epoch=grant.hex())
    target = pb.KvTarget(worker="decode", epoch=epoch, kv_address="127.0.0.1:1", grant=grant)
    made.plane.open_export((1, 1), "request-(1, 1)", 1, target, tuple(range(10)), 40, 30)
    made.plane.export_progress((1, 1), 20)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def mappings() -> int:
    """Of shared pools in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:pdcluster-kv")


def test_nothing_is_left_of_a_sender_that_was_killed(run: Run, root: Path) -> None:
    async def body() -> None:
        name = epoch()
        files = set(os.listdir("/dev/shm"))
        gc.collect()  # pools of other tests
        own = mappings()
        async with pair(by("shm"), by("shm"), epoch=name) as (_, decode):
            before = len(os.listdir("/proc/self/fd"))
            for number in range(3):
                key = (1, number)
                blocks = tuple(range(10))
                now = time.monotonic()
                grant = decode.plane.open_import(
                    key, "request-(1, 1)", 1, blocks, 0, (0,), now, token_count=40
                )
                command = [sys.executable, "-c", _PREFILL, grant.hex(), name]
                killed = subprocess.Popen(command, cwd=root)
                try:
                    async with asyncio.timeout(30):
                        while not (mappings() > own and decode.plane.receiving(key)):
                            await asyncio.sleep(0.01)
                finally:
                    killed.send_signal(signal.SIGKILL)
                    killed.wait()
                failure = (await decode.told.wait("import_failed", key))[2]
                assert "ended before the seal" in failure.message
                async with asyncio.timeout(10):
                    while mappings() > own or decode.plane.connections:
                        await asyncio.sleep(0.01)
            assert len(os.listdir("/proc/self/fd")) <= before
        assert set(os.listdir("/dev/shm")) == files

    run(body())


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        shm._same_user(ours)
        monkeypatch.setattr(shm.os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConnectionRefusedError, match="belongs to user"):
            shm._same_user(ours)
