"""The decode worker's listening side: frames in, payload into the pool, verdicts out.

One task a connection. Only that task receives, so "the receive has returned" is a
place in its code: `_payload`, where `push_end` is called whatever happened.
"""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvLayout
from pd_engine.imports import Accept, ImportAction, Imports, Reject
from pd_engine.kv import frames, tcp
from pd_engine.kv.codec import Codec, Misfit
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.transport import Taker, Transport, Unreachable
from pd_engine.transfer import AbortHead, PushHead, SealHead, Verdict

log = logging.getLogger(__name__)

_GONE = (OSError, tcp.ConnectionEnded, frames.FrameError, TimeoutError)


@dataclass(frozen=True, slots=True)
class ReceiverSettings:
    """Bounds of what peers can make us hold. Times in seconds."""

    max_connections: int = 256
    handshake_s: float = 5.0
    reply_s: float = 5.0  # for the peer to take a reply
    idle_s: float = 300.0  # longer than senders keep an idle connection
    linger_s: float = 1.0  # for the peer to read the last verdict
    close_s: float = 10.0  # for receives to be over when the worker ends


class KvReceiver:
    """Accepts senders and drives Imports with what they send."""

    def __init__(
        self,
        imports: Imports,
        memory: KvMemory,
        worker: str,
        epoch: str,
        apply: Callable[[Sequence[ImportAction]], None],
        clock: Callable[[], float],
        settings: ReceiverSettings,
        transports: Mapping[str, Transport],
        refused: str = "",
    ) -> None:
        """`refused`: why connections by tcp are turned away, if they are."""
        self.imports = imports
        self.memory = memory
        self.worker = worker
        self.epoch = epoch
        self.apply = apply
        self.clock = clock
        self.settings = settings
        self.refused = refused
        self.transports = transports
        self._numbers = itertools.count(1)
        self._connections: dict[int, _Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._codec: Codec | None = None
        self._socks: list[socket.socket] = []

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    def codec(self) -> Codec:
        """Made when the first frame comes that isn't our blocks' bytes."""
        if self._codec is None:
            self._codec = Codec(self.memory)
        return self._codec

    async def start(self, host: str, port: int) -> str:
        """Returns the bound address (of tcp, which is always there: it also says no)."""
        address = ""
        for transport in self.transports.values():
            sock = await transport.listen(host, port, self.epoch)
            if sock is None:
                continue
            self._socks.append(sock)
            self._spawn(self._accept(sock, transport))
            if transport.name == "tcp":
                bound = sock.getsockname()
                address = tcp.join_address(bound[0], bound[1])
        return address

    def transport_of(self, number: int) -> str:
        """By which a connection came; "" when it has gone."""
        connection = self._connections.get(number)
        return connection.transport.name if connection is not None else ""

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self.settings.close_s)
        for sock in self._socks:
            sock.close()
        self._socks.clear()

    def answer(self, number: int, verdict: Verdict, close: bool) -> None:
        """Send a verdict on a connection, if it still is."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.answer(verdict, close)

    def tick(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if now - connection.active_at >= self.settings.idle_s:
                connection.end()

    async def _accept(self, listening: socket.socket, transport: Transport) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listening)
            except OSError as e:
                # Out of descriptors, or a peer that left in between: the listener lives on.
                log.warning("KV plane: accept failed: %s", e)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= self.settings.max_connections:
                log.warning("KV plane: refused a connection, %d are open", len(self._connections))
                sock.close()
                continue
            sock.setblocking(False)
            self._serve(sock, _named(peer), transport)

    def _serve(self, sock: socket.socket, peer: str, transport: Transport) -> None:
        connection = _Connection(self, next(self._numbers), sock, peer, transport)
        self._connections[connection.number] = connection
        connection.task = self._spawn(connection.run())

        def ended(_: asyncio.Task[None]) -> None:
            # Here, since a task that is cancelled before its first step runs no code at all.
            self._connections.pop(connection.number, None)
            connection.close()

        connection.task.add_done_callback(ended)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Connection:
    """One accepted connection."""

    def __init__(
        self,
        receiver: KvReceiver,
        number: int,
        sock: socket.socket,
        peer: str,
        transport: Transport,
    ) -> None:
        self.number = number
        self.transport = transport
        self.task: asyncio.Task[None] | None = None
        self.active_at = receiver.clock()
        self._receiver = receiver
        self._sock = sock
        self._peer = peer
        self._taker: Taker | None = None
        self._sender = receiver.memory.layout
        self._outbox: list[Verdict] = []
        self._ending = False
        self._scratch = memoryview(bytearray(tcp.BATCH_BYTES))

    def answer(self, verdict: Verdict, close: bool) -> None:
        """Called by this connection's own task, or (then always to close) by another."""
        if self._ending:
            return
        self._outbox.append(verdict)
        if close:
            self.end()

    def end(self) -> None:
        """Stop receiving, now; what is in the outbox is still sent."""
        self._ending = True
        if self.task is not None and asyncio.current_task() is not self.task:
            self.task.cancel()

    def close(self) -> None:
        """Its task is over: nothing is received any more."""
        self._sock.close()
        if self._taker is not None:
            self._taker.close()

    async def run(self) -> None:
        receiver = self._receiver
        try:
            await self._serve()
        except _GONE as e:
            log.debug("KV connection %d: %s", self.number, e)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._ending or task is None:
                raise
            task.uncancel()
        except Exception:
            log.exception("KV connection %d", self.number)
        finally:
            receiver.apply(receiver.imports.connection_closed(self.number))
        if self._ending:
            with contextlib.suppress(*_GONE):
                await self._farewell()

    async def _serve(self) -> None:
        async with asyncio.timeout(self._receiver.settings.handshake_s):
            if not await self._handshake():
                return
        while not self._ending:
            frame = frames.parse_frame(await tcp.receive_message(self._sock))
            self.active_at = self._receiver.clock()
            await self._take(frame)
            await self._flush()
            # A full socket never makes us wait, so give the loop's others their turn.
            await asyncio.sleep(0)

    async def _handshake(self) -> bool:
        receiver = self._receiver
        try:
            self._sock, self._taker = await self.transport.greet(self._sock)
        except OSError as e:
            log.warning("KV plane: refused %s: %s", self._peer, e)
            raise
        hello = frames.parse_frame(await tcp.receive_message(self._sock))
        if not isinstance(hello, frames.Hello):
            raise frames.FrameError("the first frame is no hello")
        failure = frames.refuse(hello, receiver.worker, receiver.epoch, receiver.memory.layout)
        if failure is None:
            await self._settle(hello)
            if receiver.refused and self.transport.name == "tcp":
                failure = Failure(FailureKind.TRANSFER_FAILED, receiver.refused)
        if failure is not None:
            log.warning("KV plane: refused: %s", failure.message)
            await self._send(frames.Refusal(failure))
            self._ending = True
            return False
        settled = self.transport.name if hello.region is not None else ""
        self._sender = KvLayout.of(hello.form)
        self._taker.open(self._sender)
        if not receiver.memory.layout.same_bytes(self._sender):
            log.info("KV of %s is converted: it is %s", hello.worker, self._sender.describe())
        await self._send(frames.Welcome(receiver.epoch, settled))
        return True

    async def _settle(self, hello: frames.Hello) -> None:
        """By which transport pushes come: a region that we can read takes the place of tcp."""
        offered = self._receiver.transports.get(hello.transport)
        if hello.region is None or offered is None or self.transport.name != "tcp":
            return
        try:
            self._taker = await offered.admit(hello.epoch, hello.region)
            self.transport = offered
        except Unreachable as e:
            log.warning("KV plane: %s can't come by %s: %s", hello.worker, offered.name, e)

    async def _take(self, frame: frames.Frame) -> None:
        receiver = self._receiver
        now = receiver.clock()
        match frame:
            case PushHead():
                begun = receiver.imports.push_begin(self.number, frame, now, self._sender)
                if isinstance(begun, Reject):
                    receiver.apply(begun.actions)
                else:
                    await self._payload(frame, begun)
            case SealHead():
                receiver.apply(receiver.imports.seal(self.number, frame, now))
            case AbortHead():
                receiver.apply(receiver.imports.abort(self.number, frame))
            case frames.Hello():
                raise frames.FrameError("a second hello")

    async def _payload(self, head: PushHead, accept: Accept) -> None:
        receiver = self._receiver
        checksum, misfit = None, ""
        assert self._taker is not None
        try:
            if head.quantization or not receiver.memory.layout.same_bytes(self._sender):
                checksum = await self._decoded(self._taker, head, accept)
            else:
                slices = receiver.memory.slices(
                    accept.block_ids, accept.layer_start, accept.layer_count
                )
                checksum = await self._taker.take(
                    self._sock, head, slices, self._scratch, self._progressed
                )
        except Misfit as e:
            checksum, misfit = head.checksum, f"{self._sender.dtype} KV can't be converted: {e}"
        finally:
            now = receiver.clock()
            receiver.apply(receiver.imports.push_end(self.number, checksum, now, misfit))

    async def _decoded(self, taker: Taker, head: PushHead, accept: Accept) -> int:
        """Into memory of its own first: only what is intact becomes KV."""
        payload = memoryview(bytearray(head.payload_bytes))
        checksum = await taker.take(self._sock, head, [payload], self._scratch, self._progressed)
        if checksum == head.checksum:
            blocks, codec = head.range.block_count, self._receiver.codec()
            for _ in codec.decode(payload, blocks, self._sender, head.quantization, accept):
                await asyncio.sleep(0)
        return checksum

    def _progressed(self) -> None:
        self.active_at = self._receiver.clock()
        self._receiver.imports.push_progress(self.number, self.active_at)

    async def _flush(self) -> None:
        while self._outbox:
            await self._send(self._outbox.pop(0))

    async def _send(self, reply: frames.Reply) -> None:
        data = frames.encode_reply(reply)
        async with asyncio.timeout(self._receiver.settings.reply_s):
            await tcp.send_all(self._sock, data)

    async def _farewell(self) -> None:
        """Send what is left, and let the peer read it: closing a socket with unread bytes
        resets the connection, which can overtake the verdict."""
        async with asyncio.timeout(self._receiver.settings.linger_s):
            await self._flush()
            self._sock.shutdown(socket.SHUT_WR)
            while await tcp.receive_some(self._sock, self._scratch):
                await asyncio.sleep(0)


def _named(peer: Any) -> str:
    """Who a connection comes from: an address, or nothing on a Unix socket."""
    return tcp.join_address(peer[0], peer[1]) if isinstance(peer, tuple) else "a local process"
