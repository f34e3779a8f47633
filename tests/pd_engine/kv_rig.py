"""A prefill and a decode worker's KV planes in one loop, for tests: pools with known bytes,
callbacks that are recorded and can be awaited."""

import asyncio
import mmap
import os
import random
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvLayout
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.plane import ExportStats, ImportStats, KvPlane, KvSettings
from pd_engine.kv.shm import SharedMemory
from pd_engine.types import RequestKey, TokenOut
from pd_proto.tls import Certificates
from pd_proto.tokens import Tokens
from pd_proto.v1 import engine_pb2 as pb
from tests.pd_engine.kv_proxy import Do, Proxy

WAIT_S = 20.0
LAYOUT = KvLayout("a" * 64, "float32", block_tokens=4, layers=6, kv_heads=2, head_dim=8)
"""Slices of 512 B, blocks of 3,072 B."""


def first_tokens(*choices: int) -> tuple[TokenOut, ...]:
    return tuple(TokenOut(c, 0, 100 + c, None, -0.5, ((7, -0.5), (8, -1.5))) for c in choices)


@dataclass
class Recorder:
    """KvCallbacks that keeps all it is told, as (name, key, …)."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def _note(self, *event: Any) -> None:
        self.events.append(event)
        self.changed.set()

    def on_committed(
        self, key: RequestKey, first: tuple[TokenOut, ...], stats: ImportStats
    ) -> None:
        self._note("committed", key, first, stats)

    def on_import_failed(self, key: RequestKey, failure: Failure) -> None:
        self._note("import_failed", key, failure)

    def on_import_quarantined(self, key: RequestKey) -> None:
        self._note("quarantined", key)

    def on_import_released(self, key: RequestKey) -> None:
        self._note("released", key)

    def on_export_sealed(self, key: RequestKey, stats: ExportStats) -> None:
        self._note("sealed", key, stats)

    def on_export_done(self, key: RequestKey, committed: bool) -> None:
        self._note("done", key, committed)

    def on_export_failed(self, key: RequestKey, failure: Failure) -> None:
        self._note("export_failed", key, failure)

    def names(self, key: RequestKey) -> list[str]:
        return [e[0] for e in self.events if e[1] == key]

    def find(self, name: str, key: RequestKey) -> tuple[Any, ...] | None:
        return next((e for e in self.events if e[0] == name and e[1] == key), None)

    def check_ends(self) -> None:
        """Each import and each export ended exactly once."""
        for key in {e[1] for e in self.events}:
            names = self.names(key)
            ends = [n for n in names if n in ("committed", "released", "done", "export_failed")]
            assert len(ends) == 1, names

    async def wait(self, name: str, key: RequestKey) -> tuple[Any, ...]:
        return await self.wait_any((name,), key)

    async def wait_any(self, names: tuple[str, ...], key: RequestKey) -> tuple[Any, ...]:
        async with asyncio.timeout(WAIT_S):
            while True:
                self.changed.clear()
                for name in names:
                    found = self.find(name, key)
                    if found is not None:
                        return found
                await self.changed.wait()


@dataclass
class Worker:
    """One plane with its pool."""

    plane: KvPlane
    told: Recorder
    pool: bytearray | mmap.mmap
    memory: KvMemory
    layout: KvLayout
    epoch: str
    address: str = ""

    def block(self, block_id: int) -> bytes:
        size = self.layout.block_bytes
        return bytes(self.pool[block_id * size : (block_id + 1) * size])

    def blocks(self, ids: tuple[int, ...]) -> list[bytes]:
        return [self.block(i) for i in ids]


async def worker(
    name: str,
    *,
    layout: KvLayout = LAYOUT,
    blocks: int = 64,
    epoch: str = "",
    settings: KvSettings | None = None,
    seed: int | None = None,
    port: int = 0,
    clock: Callable[[], float] = time.monotonic,
    told: Recorder | None = None,
    shared: bool = False,
    certificates: Certificates | None = None,
    tokens: Tokens | None = None,
) -> Worker:
    """A started plane; `seed` fills its pool with random bytes, otherwise they are zeros.
    `shared`: the pool is memory that others may read."""
    size = blocks * layout.block_bytes
    pool: bytearray | mmap.mmap = bytearray(size)
    shared_memory = SharedMemory(size) if shared else None
    if shared_memory is not None:
        pool = shared_memory.mapping
    if seed is not None:
        pool[:] = random.Random(seed).randbytes(size)
    memory = KvMemory(memoryview(pool), layout)
    told = told or Recorder()
    epoch = epoch or f"{name}-epoch-1"
    fd = shared_memory.fd if shared_memory is not None else None
    plane = KvPlane(layout, memory, name, epoch, told, settings, clock, fd, certificates, tokens)
    made = Worker(plane, told, pool, memory, layout, epoch)
    if shared_memory is not None:
        weakref.finalize(made, os.close, shared_memory.fd)
    made.address = await plane.start("127.0.0.1", port)
    return made


@asynccontextmanager
async def pair(
    prefill: KvSettings | None = None,
    decode: KvSettings | None = None,
    *,
    layout: KvLayout = LAYOUT,
    decode_layout: KvLayout | None = None,
    blocks: int = 64,
    shared: bool = False,
    epoch: str = "",
    certificates: tuple[Certificates | None, Certificates | None] = (None, None),
    tokens: tuple[Tokens | None, Tokens | None] = (None, None),
) -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill worker whose pool holds random bytes, and a decode worker. At the end both
    are closed, and every transfer must have ended at both."""
    one = await worker(
        "prefill",
        layout=layout,
        blocks=blocks,
        settings=prefill,
        seed=1,
        shared=shared,
        certificates=certificates[0],
        tokens=tokens[0],
    )
    two = await worker(
        "decode",
        layout=decode_layout or layout,
        blocks=blocks,
        settings=decode,
        epoch=epoch,
        certificates=certificates[1],
        tokens=tokens[1],
    )
    try:
        yield one, two
    finally:
        await one.plane.close()
        await two.plane.close()
    for made in (one, two):
        assert made.plane.open_imports == made.plane.open_exports == 0
        made.told.check_ends()


