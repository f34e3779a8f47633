"""The prefill worker's connections: made, welcomed, lent to one transfer at a time, reused."""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pd_core.failures import FailureKind, RequestFailure
from pd_core.kv import KvLayout
from pd_engine.kv import frames, tcp
from pd_engine.kv.transport import Transport, Unreachable
from pd_engine.transfer import PushHead, Verdict

log = logging.getLogger(__name__)

Peer = tuple[str, str]
"""(address, epoch): a worker that restarted is somebody else."""


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """Bounds and times (seconds)."""

    max_lent: int = 128
    max_idle: int = 32
    connect_s: float = 5.0  # name, connection and handshake together
    abort_s: float = 0.5  # for the target to take an abort, or to say why it closed
    idle_s: float = 60.0


class Borrower(Protocol):
    """Who has a channel hears what comes back on it."""

    def on_verdict(self, verdict: Verdict) -> None: ...

    def on_lost(self, reason: str) -> None: ...


class Channel:
    """One welcomed connection. Its reader task notices at once when the peer closes."""

    def __init__(self, sock: socket.socket, peer: Peer, transport: Transport) -> None:
        self.sock = sock
        self.peer = peer
        self.transport = transport
        self.borrower: Borrower | None = None
        self.lost = ""
        self.dirty = False  # a frame is out in part: the peer can't find the next one
        self.idle_since = 0.0
        self._scratch = memoryview(bytearray(tcp.BATCH_BYTES))
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, head: bytes) -> None:
        self.dirty = True
        await tcp.send_all(self.sock, head)
        self.dirty = False

    async def push(
        self, head: PushHead, block_ids: Sequence[int], slices: Sequence[memoryview]
    ) -> None:
        self.dirty = True
        await self.transport.push(self.sock, head, block_ids, slices, self._scratch)
        self.dirty = False

    async def heard_out(self, within_s: float) -> None:
        """After a failed send: what the peer said before it closed may still be unread."""
        await asyncio.wait({self._reader}, timeout=within_s)

    async def close(self) -> None:
        """Only by its borrower or, when idle, by the pool: nobody may be sending."""
        self.borrower = None
        self._reader.cancel()
        await asyncio.wait({self._reader})
        self.sock.close()

    async def _read(self) -> None:
        try:
            while True:
                reply = frames.parse_reply(await tcp.receive_message(self.sock))
                if not isinstance(reply, Verdict):
                    raise frames.FrameError("a second welcome")
                if self.borrower is not None:
                    self.borrower.on_verdict(reply)
        except (OSError, tcp.ConnectionEnded, frames.FrameError) as e:
            self.lost = f"connection to {self.peer[0]}: {e}"
        if self.borrower is not None:
            self.borrower.on_lost(self.lost)


class Channels:
    """Keyed by peer; each is lent to one transfer at a time."""

    def __init__(
        self,
        layout: KvLayout,
        worker: str,
        epoch: str,
        settings: ChannelSettings,
        clock: Callable[[], float],
        transports: Mapping[str, Transport],
    ) -> None:
        self.abort_s = settings.abort_s
        self._layout = layout
        self._worker = worker
        self._epoch = epoch
        self._settings = settings
        self._clock = clock
        self._transports = transports
        self._idle: list[Channel] = []  # the longest idle first
        self._lent = asyncio.Semaphore(settings.max_lent)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    async def borrow(self, peer: Peer, names: Sequence[str], borrower: Borrower) -> Channel:
        """An idle channel to that peer, or a new one, by the first of these transports that
        has a way there. Raises RequestFailure."""
        await self._lent.acquire()
        try:
            channel = self._take_idle(peer, names) or await self._open(peer, names)
        except BaseException:
            self._lent.release()
            raise
        channel.borrower = borrower
        return channel

    async def give_back(self, channel: Channel, reuse: bool) -> None:
        """Kept for the next transfer, if the peer would understand another frame on it."""
        self._lent.release()
        channel.borrower = None
        if not reuse or channel.dirty or channel.lost:
            await channel.close()
            return
        channel.idle_since = self._clock()
        self._idle.append(channel)
        if len(self._idle) > self._settings.max_idle:
            await self._idle.pop(0).close()

    def tick(self, now: float) -> None:
        """Close what was idle too long or was closed by its peer."""
        keep = []
        for channel in self._idle:
            if channel.lost or now - channel.idle_since >= self._settings.idle_s:
                task = asyncio.get_running_loop().create_task(channel.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
            else:
                keep.append(channel)
        self._idle = keep

    async def close(self) -> None:
        """Close the idle ones; those lent out are their borrowers'."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(c.close() for c in idle), *self._closing)

    def _take_idle(self, peer: Peer, names: Sequence[str]) -> Channel | None:
        for channel in reversed(self._idle):
            if channel.peer == peer and channel.transport.name in names and not channel.lost:
                self._idle.remove(channel)
                return channel
        return None

    async def _open(self, peer: Peer, names: Sequence[str]) -> Channel:
        address = peer[0]
        sock = None
        try:
            async with asyncio.timeout(self._settings.connect_s):
                transport, sock = await self._connect(peer, names)
                transport = await self._shake_hands(sock, peer, transport, names)
        except BaseException as e:
            if sock is not None:
                sock.close()
            if isinstance(e, (OSError, ValueError, tcp.ConnectionEnded, frames.FrameError)):
                raise RequestFailure(
                    FailureKind.TRANSFER_FAILED, self._unreachable(address, e)
                ) from e
            raise
        return Channel(sock, peer, transport)

    async def _connect(self, peer: Peer, names: Sequence[str]) -> tuple[Transport, socket.socket]:
        """By the first transport with a way there. Where several were allowed, one that has
        none, or whose way fails, leaves it to the next."""
        why = ""
        for name in names:
            transport = self._transports.get(name)
            if transport is None:
                why = f"this worker doesn't send KV by {name}"
                continue
            try:
                return transport, await transport.connect(*peer)
            except Unreachable as e:
                why = str(e)
            except OSError as e:
                if name == names[-1]:
                    raise
                log.info("KV: %s to %s failed, next transport: %s", name, peer[0], e)
        raise RequestFailure(
            FailureKind.TRANSFER_FAILED, f"no KV connection to {peer[0]} by {names[-1]}: {why}"
        )

    async def _shake_hands(
        self, sock: socket.socket, peer: Peer, transport: Transport, names: Sequence[str]
    ) -> Transport:
        """Returns by which pushes go: a target that can't read the region that it is offered
        takes them off the connection, where that is allowed."""
        address, epoch = peer
        offer = transport.offer()
        asked = transport.name if offer is not None else ""
        hello = frames.encode_hello(self._worker, self._epoch, epoch, self._layout, asked, offer)
        await tcp.send_all(sock, hello)
        reply = frames.parse_reply(await tcp.receive_message(sock))
        if isinstance(reply, frames.Refusal):
            raise RequestFailure(reply.failure.kind, reply.failure.message)
        if not isinstance(reply, frames.Welcome) or reply.epoch != epoch:
            raise frames.FrameError("no welcome from the worker that was meant")
        if offer is None or reply.transport == transport.name:
            return transport
        if "tcp" not in names:
            why = f"no KV connection to {address} by {asked}: it takes none by {asked}"
            raise RequestFailure(FailureKind.TRANSFER_FAILED, why)
        return self._transports["tcp"]

    def _unreachable(self, address: str, e: BaseException) -> str:
        if isinstance(e, TimeoutError):
            return f"no KV connection to {address} within {self._settings.connect_s:g} s"
        return f"no KV connection to {address}: {e}"
