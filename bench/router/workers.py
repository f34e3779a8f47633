"""Instant workers that speak our protocol: announce themselves, grant, prefill, decode.

`python -m bench.router.workers --model-dir DIR --control HOST:PORT --role prefill --role
decode`. A prompt takes no time; the seal goes to the decode worker as a datagram. A
request's seed is its pace in microseconds a token; one message a step carries what is due
of all requests, as an engine's does, and one that isn't read waits and catches up.
"""

import argparse
import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from bench.router.words import words
from pd_engine.bundle import make_bundle
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc

_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
_SERVER_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 1_000),)
_BLOCKS = 1 << 20
_SHORTEST_STEP_S = 0.001


@dataclass(slots=True)
class Job:
    """A request in decode. Token 0 came from prefill."""

    handle: int
    tokens: int
    step_s: float
    began: float = 0.0
    sent: int = 1


@dataclass(slots=True)
class Stream:
    """One router's work stream: what is to be said on it."""

    events: list[pb.Event] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    granted: dict[int, Job] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def say(self, event: pb.Event) -> None:
        self.events.append(event)
        self.wake.set()

    def step_later(self) -> None:
        """The next step, if anything is to be stepped and none is planned."""
        if self.jobs and self.timer is None:
            step_s = max(min(job.step_s for job in self.jobs.values()), _SHORTEST_STEP_S)
            self.timer = asyncio.get_running_loop().call_later(step_s, self._tick)

    def _tick(self) -> None:
        self.timer = None
        self.wake.set()


