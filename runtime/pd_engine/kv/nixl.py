"""KV read by the target from the sender's memory: NIXL over UCX, by RDMA where that is.

The words go over a connection of tcp (behind TLS or a token, as there): its hello offers where the
sender's pool is and what NIXL must know of it, and nothing is read before that hello has
been checked like any other. A push then names blocks, and the target reads them into those
that it granted, so whatever writes a pool is its own worker's. The sender keeps the blocks
until the verdict, as with shared memory: if it gives up earlier, the checksum tells.

Reads have no TLS, and UCX asks nobody who they are: whoever reaches the network of a worker
and knows its keys can read its pool. With TLS on, nixl has to be asked for by name.
"""

import asyncio
import contextlib
import ctypes
import itertools
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pd_core.kv import KvLayout
from pd_engine.kv import frames, tcp
from pd_engine.kv.agents import Agent, AgentError, Read, Reader, ReadFailed, Span
from pd_engine.kv.bytcp import TcpTransport
from pd_engine.kv.checksum import Checksum, checksum_of
from pd_engine.kv.memory import KvMemory, spans
from pd_engine.kv.transport import Unreachable
from pd_engine.transfer import PushHead, Region

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
"""Read at once: hashed while it is still in a cache, and others have their turn in between."""
_AHEAD = 4
"""So many reads of a push go on at the same time, where the network does them. Where UCX copies
by itself a read is over as soon as it has begun, and hashed before the next one."""
_CLOSE_S = 10.0

Piece = tuple[memoryview, int]
"""What is filled, and from where in the sender's memory."""


class NixlTransport(tcp.ByMemory):
    """See the module. Agents are made when the first peer comes: a worker only needs those
    of its side, and registering a pool takes a while."""

    name = "nixl"

    def __init__(self, memory: KvMemory, epoch: str, connections: TcpTransport) -> None:
        self._memory = memory
        self._epoch = epoch
        self._tcp = connections
        self._making = asyncio.Lock()
        self._offering: Agent | None = None
        self._reader: Reader | None = None
        self._numbers = itertools.count(1)
        self._closed = False

    # ---- the sender's end ----------------------------------------------------------------

    async def connect(self, address: str, epoch: str) -> socket.socket:
        async with self._making:
            if self._offering is None:
                try:
                    self._offering = await self._made(self._epoch)
                except AgentError as e:
                    raise Unreachable(str(e)) from e
        return await self._tcp.connect(address, epoch)

    def offer(self) -> Region | None:
        if self._offering is None:
            return None
        memory = self._memory.view
        return Region(self._offering.metadata, _address(memory), memory.nbytes)

    # ---- the target's end -----------------------------------------------------------------

    async def listen(self, host: str, port: int, epoch: str) -> socket.socket | None:
        del host, port, epoch
        return None

    async def greet(self, sock: socket.socket) -> "tuple[socket.socket, NixlTaker]":
        del sock
        raise frames.FrameError("nixl has no port of its own")

    async def admit(self, epoch: str, region: Region) -> "NixlTaker":
        taker = NixlTaker(self, epoch, region)
        try:
            await taker.join()
        except AgentError as e:
            raise Unreachable(str(e)) from e
        return taker

    async def reader(self) -> Reader:
        """The one that reads at present. Raises AgentError."""
        async with self._making:
            if self._reader is None or self._reader.retired:
                name = f"{self._epoch}/{next(self._numbers)}"
                self._reader = Reader(await self._made(name))
            return self._reader

    def holds(self, view: memoryview) -> bool:
        """Whether it is part of this worker's pool, which each agent knows."""
        start = _address(self._memory.view)
        return start <= _address(view) < start + self._memory.view.nbytes

    # ---- both -----------------------------------------------------------------------------

    async def close(self) -> None:
        async with self._making:
            self._closed = True
            reader, self._reader = self._reader, None
            offering, self._offering = self._offering, None
        try:
            async with asyncio.timeout(_CLOSE_S):
                if reader is not None:
                    await reader.close()
                if offering is not None:
                    await asyncio.to_thread(offering.close)
        except TimeoutError:
            log.error("NIXL doesn't end within %g s", _CLOSE_S)

    async def _made(self, name: str) -> Agent:
        """Raises AgentError."""
        if self._closed:
            raise AgentError("this worker ends")
        memory = self._memory.view
        return await asyncio.to_thread(Agent, name, _address(memory), memory.nbytes)


