"""The KV plane's connections in a world: byte streams whose frames are delayed, cut, altered,
dropped, repeated, swapped, sent astray and relabelled.

TCP does most of that never. The protocol must hold even then: what arrives is complete and
right, or it is not used.
"""

import asyncio
import contextlib
from collections import deque
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from pd_engine.kv import frames
from pd_engine.transfer import PushHead, SealHead, TransferId
from tests.simulation.loop import VirtualLoop


class Pipe:
    """One direction of a connection."""

    def __init__(self, net: "KvNet", capacity: int) -> None:
        self.net = net
        self.capacity = capacity
        self.peer_pipe: Pipe | None = None
        self.waiters: list[asyncio.Future[None]] = []
        self.arrived = bytearray()
        self.eof = False
        self.reset = False
        self.reader_gone = False
        self._partial = bytearray()  # of a frame that isn't out whole
        self._flying = 0
        self._held: bytes | None = None  # waits to be swapped with the next one
        self._clear_at = 0.0
        self._broken = False

    # ---- ends ----------------------------------------------------------------------------

    def send(self, data: Any) -> int:
        if self.reset or self.reader_gone or self._broken:
            raise ConnectionResetError(104, "reset by the peer")
        room = self.capacity - len(self._partial) - self._flying - len(self.arrived)
        if room <= 0:
            raise BlockingIOError
        taken = bytes(data[:room])
        self._partial += taken
        self._split()
        return len(taken)

    def receive_into(self, view: Any) -> int:
        if self.reset:
            raise ConnectionResetError(104, "reset by the peer")
        if not self.arrived:
            if self.eof:
                return 0
            raise BlockingIOError
        count = min(len(view), len(self.arrived))
        view[:count] = self.arrived[:count]
        del self.arrived[:count]
        self.wake()
        return count

    def finish(self) -> None:
        """The writer closes: what it has written still arrives."""
        self._put(bytes(self._partial))
        self._partial.clear()
        self._at(self._end, False)

    def lose(self, *, at_once: bool) -> None:
        """The connection breaks."""
        self._broken = True
        if at_once:
            self._end(True)
        else:
            self._at(self._end, True)
        self.wake()

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _end(self, reset: bool) -> None:
        self.eof = True
        self.reset = self.reset or reset
        self.wake()

    # ---- frames --------------------------------------------------------------------------

    def _split(self) -> None:
        """Takes whole frames, with their payload, off what was written."""
        while len(self._partial) >= frames.PREFIX_BYTES:
            prefix = bytes(self._partial[: frames.PREFIX_BYTES])
            end = frames.PREFIX_BYTES + frames.frame_length(prefix)
            if len(self._partial) < end:
                return
            head: Any = None
            with contextlib.suppress(frames.FrameError):  # else it is a reply
                head = frames.parse_frame(bytes(self._partial[frames.PREFIX_BYTES : end]))
            size = head.payload_bytes if isinstance(head, PushHead) else 0
            if len(self._partial) < end + size:
                return
            whole = bytes(self._partial[: end + size])
            del self._partial[: end + size]
            self._fate(head, whole, end)

    def _fate(self, head: Any, whole: bytes, payload_at: int) -> None:
        net, random = self.net, self.net.random
        if random.random() >= net.fault_rate or isinstance(head, frames.Hello):
            self._deliver(whole)
            return
        fault = random.choice(FAULTS)
        net.note(f"kv fault: {fault} ({type(head).__name__ if head else 'reply'})")
        match fault:
            case "cut":
                self._deliver(whole[: random.randrange(len(whole) + 1)])
                self.lose(at_once=False)
                if self.peer_pipe is not None:
                    self.peer_pipe.lose(at_once=False)
            case "stall":
                self._clear_at = max(self._clear_at, net.now) + random.uniform(0.1, 6.0)
                self._deliver(whole)
            case "halt":  # half of it, and the rest much later
                half = random.randrange(len(whole))
                self._deliver(whole[:half])
                self._clear_at += random.uniform(0.1, 6.0)
                self._deliver(whole[half:])
            case "flip" if len(whole) > payload_at:
                altered = bytearray(whole)
                altered[random.randrange(payload_at, len(whole))] ^= 1 << random.randrange(8)
                self._deliver(bytes(altered))
            case "garble":
                altered = bytearray(whole)
                # Often near the head's end: there a seal has token 0.
                first = 0 if random.random() < 0.3 else max(0, payload_at - 12)
                altered[random.randrange(first, payload_at)] ^= 1 << random.randrange(8)
                self._deliver(bytes(altered))
            case "forge" if isinstance(head, SealHead):
                self._deliver(whole[: frames.PREFIX_BYTES] + forged(head)[frames.PREFIX_BYTES :])
            case "drop":
                pass
            case "repeat":
                self._deliver(whole + whole)
            case "swap":
                self._held = whole
                net.loop.call_later(1.0, self._release_held)
            case "astray":
                net.elsewhere(self)._deliver(whole)
            case "relabel" if isinstance(head, PushHead | SealHead):
                self._deliver(relabelled(head) + whole[payload_at:])
            case "move" if isinstance(head, PushHead):
                self._deliver(moved(head, random) + whole[payload_at:])
            case _:
                self._deliver(whole)

    def _deliver(self, data: bytes) -> None:
        held, self._held = self._held, None
        self._put(data)
        if held is not None:
            self._put(held)

    def _release_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._put(held)

    def _put(self, data: bytes) -> None:
        if self._broken or not data:
            return
        self._flying += len(data)
        self._at(self._arrive, data)

    def _at(self, what: Any, argument: Any) -> None:
        """In order, after a while."""
        net = self.net
        self._clear_at = max(self._clear_at, net.now + net.random.uniform(0.0001, 0.005))
        net.loop.call_at(self._clear_at, what, argument)

    def _arrive(self, data: bytes) -> None:
        self._flying -= len(data)
        if not self.reader_gone and not self.reset:
            self.arrived += data
        self.wake()


