"""KV within one host: the sender's pool is a memfd, the target copies out of it.

One copy in all, by the target, from pool to pool. The descriptor comes over a Unix socket
whose abstract name holds the target's epoch: nothing is left in any file system, whoever
dies, and a worker that restarted can't be taken for its predecessor. Abstract names end at
the network namespace, so pods don't find each other; whoever connects must have our user and,
before a pool is handed over, prove this PDCluster's token (`proving`).

The sender keeps the blocks until the verdict. If it gives up earlier (its lease ended, it
was cancelled) the target may copy what is no longer the request's: the checksum tells.
"""

import asyncio
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence

from pd_core.kv import KvLayout
from pd_engine.kv import frames, proving, tcp
from pd_engine.kv.checksum import checksum_of, copy
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.transport import Unreachable
from pd_engine.transfer import PushHead
from pd_proto.tokens import Tokens

_MARK = b"\0"  # one byte, to carry the descriptor
_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_UCRED = struct.Struct("3i")


class SharedMemory:
    """Memory for a pool that other processes of this host can be let read."""

    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("pdcluster-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            # A reader of memory that was cut off below it would be killed: neither end can.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _NEEDED_SEALS)
            self.mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED)
        except BaseException:
            os.close(self.fd)
            raise


class ShmTransport(tcp.ByMemory):
    """See the module. `fd` is None where the pool can't be shared: it only receives."""

    name = "shm"

    def __init__(self, fd: int | None, tokens: Tokens | None = None) -> None:
        self._fd = fd
        self._tokens = tokens

    # ---- the sender's end --------------------------------------------------------------

    async def connect(self, address: str, epoch: str) -> socket.socket:
        del address
        if self._fd is None:
            raise Unreachable("this worker's KV pool is not in shared memory")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            try:
                sock.connect(_name(epoch))
            except ConnectionRefusedError as e:
                raise Unreachable(f"no worker {epoch} on this host takes KV by shm") from e
            _same_user(sock)
            await proving.dialled(sock, self._tokens)
            socket.send_fds(sock, [_MARK], [self._fd])
        except BaseException:
            sock.close()
            raise
        return sock

    # ---- the target's end ----------------------------------------------------------------

    async def listen(self, host: str, port: int, epoch: str) -> socket.socket:
        del host, port
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(_name(epoch))
            sock.listen(128)
        except BaseException:
            sock.close()
            raise
        return sock

    async def greet(self, sock: socket.socket) -> "tuple[socket.socket, ShmTaker]":
        _same_user(sock)
        await proving.accepted(sock, self._tokens)
        fd = await _receive_fd(sock)
        try:
            return sock, ShmTaker(_map(fd))
        finally:
            os.close(fd)


class ShmTaker:
    """Reads a sender's pool. The mapping ends with the last view of it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._memory: KvMemory | None = None

    def open(self, sender: KvLayout) -> None:
        assert self._mapping is not None
        try:
            self._memory = KvMemory(memoryview(self._mapping), sender, readonly=True)
        except ValueError as e:
            raise frames.FrameError(f"what came is no KV pool: {e}") from e

    async def take(
        self,
        sock: socket.socket,
        head: PushHead,
        slices: Sequence[memoryview],
        scratch: memoryview,
        progress: Callable[[], None],
    ) -> int:
        del sock, scratch
        r = head.range
        if self._memory is None or len(head.source_blocks) != r.block_count:
            raise frames.FrameError(f"a push of {r} from {len(head.source_blocks)} blocks")
        try:
            source = self._memory.slices(head.source_blocks, r.layer_start, r.layer_count)
        except IndexError as e:
            raise frames.FrameError(f"a push from where no pool is: {e}") from e
        made = checksum_of(source, slices)
        for _ in copy(source, slices, made):
            progress()
            await asyncio.sleep(0)  # others have their turn
        return made.intdigest()

    def close(self) -> None:
        self._memory = self._mapping = None


def _name(epoch: str) -> str:
    return f"\0pdcluster-kv/{epoch}"


def _same_user(sock: socket.socket) -> None:
    """An abstract name has no permissions: whoever is at the other end must be ours."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, user, _ = _UCRED.unpack(found)
    if user != os.geteuid():
        raise ConnectionRefusedError(f"the other end belongs to user {user}")


async def _receive_fd(sock: socket.socket) -> int:
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(sock, len(_MARK), 4)
            break
        except (BlockingIOError, InterruptedError):
            await tcp.readable(sock)
    if len(fds) == 1:
        return fds[0]
    for fd in fds:
        os.close(fd)
    if not data:
        raise tcp.ConnectionEnded(within=False)
    raise frames.FrameError(f"{len(fds)} descriptors came, not one")


def _map(fd: int) -> mmap.mmap:
    """The sender's pool, to be read."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & _NEEDED_SEALS != _NEEDED_SEALS:
            raise ValueError("it is not sealed against being cut off")
        return mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as e:
        raise frames.FrameError(f"what came is no KV pool: {e}") from e
