"""One long-lived work stream to one worker process.

Commands that are pending are written as one message. Events go straight to the handler
of their request: no task, queue or future a token. The stream is dialled anew, with
back-off, until `close`; whenever it breaks, the requests on it are WORKER_LOST.
"""

import asyncio
import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from pd_core.failures import Failure, FailureKind
from pd_core.identity import Part
from pd_core.proof import Purpose
from pd_proto import tls
from pd_proto.tokens import Tokens
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from pd_router import wire
from pd_router.fleet import WorkerId

log = logging.getLogger("pd_router.link")

MAX_MESSAGE_BYTES = 64 << 20
_BIND_DEADLINE_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_BATCH_COMMANDS = 512
_BATCH_BYTES = 8 << 20
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a FIN is noticed within ten seconds.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

_handles = itertools.count(1)
"""Unique in the process, so also on each stream, however often it is dialled anew."""


class Handler(Protocol):
    """Who gets a request's events. Called in the event loop; must not block or raise."""

    def granted(self, event: pb.Granted, now: float) -> None: ...

    def prefilled(self, event: pb.Prefilled, now: float) -> None: ...

    def committed(self, event: pb.Committed, now: float) -> None: ...

    def token(self, out: pb.TokenOut, now: float) -> None: ...

    def failed(self, failure: Failure, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """How this router names itself to workers."""

    name: str
    epoch: str


@dataclass(frozen=True, slots=True)
class LinkCallbacks:
    """`changed` after the stream was bound or lost; `moved` with each message of events."""

    changed: Callable[[], None]
    moved: Callable[[float], None]


class Link:
    """See the module. One for each (address, epoch)."""

    def __init__(
        self,
        worker: WorkerId,
        address: str,
        router: RouterIdentity,
        callbacks: LinkCallbacks,
        certificates: tls.Certificates | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.worker = worker
        self.address = address
        self.bound = False
        self._router = router
        self._callbacks = callbacks
        self._certificates = certificates
        self._tokens = tokens
        self._handlers: dict[int, Handler] = {}
        self._pending: deque[pb.Command] = deque()
        self._wake = asyncio.Event()
        self._renewing = False
        self._task: asyncio.Task[None] | None = None

    # ---- for the owner ---------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_dialled(), name=f"link {self.worker.name}")

    async def close(self, reason: str) -> None:
        """Ends the stream; its requests are WORKER_LOST."""
        self._lose(reason)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def live(self) -> int:
        """Requests with an open side here."""
        return len(self._handlers)

    @property
    def commands_waiting(self) -> int:
        """Commands that the worker hasn't taken yet."""
        return len(self._pending)

    def open(self, handler: Handler) -> int | None:
        """A handle whose events go to `handler`; None while the stream is down."""
        if not self.bound:
            return None
        handle = next(_handles)
        self._handlers[handle] = handler
        return handle

    def send(self, command: pb.Command) -> None:
        """Queues a command. Without a stream there is nobody to tell."""
        if self.bound:
            self._pending.append(command)
            self._wake.set()

    def release(self, handle: int, *, cancel: bool) -> None:
        """No more events of this handle; `cancel` tells the worker."""
        if self._handlers.pop(handle, None) is not None and cancel:
            self.send(wire.cancel_to_pb(handle))

    def renew(self) -> None:
        """Keeps the leases of all live handles. Not twice while the worker doesn't read."""
        if self._handlers and not self._renewing:
            self._renewing = True
            self.send(wire.renew_to_pb(self._handlers))

    def fail_over(self, failure: Failure) -> None:
        """Every request here is told that this worker is no good."""
        now = time.monotonic()
        for handle, handler in list(self._handlers.items()):
            if handle in self._handlers:
                handler.failed(failure, now)
                self._handlers.pop(handle, None)

    # ---- the stream --------------------------------------------------------------------

    async def _keep_dialled(self) -> None:
        pause_s = _FIRST_PAUSE_S
        said = ""
        while True:
            began = time.monotonic()
            reason = await self._dial()
            if self.bound:
                log.warning("worker=%s work stream lost: %s", self.worker.name, reason)
            elif reason != said:
                log.warning("worker=%s no work stream: %s", self.worker.name, reason)
            said = reason
            self._lose(reason)
            if time.monotonic() - began > _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _dial(self) -> str:
        """Serves one stream; returns why it ended."""
        async with tls.dial(self._certificates, self.address, Part.WORKER, _OPTIONS) as channel:
            call = engine_pb2_grpc.WorkerStub(channel).Work()
            try:
                async with asyncio.timeout(_BIND_DEADLINE_S):
                    refusal = await self._bind(call)
                return refusal or await self._serve(call)
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"
            except TimeoutError:
                return f"no Bound within {_BIND_DEADLINE_S:g} s"
            except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
                return f"the call ended while it was written to: {error}"
            except asyncio.CancelledError:
                # grpc.aio raises it for a call that the writer gave up as well.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return "the stream cannot be written to"
            finally:
                call.cancel()

    async def _bind(self, call: Any) -> str | None:
        proof = await self._tokens.answer(Purpose.WORK, call) if self._tokens else None
        if isinstance(proof, str):
            return proof
        bind = pb.Bind(
            router=self._router.name,
            router_epoch=self._router.epoch,
            worker_epoch=self.worker.epoch,
            proof=proof.given if proof is not None else b"",
        )
        await call.write(pb.WorkRequest(commands=[pb.Command(bind=bind)]))
        reply = await call.read()
        if reply is grpc.aio.EOF:
            return f"{await call.code()}: {await call.details()}"
        if not reply.events or reply.events[0].WhichOneof("event") != "bound":
            return "the first event is not Bound"
        bound = reply.events[0].bound
        if proof is not None and (why := proof.stranger(bound.confirmation)):
            return why
        epoch = bound.worker_epoch
        if epoch != self.worker.epoch:
            return f"epoch {epoch} answers at {self.address}, not {self.worker.epoch}"
        return None

    async def _serve(self, call: Any) -> str:
        log.info("worker=%s address=%s work stream bound", self.worker.name, self.address)
        self._pending.clear()
        self._renewing = False
        self.bound = True
        self._callbacks.changed()
        writer = asyncio.create_task(self._write(call))
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                self._dispatch(reply)
            return "the worker ended the stream"
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._pending:
                    await call.write(pb.WorkRequest(commands=self._next_batch()))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            # The reader sees the end too and says why; it must not wait for it for ever.
            log.info("worker=%s cannot be written to: %s", self.worker.name, error)
            call.cancel()

    def _next_batch(self) -> list[pb.Command]:
        """What is pending, as far as one message should hold."""
        batch: list[pb.Command] = []
        size = 0
        while self._pending and len(batch) < _BATCH_COMMANDS and size < _BATCH_BYTES:
            command = self._pending.popleft()
            size += command.ByteSize()
            if command.WhichOneof("command") == "renew":
                self._renewing = False
            batch.append(command)
        return batch

    def _dispatch(self, reply: pb.WorkReply) -> None:
        now = time.monotonic()
        self._callbacks.moved(now)
        handlers = self._handlers
        for event in reply.events:
            which = event.WhichOneof("event")
            if which == "tokens":
                for out in event.tokens.tokens:
                    handler = handlers.get(out.handle)
                    if handler is not None:
                        handler.token(out, now)
            elif which is not None and which != "bound":
                self._dispatch_one(which, getattr(event, which), now)

    def _dispatch_one(self, which: str, event: Any, now: float) -> None:
        handler = self._handlers.get(event.handle)
        if handler is None:
            return  # cancelled here; the worker hadn't heard of it yet
        if which == "granted":
            handler.granted(event, now)
        elif which == "prefilled":
            handler.prefilled(event, now)
        elif which == "committed":
            handler.committed(event, now)
        elif which == "failed":
            handler.failed(Failure.from_wire(event.kind, event.message), now)
            self._handlers.pop(event.handle, None)

    def _lose(self, reason: str) -> None:
        was_bound, self.bound = self.bound, False
        self._pending.clear()
        if was_bound:
            self._callbacks.changed()
        name = self.worker.name
        self.fail_over(Failure(FailureKind.WORKER_LOST, f"worker {name} is gone: {reason}"))