def target(
    decode: Worker,
    grant: bytes,
    prefix_blocks: int = 0,
    address: str = "",
    transport: str = "",
) -> pb.KvTarget:
    return pb.KvTarget(
        worker="decode",
        epoch=decode.epoch,
        kv_address=address or decode.address,
        layout_hash=decode.layout.layout_hash,
        transport=transport,
        grant=grant,
        prefix_tokens=prefix_blocks * decode.layout.block_tokens,
    )


@dataclass
class Transfer:
    """One transfer's two ends: keys, blocks and sizes."""

    key: RequestKey
    tokens: int
    source: tuple[int, ...]
    destination: tuple[int, ...]
    prefix_blocks: int = 0
    choices: tuple[int, ...] = (0,)

    def open(
        self,
        prefill: Worker,
        decode: Worker,
        address: str = "",
        lease_s: float = 30,
        now: float | None = None,
        transport: str = "",
    ) -> None:
        grant = decode.plane.open_import(
            self.key,
            f"request-{self.key}",
            1,
            self.destination,
            self.prefix_blocks,
            self.choices,
            time.monotonic() if now is None else now,
            token_count=self.tokens,
        )
        prefill.plane.open_export(
            self.key,
            f"request-{self.key}",
            1,
            target(decode, grant, self.prefix_blocks, address, transport),
            self.source,
            self.tokens,
            lease_s,
        )

    def seal(self, prefill: Worker, cached_tokens: int = 0) -> None:
        prefill.plane.seal_export(self.key, first_tokens(*self.choices), cached_tokens)

    def check_bytes(self, prefill: Worker, decode: Worker) -> None:
        skip = self.prefix_blocks
        assert decode.blocks(self.destination[skip:]) == prefill.blocks(self.source[skip:])


def transfer(
    number: int,
    tokens: int,
    *,
    layout: KvLayout = LAYOUT,
    prefix_blocks: int = 0,
    choices: tuple[int, ...] = (0,),
    at: int = 0,
    pool: int = 64,
) -> Transfer:
    """Blocks that are neither in order nor the same at both ends."""
    count = layout.blocks_for(tokens)
    ids = list(range(at, pool))
    random.Random(number).shuffle(ids)
    source = tuple(ids[:count])
    random.Random(number + 1).shuffle(ids)
    return Transfer((1, number), tokens, source, tuple(ids[:count]), prefix_blocks, choices)


def epoch() -> str:
    """Not that of other tests which run at the same time."""
    return str(uuid.uuid4())


async def hand_over(t: Transfer, prefill: Worker, decode: Worker, transport: str = "") -> str:
    """To its end; returns the transport by which decode says that it came."""
    t.open(prefill, decode, transport=transport)
    prefill.plane.export_progress(t.key, t.tokens // 2)
    t.seal(prefill)
    _, _, _, stats = await decode.told.wait("committed", t.key)
    assert (await prefill.told.wait("done", t.key))[2] is True
    t.check_bytes(prefill, decode)
    return str(stats.transport)


async def check_mismatch(
    t: Transfer, prefill: Worker, decode: Worker, named: tuple[str, str]
) -> None:
    """The layouts don't go together: prefill hears it with both named, decode nothing."""
    t.open(prefill, decode)
    t.seal(prefill)
    failure = (await prefill.told.wait("export_failed", t.key))[2]
    assert failure.kind == FailureKind.LAYOUT_MISMATCH
    assert all(words in failure.message for words in named)
    assert decode.told.names(t.key) == []


async def check_flipped_bit(t: Transfer, prefill: Worker, decode: Worker) -> None:
    """A bit of its second frame is flipped on the way: it fails closed, nothing is written."""
    flip = Proxy(decode.address, lambda number, _: Do.FLIP if number == 1 else Do.PASS)
    async with flip as proxy:
        t.open(prefill, decode, address=proxy.address)
        t.seal(prefill)
        failure = (await decode.told.wait("import_failed", t.key))[2]
        assert "checksum" in failure.message
        assert not any(decode.pool)
        await prefill.told.wait_any(("done", "export_failed"), t.key)
