"""How fast KV gets from one worker's pool into another's: each transport against what the
machine can do, and how long a hand-over takes without the bytes.

Two processes, a prefill and a decode worker's KV plane, with blocks of 2 MiB (those of an
8B model in bf16); in the same run a memcpy of as many bytes, a raw socket with as many
connections, `sendall` into `recv_into`, and one read of all blocks by NIXL's own API (UCX takes
what this machine has). Checksums are ours alone: both ends compute them over every byte.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
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


async def transfers(transport: str, sizes: list[int], rounds: int) -> dict[int, list[float]]:
    """Seconds from the first word to the sender to its commit, by MiB."""
    blocks = max(sizes) * _MIB // LAYOUT.block_bytes
    told, name = Committed(), str(uuid.uuid4())
    plane, _ = made_plane("decode", name, transport, blocks, told)
    address = await plane.start("127.0.0.1", 0)
    peer = Peer(transport, blocks)
    found: dict[int, list[float]] = {size: [] for size in sizes}
    try:
        # The largest first, once, uncounted: memory that nobody has touched costs page faults.
        plan = [max(sizes), *(s for _ in range(rounds) for s in sizes)]
        for number, size in enumerate(plan, 1):
            count = size * _MIB // LAYOUT.block_bytes
            tokens = count * LAYOUT.block_tokens
            told.done.clear()
            grant = plane.open_import(
                (1, number), "r", number, tuple(range(count)), 0, (0,), time.monotonic(),
                token_count=tokens,
            )  # fmt: skip
            answer = await peer.ask(
                number=number, grant=grant.hex(), epoch=name, address=address, tokens=tokens
            )
            await told.done.wait()
            if told.failure:
                raise RuntimeError(told.failure)
            if number > 1:
                found[size].append(answer["seconds"])
    finally:
        peer.close()
        await plane.close()
    return found


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


def main(quick: bool) -> None:
    sizes = [2, 64] if quick else [2, 8, 32, 128, 512]
    rounds = 3 if quick else 7
    times = {name: uvloop.run(transfers(name, sizes, rounds)) for name in _TRANSPORTS}
    rows: list[Any] = []
    ratios: dict[str, list[float]] = {name: [] for name in _TRANSPORTS}
    for size in sizes:
        with raw_socket(size) as once:
            raw_s = median(once() for _ in range(rounds))
        with direct(size) as once:
            read_s = median(once() for _ in range(rounds))
        copied_s = median(memcpy_s(size) for _ in range(rounds + 1))
        ours = {name: median(times[name][size]) for name in _TRANSPORTS}
        ratios["shm"].append(copied_s / ours["shm"])
        ratios["tcp"].append(raw_s / ours["tcp"])
        ratios["nixl"].append(read_s / ours["nixl"])
        times_s = (ours["shm"], copied_s, ours["tcp"], raw_s, ours["nixl"], read_s)
        rows.append((f"{size} MiB", *(size * _MIB / s / 1e9 for s in times_s)))
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
