"""A worker that speaks the protocol over real gRPC and "computes" a deterministic model.

Token i of choice c of a prompt is `model_token(prompt, c, i)`, whoever computes it, so a
resumed request must go on exactly. KV moves through `FakeKv`, a dict in this process.
Faults are commanded: `die`, `freeze`/`thaw` (as SIGSTOP: sockets stay open), `gates` that
hold a stage, `fail_next`, `drop_prefilled`, `drain`.
"""

import asyncio
import contextlib
import itertools
import uuid
import zlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from pd_core.failures import Failure, FailureKind
from pd_core.identity import Part
from pd_core.kv import prefix_hashes
from pd_proto import tls
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc

MODEL = "fake"
BLOCK_TOKENS = 4
VOCABULARY = 1000
_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}
_SERVER_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 1_000),)


def model_token(prompt: Sequence[int], choice: int, index: int) -> int:
    """The deterministic model."""
    return zlib.crc32(repr((tuple(prompt), choice, index)).encode()) % VOCABULARY


@dataclass
class FakeKv:
    """Stands for the KV plane: who waits for which grant."""

    waiting: dict[bytes, tuple["FakeWorker", "Job"]] = field(default_factory=dict)
    pulls: dict[bytes, tuple["FakeWorker", "_Stream", Any]] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(1))


@dataclass
class Job:
    """One handle on one stream."""

    stream: "_Stream"
    handle: int
    message: Any
    mode: str  # local, export, import
    grant: bytes = b""
    next_index: int = 0
    decoding: bool = False
    open_choices: set[int] = field(default_factory=set)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.message.token_ids[: self.message.prompt_tokens])


@dataclass
class _Stream:
    replies: asyncio.Queue[pb.Event | None] = field(default_factory=asyncio.Queue)
    jobs: dict[int, Job] = field(default_factory=dict)
    copies: set[int] = field(default_factory=set)


@dataclass
class Seen:
    """What came in, for assertions."""

    generates: list[Any] = field(default_factory=list)
    prefills: list[Any] = field(default_factory=list)
    pulls: list[Any] = field(default_factory=list)
    shares: list[Any] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    renewed: set[int] = field(default_factory=set)
    messages: int = 0