FAULTS = (
    "cut", "cut", "cut", "stall", "halt", "flip", "flip", "garble", "garble", "drop", "repeat",
    "swap", "astray", "forge", "relabel", "move",
)  # fmt: skip


def relabelled(head: PushHead | SealHead) -> bytes:
    """As if it were of the attempt before."""
    id = TransferId(head.id.request, max(0, head.id.attempt - 1))
    if isinstance(head, PushHead):
        return frames.encode_push(replace(head, id=id))
    return frames.encode_seal(replace(head, id=id))


def forged(head: SealHead) -> bytes:
    """With another token 0, as flipped bits could make it."""
    first = tuple(replace(out, token=out.token ^ 1) for out in head.first)
    return frames.encode_seal(replace(head, first=first))


def moved(head: PushHead, random: Random) -> bytes:
    """As if it were of other blocks."""
    start = max(0, head.range.block_start + random.choice((-1, 1)))
    return frames.encode_push(replace(head, range=replace(head.range, block_start=start)))


class Socket:
    """One end of a connection, as far as the product uses a socket."""

    def __init__(self, net: "KvNet", host: str, incoming: Pipe, outgoing: Pipe) -> None:
        self.net = net
        self.host = host
        self.incoming = incoming
        self.outgoing = outgoing
        self.closed = False

    def send(self, data: Any) -> int:
        self._check()
        return self.outgoing.send(data)

    def recv_into(self, view: Any) -> int:
        self._check()
        return self.incoming.receive_into(view)

    def _check(self) -> None:
        if self.closed:
            raise OSError(9, "closed here")

    async def wait_readable(self, loop: VirtualLoop) -> None:
        await wait(self.incoming.waiters, loop)

    async def wait_writable(self, loop: VirtualLoop) -> None:
        await wait(self.outgoing.waiters, loop)

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def shutdown(self, how: int) -> None:
        del how
        self._check()
        self.outgoing.finish()

    def close(self) -> None:
        """A socket closed with unread bytes resets the connection, like the kernel's."""
        if self.closed:
            return
        self.closed = True
        self.incoming.reader_gone = True
        self.incoming.wake()
        if self.incoming.arrived:
            self.outgoing.lose(at_once=False)
        else:
            self.outgoing.finish()


async def wait(waiters: "list[asyncio.Future[None]]", loop: VirtualLoop) -> None:
    future: asyncio.Future[None] = loop.create_future()
    waiters.append(future)
    await future


class Listener:
    def __init__(self, net: "KvNet", host: str) -> None:
        self.net = net
        self.host = host
        self.waiting: deque[Socket] = deque()
        self.waiters: list[asyncio.Future[None]] = []

    async def wait_readable(self, loop: VirtualLoop) -> None:
        await wait(self.waiters, loop)

    def getsockname(self) -> tuple[str, int]:
        return self.host, 7002

    def close(self) -> None:
        self.net.listeners.pop(self.host, None)


class KvNet:
    """All KV connections of a world. One process a host; ports don't matter."""

    def __init__(self, loop: VirtualLoop, random: Random, fault_rate: float, note: Any) -> None:
        self.loop = loop
        self.random = random
        self.fault_rate = fault_rate
        self.note = note
        self.listeners: dict[str, Listener] = {}
        self._sockets: list[Socket] = []

    @property
    def now(self) -> float:
        return self.loop.clock.now

    async def listen(self, host: str, port: int, backlog: int = 128) -> Listener:
        del port, backlog
        self.listeners[host] = Listener(self, host)
        return self.listeners[host]

    async def connect(self, address: str) -> Socket:
        """Runs in the loop of the process that dials."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        host = address.rpartition(":")[0]
        slow = self.random.random() < self.fault_rate
        await asyncio.sleep(self.random.uniform(0.0002, 1.5 if slow else 0.01))
        listener = self.listeners.get(host)
        if listener is None:
            raise ConnectionRefusedError(111, f"nobody listens at {address}")
        capacity = self.random.choice((1500, 4000, 1 << 16))
        there, back = Pipe(self, capacity), Pipe(self, capacity)
        there.peer_pipe, back.peer_pipe = back, there
        ours, theirs = Socket(self, loop.host, back, there), Socket(self, host, there, back)
        self._sockets += [ours, theirs]
        listener.waiting.append(theirs)
        waiters, listener.waiters = listener.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return ours

    def crash(self, host: str, heard: bool) -> None:
        """A process is gone: its peers hear of it at once, or only by silence."""
        listener = self.listeners.pop(host, None)
        if listener is not None:
            for socket in listener.waiting:
                socket.outgoing.lose(at_once=False)
        for socket in [s for s in self._sockets if s.host == host]:
            socket.closed = True
            if heard:
                socket.incoming.reader_gone = True
                socket.outgoing.lose(at_once=False)
            else:
                self.loop.call_later(12.0, partial(socket.outgoing.lose, at_once=False))
            self._sockets.remove(socket)

    def elsewhere(self, pipe: Pipe) -> Pipe:
        """Another connection's pipe in the same direction, or the same one."""
        others = [
            s.outgoing
            for s in self._sockets
            if s.outgoing is not pipe and not s.closed and s.outgoing is not pipe.peer_pipe
        ]
        return self.random.choice(others) if others else pipe