class Seals(asyncio.DatagramProtocol):
    """The KV plane of a decode worker: only seals come, each with its grant."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def datagram_received(self, data: bytes, addr: Any) -> None:
        del addr
        self._worker.sealed(data)


class Worker(engine_pb2_grpc.WorkerServicer):
    """See the module."""

    def __init__(self, role: str, name: str, bundle: pb.TokenizerBundle, ids: list[int]) -> None:
        self._role = role
        self._epoch = str(uuid.uuid4())
        self._name = name
        self._bundle = bundle
        self._ids = ids
        self._steps = 0
        self._waiting: dict[bytes, tuple[Stream, int]] = {}
        self._streams: list[Stream] = []
        self._port = 0
        self._kv_address = ""
        self._seals: asyncio.DatagramTransport | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: Seals(self), local_addr=("127.0.0.1", 0)
        )
        self._seals = transport
        self._kv_address = f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        engine_pb2_grpc.add_WorkerServicer_to_server(self, server)
        self._port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._server = server

    # ---- announcing -------------------------------------------------------------------

    async def announce(self, control: str) -> None:
        """Until the process ends."""
        async with grpc.aio.insecure_channel(control) as channel:
            call = engine_pb2_grpc.ControlStub(channel).Announce(wait_for_ready=True)
            await call.write(pb.WorkerReport(hello=self._hello()))
            reader = asyncio.create_task(self._notices(call))
            seq = 0
            while not reader.done():
                seq += 1
                await call.write(pb.WorkerReport(heartbeat=self._heartbeat(seq)))
                await asyncio.wait({reader}, timeout=1.0)
            reader.result()

    async def _notices(self, call: Any) -> None:
        while (notice := await call.read()) is not grpc.aio.EOF:
            if notice.HasField("refusal"):
                raise RuntimeError(notice.refusal.reason)
            if notice.HasField("want_bundle"):
                await call.write(pb.WorkerReport(bundle=self._bundle))

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            worker=self._name,
            epoch=self._epoch,
            role=_ROLES[self._role],
            work_address=f"127.0.0.1:{self._port}",
            kv_address=self._kv_address,
            transports=["tcp"],
            model="bench",
            model_hash="bench",
            kv_format=pb.KvFormat(block_tokens=16, layers=1, block_bytes=1024),
            layout_hash="bench",
            capacity=pb.Capacity(kv_blocks=_BLOCKS, max_model_tokens=1 << 17, max_running=1 << 14),
            bundle_hash=self._bundle.bundle_hash,
            prefill_tokens_per_s=1e9,
        )

    def _heartbeat(self, seq: int) -> pb.Heartbeat:
        running = sum(len(stream.jobs) for stream in self._streams)
        load = pb.Load(
            running=running, kv_blocks=_BLOCKS, kv_free=_BLOCKS, step_s=0.001, steps=self._steps
        )
        return pb.Heartbeat(seq=seq, state=pb.WORKER_STATE_READY, load=load)

    # ---- work -------------------------------------------------------------------------

    async def Work(self, request_iterator: AsyncIterator[pb.WorkRequest], context: Any) -> None:
        await anext(aiter(request_iterator))
        stream = Stream()
        self._streams.append(stream)
        stream.say(pb.Event(bound=pb.Bound(worker_epoch=self._epoch)))
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while not reader.done():
                await stream.wake.wait()
                stream.wake.clear()
                events, stream.events = stream.events, []
                self._step(stream, events)
                if events:
                    self._steps += 1
                    await context.write(pb.WorkReply(events=events))
                stream.step_later()
        finally:
            reader.cancel()
            self._streams.remove(stream)

    def _step(self, stream: Stream, events: list[pb.Event]) -> None:
        """Adds all tokens that are due."""
        if not stream.jobs:
            return
        now, ids, count = time.monotonic(), self._ids, len(self._ids)
        tokens = pb.Tokens()
        add = tokens.tokens.add
        over = []
        for job in stream.jobs.values():
            due = min(job.tokens, 1 + int((now - job.began) / job.step_s))
            for index in range(job.sent, due):
                add(handle=job.handle, index=index, token=ids[index % count])
            job.sent = max(job.sent, due)
            if job.sent >= job.tokens:
                tokens.tokens[-1].finish = pb.FINISH_LENGTH
                over.append(job.handle)
        for handle in over:
            del stream.jobs[handle]
        if tokens.tokens:
            events.append(pb.Event(tokens=tokens))

    async def _read(self, requests: AsyncIterator[pb.WorkRequest], stream: Stream) -> None:
        with contextlib.suppress(grpc.RpcError):
            async for message in requests:
                for command in message.commands:
                    which = command.WhichOneof("command")
                    if which == "generate":
                        self._generate(stream, command.generate)
                    elif which == "prefill":
                        self._prefill(stream, command.prefill)
                    elif which == "cancel":
                        stream.jobs.pop(command.cancel.handle, None)
                        stream.granted.pop(command.cancel.handle, None)
        stream.wake.set()

    def _generate(self, stream: Stream, message: pb.Generate) -> None:
        written = len(message.token_ids) - message.prompt_tokens
        job = Job(message.handle, message.sampling.max_tokens, message.sampling.seed / 1e6)
        job.sent = written + 1
        stream.granted[job.handle] = job
        if message.prefill_here:
            first = [self._first(message)]
            stream.say(pb.Event(prefilled=pb.Prefilled(handle=job.handle, first=first)))
            self._decode(stream, job.handle)
            return
        grant = uuid.uuid4().bytes + written.to_bytes(4)
        self._waiting[grant] = (stream, job.handle)
        stream.say(pb.Event(granted=pb.Granted(handle=job.handle, grant=grant)))

    def _prefill(self, stream: Stream, message: pb.Prefill) -> None:
        prefilled = pb.Prefilled(
            handle=message.handle, first=[self._first(message)], kv_bytes=1024, transport="tcp"
        )
        stream.say(pb.Event(prefilled=prefilled))
        host, _, port = message.target.kv_address.rpartition(":")
        assert self._seals is not None
        self._seals.sendto(message.target.grant, (host, int(port)))

    def sealed(self, grant: bytes) -> None:
        """The KV of a grant has come whole: repeat token 0 and go on."""
        stream, handle = self._waiting.pop(grant, (None, 0))
        if stream is None or handle not in stream.granted:
            return
        index = int.from_bytes(grant[16:])
        first = pb.TokenOut(index=index, token=self._ids[index % len(self._ids)])
        if stream.granted[handle].tokens <= index + 1:
            first.finish = pb.FINISH_LENGTH
        committed = pb.Committed(handle=handle, first=[first], kv_bytes=1024, transport="tcp")
        stream.say(pb.Event(committed=committed))
        self._decode(stream, handle)

    def _decode(self, stream: Stream, handle: int) -> None:
        job = stream.granted.pop(handle)
        if job.sent < job.tokens:
            job.began = time.monotonic() - (job.sent - 1) * job.step_s
            stream.jobs[handle] = job

    def _first(self, message: pb.Generate | pb.Prefill) -> pb.TokenOut:
        index = len(message.token_ids) - message.prompt_tokens
        first = pb.TokenOut(index=index, token=self._ids[index % len(self._ids)])
        if message.sampling.max_tokens <= index + 1:
            first.finish = pb.FINISH_LENGTH
        return first


async def serve(model: Path, control: str, roles: list[str], name: str) -> None:
    bundle = make_bundle(model)
    ids = [number for number, _ in words(model)]
    workers = [Worker(role, f"{name}-{role}", bundle, ids) for role in roles]
    for worker in workers:
        await worker.start()
    print("serving", flush=True)
    await asyncio.gather(*(worker.announce(control) for worker in workers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--name", default="w")
    parser.add_argument("--role", choices=tuple(_ROLES), action="append", required=True)
    given = parser.parse_args()
    uvloop.run(serve(given.model_dir, given.control, given.role, given.name))


if __name__ == "__main__":
    main()