class FakeWorker(engine_pb2_grpc.WorkerServicer):
    """See the module."""

    def __init__(
        self,
        role: str,
        name: str,
        kv: FakeKv,
        *,
        step_s: float = 0.002,
        kv_blocks: int = 1000,
        max_model_tokens: int = 2000,
        layout_hash: str = "layout",
        model_hash: str = "model",
        revision: str = "r1",
        model: str = MODEL,
        tokens_per_s: float = 1e6,
        certificates: tls.Certificates | None = None,
    ) -> None:
        self.role = role
        self.name = name
        self.epoch = str(uuid.uuid4())
        self.kv = kv
        self.step_s = step_s
        self.kv_blocks = kv_blocks
        self.max_model_tokens = max_model_tokens
        self.layout_hash = layout_hash
        self.model_hash = model_hash
        self.revision = revision
        self.model = model
        self.tokens_per_s = tokens_per_s
        self.certificates = certificates
        self.seen = Seen()
        self.state = pb.WORKER_STATE_READY
        self.fail_next: dict[str, deque[Failure]] = {}  # by stage: generate, prefill, decode
        self.gates: dict[str, asyncio.Event] = {}  # by stage: grant, prefill, commit, decode
        self.drop_prefilled = False
        self.eos_at: int | None = None
        self.holds: set[bytes] = set()  # blocks that no router has heard of
        self.silent = False  # takes commands and steps no more, but its heartbeats go on
        self.refusals: list[str] = []
        self.load = pb.Load(kv_blocks=kv_blocks, kv_free=kv_blocks)
        self.running = asyncio.Event()  # cleared: frozen
        self.running.set()
        self._streams: list[_Stream] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._reset = True
        self.steps = 0
        self.gained: list[bytes] = []  # prefix hashes for the next heartbeat
        self.bundle_hash = "bundle-1"
        self.answers_as = self.epoch
        self.binds = 0
        self._announcing: asyncio.Task[None] | None = None
        self.counts_routers = True  # older ones don't
        self.altered = False  # KV came quantized
        self.announced_at = 0
        self.port = 0

    # ---- life ---------------------------------------------------------------------------

    async def start(self, control: str, port: int = 0) -> "FakeWorker":
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        engine_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = tls.listen(self.certificates, self._server, f"127.0.0.1:{port}")
        await self._server.start()
        self.announce_to(control)
        self._spawn(self._step_loop())
        return self

    def announce_to(self, control: str) -> None:
        self._announcing = self._spawn(self._announce(control))

    def stop_announcing(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()

    def cut_streams(self) -> None:
        """All work streams end."""
        for stream in self._streams:
            stream.replies.put_nowait(None)

    async def die(self) -> None:
        """As kill -9: all sockets close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
        for grant in [g for g, (worker, _) in self.kv.waiting.items() if worker is self]:
            del self.kv.waiting[grant]

    def freeze(self) -> None:
        """As SIGSTOP."""
        self.running.clear()

    def thaw(self) -> None:
        self.running.set()

    def gate(self, stage: str) -> asyncio.Event:
        """Holds a stage until the event is set."""
        return self.gates.setdefault(stage, asyncio.Event())

    def fail(self, stage: str, kind: FailureKind, message: str = "as told", times: int = 1) -> None:
        queue = self.fail_next.setdefault(stage, deque())
        queue.extend(Failure(kind, message) for _ in range(times))

    @property
    def held(self) -> int:
        """Handles that hold something here."""
        return sum(len(stream.jobs) + len(stream.copies) for stream in self._streams)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pass(self, stage: str) -> None:
        gate = self.gates.get(stage)
        if gate is not None:
            await gate.wait()
        await self.running.wait()

    # ---- announcing ------------------------------------------------------------------------

    def hello(self) -> pb.Hello:
        return pb.Hello(
            worker=self.name,
            epoch=self.epoch,
            role=_ROLES[self.role],
            work_address=f"127.0.0.1:{self.port}",
            kv_address=f"kv-of-{self.name}",
            transports=["tcp"],
            model=self.model,
            model_hash=self.model_hash,
            kv_format=pb.KvFormat(block_tokens=BLOCK_TOKENS),
            layout_hash=self.layout_hash,
            capacity=pb.Capacity(kv_blocks=self.kv_blocks, max_model_tokens=self.max_model_tokens),
            bundle_hash=self.bundle_hash,
            revision=self.revision,
            prefill_tokens_per_s=self.tokens_per_s,
            product="NVIDIA H100 PCIe",
            shares_prefixes=True,
        )

    async def _announce(self, control: str) -> None:
        while True:
            try:
                await self._announce_once(control)
            except grpc.aio.AioRpcError as error:
                self.refusals.append(str(error.details()))
            except asyncio.InvalidStateError:
                pass
            await asyncio.sleep(0.05)

    async def _announce_once(self, control: str) -> None:
        async with tls.dial(self.certificates, control, Part.ROUTER, ()) as channel:
            call = engine_pb2_grpc.ControlStub(channel).Announce()
            await call.write(pb.WorkerReport(hello=self.hello()))
            welcome = await call.read()
            if welcome is grpc.aio.EOF or not welcome.HasField("welcome"):
                if welcome is not grpc.aio.EOF:
                    self.refusals.append(welcome.refusal.reason)
                return
            self._reset = True
            self.announced_at += 1
            notices = asyncio.create_task(self._notices(call))
            try:
                while True:
                    await self.running.wait()
                    await call.write(pb.WorkerReport(heartbeat=self._heartbeat()))
                    await asyncio.sleep(welcome.welcome.heartbeat_s)
            finally:
                self.announced_at -= 1
                notices.cancel()
                await asyncio.gather(notices, return_exceptions=True)

    async def _notices(self, call: Any) -> None:
        while (notice := await call.read()) is not grpc.aio.EOF:
            if notice.HasField("want_bundle"):
                await call.write(pb.WorkerReport(bundle=self.bundle()))

    def bundle(self) -> pb.TokenizerBundle:
        return pb.TokenizerBundle(bundle_hash=self.bundle_hash, tokenizer_json=b"{}")

    def _heartbeat(self) -> pb.Heartbeat:
        jobs = [job for stream in self._streams for job in stream.jobs.values()]
        self.load.running = sum(job.decoding for job in jobs)
        self.load.queued = len(jobs) - self.load.running
        self.load.steps = self.steps
        reset, self._reset = self._reset, False
        gained, self.gained = self.gained, []
        return pb.Heartbeat(
            state=self.state,
            load=self.load,
            prefix_reset=reset,
            prefix_gained=gained,
            routers=self.announced_at if self.counts_routers else 0,
            altered=self.altered,
        )

    def known_prefix(self, tokens: Sequence[int]) -> list[bytes]:
        return list(prefix_hashes(tokens, BLOCK_TOKENS))

    # ---- the work stream -----------------------------------------------------------------

    async def Work(self, request_iterator: AsyncIterator[pb.WorkRequest], context: Any) -> None:
        first = await anext(aiter(request_iterator))
        self.binds += 1
        if first.commands[0].bind.worker_epoch != self.answers_as:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "somebody else")
        stream = _Stream()
        self._streams.append(stream)
        stream.replies.put_nowait(pb.Event(bound=pb.Bound(worker_epoch=self.epoch)))
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (event := await stream.replies.get()) is not None:
                await self.running.wait()
                events = [event]
                while not stream.replies.empty():
                    following = stream.replies.get_nowait()
                    if following is None:
                        return
                    events.append(following)
                await context.write(pb.WorkReply(events=events))
        finally:
            reader.cancel()
            for job in list(stream.jobs.values()):
                self._drop(job)
            self._streams.remove(stream)

    async def _read(self, requests: AsyncIterator[pb.WorkRequest], stream: _Stream) -> None:
        with contextlib.suppress(grpc.RpcError):
            async for message in requests:
                await self.running.wait()
                self.seen.messages += 1
                for command in message.commands:
                    self._command(stream, command)
        stream.replies.put_nowait(None)

    def _command(self, stream: _Stream, command: pb.Command) -> None:
        match command.WhichOneof("command"):
            case "generate":
                self.seen.generates.append(command.generate)
                mode = "local" if command.generate.prefill_here else "import"
                self._begin(stream, command.generate, mode)
            case "prefill":
                self.seen.prefills.append(command.prefill)
                self._begin(stream, command.prefill, "export")
            case "cancel":
                self.seen.cancels.append(command.cancel.handle)
                job = stream.jobs.get(command.cancel.handle)
                if job is not None:
                    self._drop(job)
                stream.copies.discard(command.cancel.handle)
            case "pull":
                self.seen.pulls.append(command.pull)
                stream.copies.add(command.pull.handle)
                self._spawn(self._pull(stream, command.pull))
            case "share":
                self.seen.shares.append(command.share)
                stream.copies.add(command.share.handle)
                self._spawn(self._share(stream, command.share))
            case "renew":
                self.seen.renewed.update(command.renew.handles)

    def _begin(self, stream: _Stream, message: Any, mode: str) -> None:
        job = Job(stream, message.handle, message, mode)
        job.next_index = len(message.token_ids) - message.prompt_tokens
        job.open_choices = set(message.choices)
        emitted = message.token_ids[message.prompt_tokens :]
        for index, token in enumerate(emitted):
            assert token == model_token(job.prompt, message.choices[0], index), "wrong resumption"
        if self._told_to_fail(job, "prefill" if mode == "export" else "generate"):
            return
        stream.jobs[message.handle] = job
        self._spawn(self._grant(job) if mode == "import" else self._prefill(job))

    def _told_to_fail(self, job: Job, stage: str) -> bool:
        queue = self.fail_next.get(stage)
        if not queue:
            return False
        failure = queue.popleft()
        self._drop(job)
        failed = pb.Failed(handle=job.handle, kind=failure.kind.value, message=failure.message)
        job.stream.replies.put_nowait(pb.Event(failed=failed))
        return True

    def _drop(self, job: Job) -> None:
        job.stream.jobs.pop(job.handle, None)
        self.kv.waiting.pop(job.grant, None)

    def _gone(self, job: Job) -> bool:
        return job.stream.jobs.get(job.handle) is not job

    async def _grant(self, job: Job) -> None:
        await self._pass("grant")
        if self._gone(job):
            return
        job.grant = f"grant-{next(self.kv.numbers)}".encode()
        self.kv.waiting[job.grant] = (self, job)
        granted = pb.Granted(handle=job.handle, grant=job.grant, wait_s=0.001)
        job.stream.replies.put_nowait(pb.Event(granted=granted))

    async def _pull(self, stream: _Stream, message: pb.Pull) -> None:
        await self._pass("pull")
        if self._refused("pull", stream, message.handle):
            return
        if self._had(message) == len(message.hashes):
            stream.copies.discard(message.handle)
            cached = len(message.hashes) * BLOCK_TOKENS
            done = pb.Committed(handle=message.handle, cached_tokens=cached)
            stream.replies.put_nowait(pb.Event(committed=done))
            return
        grant = f"pull-{next(self.kv.numbers)}".encode()
        self.kv.pulls[grant] = (self, stream, message)
        granted = pb.Granted(handle=message.handle, grant=grant)
        stream.replies.put_nowait(pb.Event(granted=granted))

    async def _share(self, stream: _Stream, message: pb.Share) -> None:
        await self._pass("share")
        if self._refused("share", stream, message.handle):
            return
        stream.copies.discard(message.handle)
        waiting = self.kv.pulls.pop(message.target.grant, None)
        if waiting is None:
            return
        target, its_stream, asked = waiting
        if asked.handle in its_stream.copies:
            its_stream.copies.discard(asked.handle)
            target.gained += asked.hashes
            done = pb.Committed(
                handle=asked.handle,
                kv_bytes=1 << 20,
                transfer_s=0.001,
                cached_tokens=target._had(asked) * BLOCK_TOKENS,
            )
            its_stream.replies.put_nowait(pb.Event(committed=done))

    def _had(self, message: pb.Pull) -> int:
        """How many blocks of a copy are here."""
        return len(list(itertools.takewhile(self.holds.__contains__, message.hashes)))

    def _refused(self, stage: str, stream: _Stream, handle: int) -> bool:
        """Cancelled meanwhile, or told to fail."""
        if handle not in stream.copies:
            return True
        queue = self.fail_next.get(stage)
        if not queue:
            return False
        failure = queue.popleft()
        stream.copies.discard(handle)
        failed = pb.Failed(handle=handle, kind=failure.kind.value, message=failure.message)
        stream.replies.put_nowait(pb.Event(failed=failed))
        return True

    async def _prefill(self, job: Job) -> None:
        await self._pass("prefill")
        await asyncio.sleep(self.step_s)
        if self._gone(job) or self.silent:
            return
        self.steps += 1
        first = [self._token(job, choice) for choice in job.message.choices]
        if job.mode == "export" and not self.drop_prefilled:
            self._say_prefilled(job, first, "tcp")
        if job.mode == "export":
            # The seal follows token 0, as in the engine.
            await self._pass("seal")
            if not self._told_to_fail(job, "seal"):
                self._seal(job.message.target.grant, first)
                self._drop(job)
        else:
            self._say_prefilled(job, first, "")
            self._decode_from(job, first)

    def _say_prefilled(self, job: Job, first: list[pb.TokenOut], transport: str) -> None:
        prefilled = pb.Prefilled(
            handle=job.handle, first=first, prefill_s=0.001, queue_s=0.0005, transport=transport
        )
        job.stream.replies.put_nowait(pb.Event(prefilled=prefilled))

    def _seal(self, grant: bytes, first: list[pb.TokenOut]) -> None:
        waiting = self.kv.waiting.pop(grant, None)
        if waiting is not None:
            worker, job = waiting
            worker._spawn(worker._commit(job, first))

    async def _commit(self, job: Job, first: list[pb.TokenOut]) -> None:
        await self._pass("commit")
        if self._gone(job) or self._told_to_fail(job, "commit"):
            return
        committed = pb.Committed(
            handle=job.handle, first=first, kv_bytes=4096, transfer_s=0.001, transport="tcp"
        )
        job.stream.replies.put_nowait(pb.Event(committed=committed))
        self._decode_from(job, first)

    def _decode_from(self, job: Job, first: list[pb.TokenOut]) -> None:
        job.open_choices = {out.choice for out in first if not out.finish}
        job.next_index += 1
        job.decoding = True
        if not job.open_choices:
            self._drop(job)

    def _token(self, job: Job, choice: int, handle: int = 0) -> pb.TokenOut:
        index = job.next_index
        finish = pb.FINISH_UNSPECIFIED
        if index == self.eos_at:
            finish = pb.FINISH_STOP
        elif index + 1 == job.message.sampling.max_tokens:
            finish = pb.FINISH_LENGTH
        token = model_token(job.prompt, choice, index)
        return pb.TokenOut(handle=handle, choice=choice, index=index, token=token, finish=finish)

    async def _step_loop(self) -> None:
        """One step a `step_s`: the next token of everything that decodes."""
        while True:
            await asyncio.sleep(self.step_s)
            await self._pass("decode")
            if self.silent:
                continue
            for stream in self._streams:
                tokens = [
                    out
                    for job in list(stream.jobs.values())
                    if job.decoding and not self._told_to_fail(job, "decode")
                    for out in self._step(job)
                ]
                if tokens:
                    self.steps += 1
                    stream.replies.put_nowait(pb.Event(tokens=pb.Tokens(tokens=tokens)))

    def _step(self, job: Job) -> list[pb.TokenOut]:
        tokens = [self._token(job, choice, job.handle) for choice in sorted(job.open_choices)]
        job.next_index += 1
        job.open_choices -= {out.choice for out in tokens if out.finish}
        if not job.open_choices:
            self._drop(job)
        return tokens
