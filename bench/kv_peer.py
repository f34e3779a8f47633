"""The prefill worker's process of bench.kv: one KV plane that sends what it is told.

    python -m bench.kv_peer TRANSPORT BLOCKS

Takes a line of JSON for each transfer, answers with one: its seconds, from the line to the
target's verdict.
"""

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from pd_core.kv import KvLayout
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.plane import KvPlane, KvSettings
from pd_engine.kv.shm import SharedMemory
from pd_engine.types import TokenOut
from pd_proto.v1 import engine_pb2 as pb

LAYOUT = KvLayout("b" * 64, "bfloat16", block_tokens=16, layers=32, kv_heads=8, head_dim=128)


def made_plane(
    name: str, epoch: str, transport: str, blocks: int, told: Any
) -> tuple[KvPlane, SharedMemory]:
    """A plane with a pool of so many blocks, all of them touched."""
    memory = SharedMemory(blocks * LAYOUT.block_bytes)
    page = bytes(range(256)) * 4096
    for start in range(0, len(memory.mapping), len(page)):
        memory.mapping[start : start + len(page)] = page
    pool = KvMemory(memoryview(memory.mapping), LAYOUT)
    settings = KvSettings(transport=transport)
    return KvPlane(LAYOUT, pool, name, epoch, told, settings, pool_fd=memory.fd), memory


class _Told:
    """KvCallbacks of the sending side."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[bool] = asyncio.Queue()

    def on_export_done(self, key: Any, committed: bool) -> None:
        del key
        self.ended.put_nowait(committed)

    def on_export_failed(self, key: Any, failure: Any) -> None:
        del key
        print(failure, file=sys.stderr)
        self.ended.put_nowait(False)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


async def serve(transport: str, blocks: int) -> None:
    told = _Told()
    plane, _ = made_plane("prefill", f"peer-{time.monotonic_ns()}", transport, blocks, told)
    await plane.start("127.0.0.1", 0)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        tokens, key = asked["tokens"], (1, asked["number"])
        target = pb.KvTarget(
            worker="decode",
            epoch=asked["epoch"],
            kv_address=asked["address"],
            grant=bytes.fromhex(asked["grant"]),
        )
        started = time.perf_counter()
        ids = tuple(range(LAYOUT.blocks_for(tokens)))
        plane.open_export(key, "r", asked["number"], target, ids, tokens, 30.0)
        plane.seal_export(key, (TokenOut(0, 0, 1),), 0)
        committed = await told.ended.get()
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "committed": committed}), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], int(sys.argv[2])))