class NixlTaker:
    """Reads one sender's pool."""

    def __init__(self, transport: NixlTransport, epoch: str, region: Region) -> None:
        self._transport = transport
        self._epoch = epoch
        self._region = region
        self._layout: KvLayout | None = None
        self._reader: Reader | None = None

    def open(self, sender: KvLayout) -> None:
        size, address = self._region.size, self._region.address
        if not size or size % sender.block_bytes or address + size > 1 << 64:
            raise frames.FrameError(f"a region of {size} bytes at {address:#x} is no KV pool")
        self._layout = sender

    async def join(self) -> Reader:
        """A reader that knows the sender. Raises AgentError."""
        reader = self._reader
        if reader is None or reader.retired:
            self.close()
            reader = await self._transport.reader()
            reader.join(self._epoch, self._region.agent)
            self._reader = reader
        return reader

    async def take(
        self,
        sock: socket.socket,
        head: PushHead,
        slices: Sequence[memoryview],
        scratch: memoryview,
        progress: Callable[[], None],
    ) -> int:
        del sock, scratch
        pieces = self._pieces(head, slices)
        # What is converted lands elsewhere first.
        apart = [view for view in slices if not self._transport.holds(view)]
        try:
            reader = await self.join()
            with reader.knowing([(_address(view), len(view)) for view in apart]):
                return await self._read(reader, pieces, progress)
        except AgentError as e:
            raise ReadFailed(str(e)) from e

    def close(self) -> None:
        if self._reader is not None:
            self._reader.leave(self._epoch)
            self._reader = None

    def _pieces(self, head: PushHead, slices: Sequence[memoryview]) -> list[Piece]:
        r, layout = head.range, self._layout
        if layout is None or len(head.source_blocks) != r.block_count:
            raise frames.FrameError(f"a push of {r} from {len(head.source_blocks)} blocks")
        blocks = self._region.size // layout.block_bytes
        try:
            source = spans(layout, blocks, head.source_blocks, r.layer_start, r.layer_count)
        except IndexError as e:
            raise frames.FrameError(f"a push from where no pool is: {e}") from e
        return list(_matched(source, slices, self._region.address))

    async def _read(
        self, reader: Reader, pieces: Sequence[Piece], progress: Callable[[], None]
    ) -> int:
        hasher = checksum_of(view for view, _ in pieces)
        going: deque[tuple[Read, list[Piece]]] = deque()
        try:
            for batch in _batches(pieces):
                going.append((reader.begin(self._epoch, _spans(batch)), batch))
                if len(going) == _AHEAD or reader.over(going[0][0]):
                    await _taken(reader, going, hasher)
                    progress()
                await asyncio.sleep(0)  # others have their turn
            while going:
                await _taken(reader, going, hasher)
                progress()
        finally:
            # Nothing may be written once this has returned, whatever ended it.
            for read, _ in going:
                with contextlib.suppress(ReadFailed, asyncio.CancelledError):
                    await reader.finish(read)
        return hasher.intdigest()


async def _taken(reader: Reader, going: deque[tuple[Read, list[Piece]]], hasher: Checksum) -> None:
    """The oldest read, to its end."""
    read, batch = going.popleft()
    await reader.finish(read)
    for target, _ in batch:
        hasher.update(target)


def _matched(
    source: Sequence[tuple[int, int]], target: Sequence[memoryview], base: int
) -> Iterator[Piece]:
    """Bytes in order, whatever the pieces on both sides are."""
    starts = iter(source)
    at = end = 0
    for whole in target:
        done = 0
        while done < len(whole):
            if at == end:
                at, end = next(starts)
            size = min(end - at, len(whole) - done, _READ_BYTES)
            yield whole[done : done + size], base + at
            at += size
            done += size


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Neighbours in order, together at most as much as is read at once."""
    batch: list[Piece] = []
    room = _READ_BYTES
    for piece in pieces:
        if batch and len(piece[0]) > room:
            yield batch
            batch, room = [], _READ_BYTES
        batch.append(piece)
        room -= len(piece[0])
    if batch:
        yield batch


def _spans(batch: Sequence[Piece]) -> list[Span]:
    return [(_address(target), address, len(target)) for target, address in batch]


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
