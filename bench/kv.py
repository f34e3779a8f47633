"""How fast KV gets from one worker's pool into another's: each transport against what the
machine can do, and how long a hand-over takes without the bytes.

Two processes, a prefill and a decode worker's KV plane, with blocks of 2 MiB (those of an
8B model in bf16); in the same run a memcpy of as many bytes, a raw socket with as many
connections, `sendall` into `recv_into`, and one read of all blocks by NIXL's own API (UCX takes
what this machine has). Checksums are ours alone: both ends compute them over every byte.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import uvloop

from bench.common import Goal, arguments, median, percentile, report, table
from bench.kv_nixl import direct
from bench.kv_peer import LAYOUT, made_plane

GOALS = {
    "shm_vs_memcpy": Goal(">=", 0.6),
    "tcp_vs_socket": Goal(">=", 0.8),
    "nixl_vs_direct": Goal(">=", 0.8),
    "handover_p50_ms": Goal("<=", 5.0),
    "handover_p99_ms": Goal("<=", 15.0),
}
_MIB = 1 << 20
_TRANSPORTS = ("shm", "tcp", "nixl")


class Peer:
    """The prefill worker's process: told on its stdin, answers on its stdout."""

    def __init__(self, transport: str, blocks: int) -> None:
        command = [sys.executable, "-m", "bench.kv_peer", transport, str(blocks)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def ask(self, **what: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise RuntimeError("the peer ended")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class Committed:
    """KvCallbacks of the decode side: only the end counts."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.failure = ""

    def on_committed(self, key: Any, first: Any, stats: Any) -> None:
        del key, first, stats
        self.done.set()

    def on_import_failed(self, key: Any, failure: Any) -> None:
        del key
        self.failure = str(failure)
        self.done.set()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Transfers:
    """A decode worker's plane here and a prefill worker's in another process, by one transport."""

    def __init__(self, transport: str, most_mib: int) -> None:
        blocks = most_mib * _MIB // LAYOUT.block_bytes
        self._told, self._epoch = Committed(), str(uuid.uuid4())
        self._plane, _ = made_plane("decode", self._epoch, transport, blocks, self._told)
        self._peer = Peer(transport, blocks)
        self._numbers = itertools.count(1)
        self._address = ""

    async def start(self) -> None:
        self._address = await self._plane.start("127.0.0.1", 0)

    async def once(self, size: int) -> float:
        """Seconds from the first word to the sender to its commit, for so many MiB."""
        number, count = next(self._numbers), size * _MIB // LAYOUT.block_bytes
        tokens = count * LAYOUT.block_tokens
        self._told.done.clear()
        grant = self._plane.open_import(
            (1, number), "r", number, tuple(range(count)), 0, (0,), time.monotonic(),
            token_count=tokens,
        )  # fmt: skip
        answer = await self._peer.ask(
            number=number, grant=grant.hex(), epoch=self._epoch, address=self._address,
            tokens=tokens,
        )  # fmt: skip
        await self._told.done.wait()
        if self._told.failure:
            raise RuntimeError(self._told.failure)
        return float(answer["seconds"])

    async def close(self) -> None:
        self._peer.close()
        await self._plane.close()


def memcpy_s(size: int) -> float:
    """One copy of so many MiB between memory that has been touched."""
    source, target = _arrays(size)
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


_kept: dict[int, Any] = {}


def _arrays(size: int) -> Any:
    if size not in _kept:
        _kept.clear()
        _kept[size] = (np.ones(size * _MIB, np.uint8), np.ones(size * _MIB, np.uint8))
    return _kept[size]


_SENDER = """
import socket, sys
size = int(sys.argv[2]) << 20
data = bytearray(size)
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    while sock.recv(1):
        sock.sendall(data)
"""


@contextmanager
def raw_socket(size: int) -> Iterator[Any]:
    """Calling what is yielded takes so many MiB over one connection. Seconds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", _SENDER, str(server.getsockname()[1]), str(size)]
        process = subprocess.Popen(command)
        sock, _ = server.accept()
        target = memoryview(bytearray(size * _MIB))

        def once() -> float:
            started = time.perf_counter()
            sock.sendall(b"x")
            at = 0
            while at < len(target):
                at += sock.recv_into(target[at:])
            return time.perf_counter() - started

        try:
            once()
            yield once
        finally:
            sock.close()
            process.wait()


def handovers(count: int) -> list[float]:
    """Milliseconds from the grant to the first decode step's token, with a model that takes no
    time and a prompt of one block, over the engines' own cores and planes."""
    from bench.kv_handover import run

    found: list[float] = uvloop.run(run(count))
    return found


async def sides(sizes: list[int], rounds: int) -> tuple[list[Any], dict[str, list[float]]]:
    """Each transport and what it is held against in turn, so that whatever else the machine does
    meets both. Rows of GB/s, and by transport the median ratio for each size."""
    rows: list[Any] = []
    ratios: dict[str, list[float]] = {name: [] for name in _TRANSPORTS}
    ours = {name: Transfers(name, max(sizes)) for name in _TRANSPORTS}
    try:
        for each in ours.values():
            await each.start()
            await each.once(max(sizes))  # memory that nobody has touched costs page faults
        for size in sizes:
            with raw_socket(size) as raw, direct(size) as read:
                theirs = {"shm": partial(memcpy_s, size), "tcp": raw, "nixl": read}
                memcpy_s(size)
                pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in _TRANSPORTS}
                for _ in range(rounds):
                    for name in _TRANSPORTS:
                        pairs[name].append((await ours[name].once(size), theirs[name]()))
            times_s: list[float] = []
            for name, found in pairs.items():
                ratios[name].append(median(theirs_s / ours_s for ours_s, theirs_s in found))
                times_s += [median(side) for side in zip(*found, strict=True)]
            rows.append((f"{size} MiB", *(size * _MIB / s / 1e9 for s in times_s)))
    finally:
        for each in ours.values():
            await each.close()
    return rows, ratios


def main(quick: bool) -> None:
    sizes = [2, 64] if quick else [2, 8, 32, 128, 512]
    rows, ratios = uvloop.run(sides(sizes, 3 if quick else 11))
    titles = ("size", "shm GB/s", "memcpy", "tcp GB/s", "raw socket", "nixl GB/s", "NIXL's API")
    print(table(titles, rows), flush=True)
    latencies = handovers(50 if quick else 1000)
    metrics = {
        "shm_vs_memcpy": median(ratios["shm"][-3:]),
        "tcp_vs_socket": median(ratios["tcp"][-3:]),
        "nixl_vs_direct": median(ratios["nixl"][-3:]),
        "handover_p50_ms": percentile(latencies, 50),
        "handover_p99_ms": percentile(latencies, 99),
    }
    report("kv", metrics, GOALS, quick)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(arguments(__doc__))
