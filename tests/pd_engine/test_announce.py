"""Covers pd_engine.announce: a router of several processes is told at each of their ports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from pd_core.work import pairs
from pd_engine.announce import Announcer
from pd_engine.metrics import Metrics
from pd_engine.types import Batch, Row
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from tests.pd_engine.stub_core import stub_core

pytestmark = pytest.mark.slow


class Process(engine_pb2_grpc.ControlServicer):
    """One process of a router."""

    def __init__(self, epoch: str = "") -> None:
        self.epoch = epoch
        self.counts: list[int] = []  # of routers, by heartbeat
        self.control_ports: list[int] = []
        self.every_s = 0.05
        self.state = pb.WORKER_STATE_UNSPECIFIED
        self.beat = asyncio.Event()
        self.gone = asyncio.Event()

    async def start(self) -> int:
        self.server = grpc.aio.server()
        engine_pb2_grpc.add_ControlServicer_to_server(self, self.server)
        port = int(self.server.add_insecure_port("127.0.0.1:0"))
        await self.server.start()
        return port

    async def Announce(self, requests: AsyncIterator[pb.WorkerReport], context: Any) -> None:
        hello = await anext(aiter(requests))
        assert hello.hello.worker == "w"
        welcome = pb.Welcome(
            heartbeat_s=self.every_s, control_ports=self.control_ports, router_epoch=self.epoch
        )
        await context.write(pb.RouterNotice(welcome=welcome))
        try:
            async for report in requests:
                assert report.HasField("heartbeat")
                self.counts.append(report.heartbeat.routers)
                self.load = report.heartbeat.load
                self.state = report.heartbeat.state
                self.beat.set()
        finally:
            self.gone.set()


def announcer(port: int) -> Announcer:
    health: Any = SimpleNamespace(registered=False)
    return Announcer(
        stub_core(computed_pairs=7), health, pb.Hello(worker="w"), pb.TokenizerBundle(),
        [f"127.0.0.1:{port}"],
    )  # fmt: skip


def test_attention_is_counted_by_pairs_whatever_the_chunks() -> None:
    """100 tokens in two chunks behind 50 that are cached, and a step of decode."""
    metrics = Metrics("m", "prefill", "w")
    for tokens, start in ((60, 50), (40, 110), (1, 1000)):
        row = Row(0, [0] * tokens, start, [0])
        metrics.step(Batch(0, (row,)), 0.1)
    assert metrics.computed_tokens == 101
    assert metrics.computed_pairs == int(pairs(100, 50) + 1000)


@asynccontextmanager
async def announced_at(*processes: Process) -> AsyncIterator[tuple[Process, ...]]:
    """A worker that finds all of them by the first, which knows their ports."""
    ports = [await process.start() for process in processes]
    processes[0].control_ports = ports
    running = asyncio.create_task(announcer(ports[0]).run())
    try:
        async with asyncio.timeout(20):
            yield processes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for process in processes:
            await process.server.stop(0)


def test_each_process_of_a_router_is_told() -> None:
    async def scenario() -> None:
        async with announced_at(Process(), Process(), Process()) as processes:
            for process in processes:
                await process.beat.wait()
                assert process.load.computed_pairs == 7

    asyncio.run(scenario())


def test_draining_is_told_before_the_next_heartbeat_is_due() -> None:
    async def scenario() -> None:
        slow = Process()
        slow.every_s = 3600.0
        port = await slow.start()
        made = announcer(port)
        running = asyncio.create_task(made.run())
        try:
            async with asyncio.timeout(20):
                await slow.beat.wait()
                assert slow.state == pb.WORKER_STATE_READY
                slow.beat.clear()
                made._core.draining = True
                await made.tell_draining(10.0)
                await slow.beat.wait()
                assert slow.state == pb.WORKER_STATE_DRAINING
                await slow.server.stop(0)
                await slow.gone.wait()
                await made.tell_draining(0.0)  # nobody is waited for who doesn't listen
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())


def test_a_heartbeat_that_fails_is_told_and_the_worker_announces_itself_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        router = Process()
        port = await router.start()
        made = announcer(port)
        right, made._core.step_median_s = made._core.step_median_s, lambda: 1 / 0
        running = asyncio.create_task(made.run())
        try:
            async with asyncio.timeout(20):
                await router.gone.wait()
                assert "ZeroDivisionError" in caplog.text
                made._core.step_median_s = right
                await router.beat.wait()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await router.server.stop(0)

    asyncio.run(scenario())


def test_heartbeats_say_how_many_routers_there_are() -> None:
    """Each counts once, whatever addresses it has; one that goes is counted no more."""

    async def scenario() -> None:
        async with announced_at(Process("a"), Process("a"), Process("b")) as (first, _, third):

            async def told(number: int) -> None:
                while first.counts[-1:] != [number]:
                    first.beat.clear()
                    await first.beat.wait()

            await told(2)
            await third.server.stop(0)
            await told(1)

    asyncio.run(scenario())
