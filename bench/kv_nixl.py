"""NIXL's API used directly: one read of all blocks from another process's memory, again and
again. Also that process:

    python -m bench.kv_nixl MIB
"""

import ctypes
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.kv_peer import LAYOUT
from pd_engine.kv.agents import Agent

_MIB = 1 << 20


def _memory(size: int) -> tuple[mmap.mmap, int]:
    """So many MiB, all of them touched, and their address."""
    memory = mmap.mmap(-1, size * _MIB)
    page = bytes(range(256)) * 4096
    for start in range(0, len(memory), len(page)):
        memory[start : start + len(page)] = page
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


@contextmanager
def direct(size: int) -> Iterator[Callable[[], float]]:
    """Calling what is yielded reads so many MiB. Seconds."""
    command = [sys.executable, "-m", "bench.kv_nixl", str(size)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    memory, here = _memory(size)
    agent = Agent("direct-target", here, len(memory))
    try:
        told = json.loads(process.stdout.readline())
        peer = agent.meet(bytes.fromhex(told["metadata"]))
        block = LAYOUT.block_bytes
        spans = [(here + at, told["address"] + at, block) for at in range(0, len(memory), block)]

        def once() -> float:
            started = time.perf_counter()
            read = agent.begin(peer, spans)
            while (done := agent.done(read)) is None:
                pass
            if not done:
                raise RuntimeError("a read failed")
            return time.perf_counter() - started

        once()
        yield once
        agent.part(peer)
    finally:
        agent.close()
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main(size: int) -> None:
    memory, address = _memory(size)
    agent = Agent("direct-source", address, len(memory))
    print(json.dumps({"metadata": agent.metadata.hex(), "address": address}), flush=True)
    sys.stdin.read()
    agent.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
