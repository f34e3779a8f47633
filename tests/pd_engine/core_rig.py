"""Engine cores with the real scheduler and the real KV plane over a fake model, for tests."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from pd_engine.assembly import kv_settings
from pd_engine.blocks import BlockPool
from pd_engine.core import EngineCore
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.plane import KvPlane
from pd_engine.metrics import Metrics
from pd_engine.outbox import Outbox
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.settings import parse
from pd_proto.v1 import engine_pb2 as pb
from tests.pd_engine.fake_runner import LAYOUT, FakeRunner

DEADLINE_S = 20.0


class Engine:
    """A core with its plane, and one router's stream to it."""

    def __init__(
        self, role: str, num_blocks: int, chunk_tokens: int, flags: str = "", block_tokens: int = 4
    ) -> None:
        self.name = role
        self.runner = FakeRunner(num_blocks, replace(LAYOUT, block_tokens=block_tokens))
        base = f"--role {role} --model x --served-name m --worker-name {role}-0 --host 127.0.0.1"
        self.settings = parse([*base.split(), *flags.split()])
        config = SchedulerConfig(
            max_batch_tokens=64,
            chunk_tokens=chunk_tokens,
            max_running=16,
            max_queued=16,
            max_model_tokens=4096,
            recompute_max_tokens=4096,
        )
        self.scheduler = Scheduler(config, BlockPool(num_blocks, self.runner.layout.block_tokens))
        metrics = Metrics("m", role, f"{role}-0")
        metrics.follow(self.scheduler.load)
        self.core = EngineCore(self.settings, self.scheduler, self.runner, metrics)
        self.stream, self.outbox = self.core.open_stream()
        self.events: list[pb.Event] = []
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        plane = KvPlane(
            self.runner.layout,
            KvMemory(self.runner.kv_buffer, self.runner.layout),
            self.settings.worker_name,
            f"epoch-{self.name}",
            self.core.callbacks,
            kv_settings(self.settings),
        )
        self.core.kv_address = await plane.start("127.0.0.1", 0)
        self.core.plane = plane
        self._tasks = [
            asyncio.create_task(self.core.run()),
            asyncio.create_task(self._collect(self.outbox)),
        ]

    async def close(self) -> None:
        if self.runner.gate is not None:
            self.runner.gate.release(1000)
        await self.core.stop()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self._tasks)
        assert self.core.plane is not None
        await self.core.plane.close()

    async def _collect(self, outbox: Outbox) -> None:
        while (reply := await outbox.take()) is not None:
            self.events.extend(reply.events)
            self._changed.set()

    def send(self, **command: Any) -> None:
        self.core.handle(self.stream, pb.Command(**command))
        self.core.commands_done()

    async def event_of_failure(self, handle: int) -> pb.Failed:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.events:
                    if event.HasField("failed") and event.failed.handle == handle:
                        return event.failed
                self._changed.clear()
                await self._changed.wait()

    async def event(self, kind: str, handle: int) -> Any:
        """The first event of a kind for a request; fails the test when a failure comes first."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for event in self.events:
                    which = event.WhichOneof("event")
                    message = getattr(event, which)
                    if which in (kind, "failed") and getattr(message, "handle", None) == handle:
                        assert which == kind, f"{handle} failed: {message}"
                        return message
                self._changed.clear()
                await self._changed.wait()

    async def tokens(self, handle: int, choice: int, last_index: int) -> list[int]:
        """A choice's tokens from Tokens events, up to an index; checks that they're contiguous."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = [
                    token
                    for event in self.events
                    for token in event.tokens.tokens
                    if token.handle == handle and token.choice == choice
                ]
                if found and found[-1].index >= last_index:
                    first = found[0].index
                    assert [t.index for t in found] == list(range(first, first + len(found)))
                    return [t.token for t in found]
                self._changed.clear()
                await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a state of the core that no event tells."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """All blocks free or cached, nothing granted, quarantined or active."""
        await self.until(lambda: not self.scheduler.busy and not self.core._live)
        load = self.scheduler.load()
        assert load.kv_free + load.kv_cached == load.kv_blocks == self.runner.num_blocks
        assert load.kv_active == load.kv_granted == load.kv_quarantined == 0

    def hold_steps(self) -> threading.Semaphore:
        self.runner.started.clear()
        self.runner.gate = threading.Semaphore(0)
        return self.runner.gate


def generate(handle: int, prompt: list[int], **changes: Any) -> pb.Generate:
    fields: dict[str, Any] = {
        "handle": handle,
        "id": pb.TransferId(request=f"r{handle}", attempt=1),
        "token_ids": prompt,
        "prompt_tokens": len(prompt),
        "choices": [0],
        "sampling": pb.Sampling(max_tokens=8),
        "deadline_s": 60.0,
        "grant_wait_s": 10.0,
    }
    return pb.Generate(**{**fields, **changes})


def prefill(of: pb.Generate, granted: pb.Granted, **target: Any) -> pb.Prefill:
    fields: dict[str, Any] = {
        "worker": "decode-0",
        "epoch": "epoch-decode",
        "kv_address": granted.kv_address,
        "grant": granted.grant,
        "prefix_tokens": granted.prefix_tokens,
        "transport": "tcp",
    }
    return pb.Prefill(
        handle=of.handle,
        id=of.id,
        token_ids=of.token_ids,
        prompt_tokens=of.prompt_tokens,
        choices=of.choices,
        sampling=of.sampling,
        deadline_s=of.deadline_s,
        target=pb.KvTarget(**{**fields, **target}),
    )


@contextlib.asynccontextmanager
async def pair(
    blocks: int = 64,
    chunk_tokens: int = 6,
    flags: str = "",
    block_tokens: tuple[int, int] = (4, 4),
) -> AsyncIterator[tuple[Engine, Engine]]:
    p = Engine("prefill", blocks, chunk_tokens, flags, block_tokens[0])
    d = Engine("decode", blocks, chunk_tokens, flags, block_tokens[1])
    await p.start()
    await d.start()
    try:
        yield p, d
    finally:
        await p.close()
        await d.close()


async def hand_over(p: Engine, d: Engine, request: pb.Generate) -> pb.Committed:
    d.send(generate=request)
    granted = await d.event("granted", request.handle)
    p.send(prefill=prefill(request, granted))
    await p.event("prefilled", request.handle)
    committed: pb.Committed = await d.event("committed", request.handle)
    return committed
