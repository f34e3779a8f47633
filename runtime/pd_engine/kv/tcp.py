"""Sockets of the KV plane: addresses, options, reading and writing whole pieces.

Everything runs in one event loop, on non-blocking sockets, without streams in between:
payload goes from the socket into the pool's memory and back by the kernel alone. With TLS,
OpenSSL decrypts into the pool and encrypts out of it: there is no buffer of ours either.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from pd_engine.kv.checksum import checksum_of
from pd_engine.kv.frames import PREFIX_BYTES, checked, encode_push, frame_length
from pd_engine.kv.transport import Transport
from pd_engine.transfer import PushHead

BATCH_BYTES = 64 * 1024
"""Slices below it go through one buffer of this size: a system call costs more than the copy."""

_PIECE_BYTES = 1 << 20
"""Of a large slice: received whole, then hashed while it is still in a cache."""
_LARGE_BYTES = 64 * 1024


class ConnectionEnded(Exception):
    """The peer closed; `within` says whether a frame had begun."""

    def __init__(self, within: bool) -> None:
        super().__init__("closed within a frame" if within else "closed")
        self.within = within


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"KV address {address!r}: must be host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def configure(sock: socket.socket) -> None:
    """No Nagle (seals and verdicts are small and urgent); notice a host that vanished."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


async def resolve(host: str, port: int) -> tuple[int, Any]:
    """(family, socket address). Pods are dialled by IP: no thread for the resolver then."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return found[0][0], found[0][4]
    return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port)


async def listen(host: str, port: int, backlog: int = 128) -> socket.socket:
    family, address = await resolve(host, port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind(address)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


async def connect(address: str) -> socket.socket:
    family, resolved = await resolve(*split_address(address))
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        configure(sock)
        await asyncio.get_running_loop().sock_connect(sock, resolved)
    except BaseException:
        sock.close()
        raise
    return sock


async def receive_exactly(sock: socket.socket, view: memoryview, *, within: bool = True) -> None:
    """Fill the view. Doesn't yield when all is there already."""
    done = 0
    while done < len(view):
        got = await receive_some(sock, view[done:])
        if not got:
            raise ConnectionEnded(within or done > 0)
        done += got


async def _receive_large(sock: socket.socket, view: memoryview) -> None:
    """As `receive_exactly`, but the loop is only woken when all that is missing has come (or
    nothing more comes, or the kernel's buffer is full): woken by every packet it was busy
    with that, and the sender waited."""
    if isinstance(sock, ssl.SSLSocket) or len(view) < _LARGE_BYTES:
        return await receive_exactly(sock, view)
    done = 0
    try:
        while done < len(view):
            left = view[done:]
            try:
                got = sock.recv_into(left)
            except (BlockingIOError, InterruptedError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(left))
                got = await asyncio.get_running_loop().sock_recv_into(sock, left)
            if not got:
                raise ConnectionEnded(within=True)
            done += got
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def receive_some(sock: socket.socket, view: memoryview) -> int:
    """What has come, or comes next; 0 when the peer has closed.

    What is there is taken first: uvloop's own call always waits for the poller, which
    costs more than the copy of a small frame.
    """
    while True:
        try:
            return sock.recv_into(view)
        except (BlockingIOError, InterruptedError):
            if not isinstance(sock, ssl.SSLSocket):
                return await asyncio.get_running_loop().sock_recv_into(sock, view)
        except ssl.SSLWantReadError:
            pass
        await readable(sock)


async def readable(sock: socket.socket) -> None:
    """Until there is something to read, or the end."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock.fileno())


async def _writable(sock: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock.fileno())


async def handshake(sock: ssl.SSLSocket) -> None:
    """TLS's. The caller bounds its time."""
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            await readable(sock)
        except ssl.SSLWantWriteError:
            await _writable(sock)


async def send_all(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send it whole. Doesn't yield when the socket takes all at once."""
    if isinstance(sock, ssl.SSLSocket):
        await _send_encrypted(sock, memoryview(data))
        return
    try:
        sent = sock.send(data)
    except (BlockingIOError, InterruptedError):
        sent = 0
    if sent < len(data):
        await asyncio.get_running_loop().sock_sendall(sock, memoryview(data)[sent:])


async def _send_encrypted(sock: ssl.SSLSocket, left: memoryview) -> None:
    """A record a call. What was refused has to be offered again, so nobody gives up half."""
    while left:
        try:
            left = left[sock.send(left) :]
        except ssl.SSLWantWriteError:
            await _writable(sock)


async def receive_message(sock: socket.socket) -> bytes:
    """One message behind its prefix."""
    prefix = bytearray(PREFIX_BYTES)
    await receive_exactly(sock, memoryview(prefix), within=False)
    body = bytearray(frame_length(bytes(prefix)))
    await receive_exactly(sock, memoryview(body))
    return checked(bytes(prefix), bytes(body))


async def receive_payload(
    sock: socket.socket,
    slices: Sequence[memoryview],
    scratch: memoryview,
    progress: Callable[[], None],
) -> int:
    """Fill the slices in order; returns xxh3_64 of all. `progress` is called a piece."""
    hasher = checksum_of(slices)
    for batch in batches(slices, len(scratch)):
        if len(batch) == 1:
            for start in range(0, len(batch[0]), _PIECE_BYTES):
                piece = batch[0][start : start + _PIECE_BYTES]
                await _receive_large(sock, piece)
                hasher.update(piece)
                progress()
        else:
            piece = scratch[: sum(len(s) for s in batch)]
            await receive_exactly(sock, piece)
            hasher.update(piece)
            start = 0
            for target in batch:
                target[:] = piece[start : start + len(target)]
                start += len(target)
            progress()
    return hasher.intdigest()


async def send_payload(
    sock: socket.socket, slices: Sequence[memoryview], scratch: memoryview
) -> None:
    for batch in batches(slices, len(scratch)):
        if len(batch) == 1:
            await send_all(sock, batch[0])
            continue
        start = 0
        for source in batch:
            scratch[start : start + len(source)] = source
            start += len(source)
        await send_all(sock, scratch[:start])


def batches(slices: Sequence[memoryview], limit: int) -> list[list[memoryview]]:
    """Neighbours in order, together at most `limit` bytes; a larger slice is alone."""
    found: list[list[memoryview]] = []
    room = 0
    for piece in slices:
        if found and len(piece) <= room:
            found[-1].append(piece)
            room -= len(piece)
        else:
            found.append([piece])
            room = limit - len(piece)
    return found


class ByMemory(Transport):
    """Pushes only name blocks: the target takes the bytes out of the sender's memory."""

    async def push(
        self,
        sock: socket.socket,
        head: PushHead,
        block_ids: Sequence[int],
        slices: Sequence[memoryview],
        scratch: memoryview,
    ) -> None:
        del slices, scratch
        await send_all(sock, encode_push(head, tuple(block_ids)))
