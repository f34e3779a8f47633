"""uvicorn with the bounds that it lacks: headers, waits, connections, half-read bodies."""

import asyncio
import contextlib
import fcntl
import ipaddress
import logging
import resource
import secrets
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pd_router.errors import ApiError
from pd_router.reading import Reading
from pd_router.settings import Address

log = logging.getLogger("pd_router.http")

MAX_HEAD_BYTES = 64 * 1024
HEAD_DEADLINE_S = 30.0
KEEP_ALIVE_S = 75  # longer than load balancers keep a connection: they close it, not we
LINGER_S = 10.0
MAX_CONNECTIONS = 8192
# Of the process's descriptors, for all that is no client: workers, logs, the admin port.
SPARE_DESCRIPTORS = 512
BACKLOG = 2048
SHUTDOWN_S = 1
# What the kernel takes for a client that doesn't read, before we notice.
SEND_BUFFER_BYTES = 64 * 1024
# And what we hold behind that before its stream waits.
HELD_BYTES = 16 * 1024
# So long a client may read next to nothing of what no buffer takes any more.
UNREAD_S = 20.0
LOOK_S = 0.5  # so often it is looked at
# From then on it makes room for those who come, where there is no other.
UNREAD_GRACE_S = 1.0
# Writing tokens takes a tenth of the time of a router that is behind with them where it can,
# and none of them waits for longer than a person could see.
REST_RATIO = 10.0
LONGEST_REST_S = 0.01
_WENT = "The client went away."
_SIOCOUTQ = 0x5411


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Never waits for ever, never keeps more than it needs.

    A request that arrives while another is answered (pipelining) isn't taken: the
    connection ends after the answer. So reading never stops, and a client that goes
    away is always noticed at once.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes: int | None = 0  # None: not in a request's head
        self._bare_bytes = 0  # since the last of a body: chunks' heads, trailers
        self._in_message = False
        self._refuses = False
        self._on_gone: Callable[[], None] | None = None
        self._why_gone = _WENT
        self._unread_timer: asyncio.TimerHandle | None = None
        self._reading: Reading | None = None  # of a client that is behind
        self._unread: dict[BoundedProtocol, float] = self.server_state.unread
        self._idlers: dict[BoundedProtocol, None] = self.server_state.idlers
        if len(self.connections) > self.server_state.most and not self._make_room():
            transport.abort()
            return
        self._idlers[self] = None
        transport.set_write_buffer_limits(HELD_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._set_timer(HEAD_DEADLINE_S)

    def _make_room(self) -> bool:
        """Ends the connection that has asked for nothing for longest, so that no number of
        them locks out those who ask. False when all are being answered, and read it."""
        while self._idlers:
            longest = next(iter(self._idlers))
            del self._idlers[longest]
            if not longest.transport.get_write_buffer_size():
                longest.transport.abort()
                return True
            longest._watch()  # its answer is still to go out
        return self._cut_unread()

    def _make_place(self) -> bool:
        """The same for another request: none but those that hold a place can leave one."""
        return self._cut_unread(lambda one: one._on_gone is not None)

    def _cut_unread(self, is_one: Callable[["BoundedProtocol"], bool] = lambda _: True) -> bool:
        """Ends the connection whose client has read nothing for longest, where there is such
        a one. Who is merely behind reads on."""
        now = self.loop.time()
        for longest, since in list(self._unread.items()):
            if now - since < UNREAD_GRACE_S:
                break
            if is_one(longest) and not longest._has_read(now):
                longest.cut("The client didn't read its answer, and others came.")
                return True
        return False

    def pause_writing(self) -> None:
        """No buffer takes more: the client is far behind, or doesn't read at all."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_on()
        if self.transport.is_closing():  # the rest, too
            self._watch()

    def _watch(self) -> None:
        """What is to be sent goes on going out, or the connection ends. A closed one too
        would else wait for ever for its client to read."""
        if self._reading is None:
            now = self.loop.time()
            self._reading = Reading(outstanding(self.transport), now)
            self._unread[self] = now
            self._look_later()

    def _look_later(self) -> None:
        self._unread_timer = self.loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        if self.transport.get_write_buffer_size() or self.transport.is_closing():
            self._look_later()
            self._look(self.loop.time())
        else:
            self._read_on()

    def _look(self, now: float) -> None:
        """A slow client reads on; one that doesn't read is cut."""
        self._has_read(now)
        if self._reading is not None and self._reading.gives_up(now, UNREAD_S):
            self.cut(f"The client didn't read its answer for {UNREAD_S:.0f} s.")

    def _has_read(self, now: float) -> bool:
        """Anything since it was looked at last: then others have read nothing for longer."""
        if self._reading is None or not self._reading.look(outstanding(self.transport), now):
            return False
        self._unread.pop(self, None)
        self._unread[self] = now
        return True

    def _read_on(self) -> None:
        """It's no longer behind."""
        self._forget()
        if self.cycle is not None and self.cycle.response_complete:
            self._idle()

    def _forget(self) -> None:
        self._unread.pop(self, None)
        self._reading = None
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _idle(self) -> None:
        """It asks for nothing. Room is made of it once its answer has gone out."""
        if not self.transport.is_closing():
            self._idlers.setdefault(self)

    def cut(self, why: str) -> None:
        """Ends the connection of a client that doesn't read, and the request that it made."""
        self._forget()
        self._why_gone = why
        log.info("cut client=%s %s", self.client and self.client[0], why)
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        self._forget()
        self._idlers.pop(self, None)
        super().connection_lost(exc)
        gone, self._on_gone = self._on_gone, None
        if gone is not None:
            gone()

    def data_received(self, data: bytes) -> None:
        if self._refuses or self.transport.is_closing():
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        self._bare_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes is None:
            if self._bare_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "The request's trailers are too large.", "headers_too_large")
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "The request's headers are too large.", "headers_too_large")
        elif self._timer is None and (self.cycle is None or self.cycle.response_complete):
            # Bytes that begin no request ended the wait for the next one: it goes on.
            self._set_timer(HEAD_DEADLINE_S)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self.scope["extensions"] = {
            "pdcluster.abort": self.transport.abort,
            "pdcluster.pipe": self._pipe,
            "pdcluster.when_gone": self._when_gone,
            "pdcluster.why_gone": lambda: self._why_gone,
            "pdcluster.make_room": self._make_place,
        }
        if self._timer is None:
            self._set_timer(HEAD_DEADLINE_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes after a body is no header: proxies in front haven't looked at it.
        if self._head_bytes is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes, self._bare_bytes = None, 0
        self._clear_timer()
        self._idlers.pop(self, None)
        if self.cycle is not None and not self.cycle.response_complete:
            self._refuses = True
            self.cycle.keep_alive = False
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        if not self._refuses:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._head_bytes = 0
        self._clear_timer()
        if not self._refuses:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch()
            return
        self._idle()
        if self._in_message:
            # Answered before its body came (413, say): let the client finish sending, or
            # it may never see the answer.
            self._set_timer(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _pipe(self) -> "Pipe":
        return Pipe(self.transport, self.flow, self.cycle, self.server_state.flusher)

    def _when_gone(self, callback: Callable[[], None] | None) -> None:
        self.flow.resume_reading()  # a large body may have stopped it
        self._on_gone = callback
        if callback is not None and self.cycle.disconnected:
            self._on_gone = None
            callback()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Ends a connection that doesn't speak HTTP as we do."""
        self._refuses = True
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()  # anything more would stand inside that answer
            return
        body = ApiError(status, message, code=code).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: {secrets.token_hex(12)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._close()

    def _set_timer(self, seconds: float) -> None:
        self._clear_timer()
        self._timer = self.loop.call_later(seconds, self._expired)

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self._watch()


def outstanding(transport: asyncio.Transport) -> int:
    """Bytes that the client hasn't got: those that we hold for it, and where the system tells,
    those that it does. Ours alone would stand still while a slow client reads: the kernel
    takes none of them until much of what it holds is gone."""
    held = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sys.platform != "linux" or sock is None:
        return held
    try:
        told = fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it's closed, or no TCP connection
        return held
    return held + int(struct.unpack("i", told)[0])


class Flusher:
    """Empties pipes that were written to, all in one callback of the loop: what a worker's
    message holds for a client, however many tokens, is one chunk and one call of the kernel.

    Such calls are most of what a token costs. So behind a pass over many clients the next one
    waits a little, longer the longer the last one took: tokens that come faster than they can
    go out singly go out by several.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._clock = clock  # the loop's own stands still within a round
        self._full: list[Pipe] = []
        self._rests_until = 0.0

    def add(self, pipe: "Pipe") -> None:
        if not self._full:
            rest_s = self._rests_until - self._clock()
            if rest_s > 0:
                self._loop.call_later(rest_s, self._flush)
            else:
                self._loop.call_soon(self._flush)
        self._full.append(pipe)

    def _flush(self) -> None:
        began = self._clock()
        full, self._full = self._full, []
        for pipe in full:
            pipe.flush()
        ended = self._clock()
        self._rests_until = ended + min(REST_RATIO * (ended - began), LONGEST_REST_S)


class Pipe:
    """Pieces of one chunked answer, straight to its connection (`exchange.Pipe`)."""

    __slots__ = ("_cycle", "_flow", "_flusher", "_pieces", "_send")

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        cycle: RequestResponseCycle,
        flusher: Flusher,
    ) -> None:
        self._send = transport.write
        self._flow = flow
        self._cycle = cycle
        self._flusher = flusher
        self._pieces: list[bytes] = []

    @property
    def blocked(self) -> bool:
        cycle = self._cycle
        return self._flow.write_paused or cycle.disconnected or cycle.response_complete

    def write(self, before: bytes, text: bytes, after: bytes) -> None:
        pieces = self._pieces
        if not pieces:
            self._flusher.add(self)
        pieces += (before, text, after)

    def take(self) -> bytes:
        body = b"".join(self._pieces)
        self._pieces.clear()
        return body

    def flush(self) -> None:
        body = self.take()
        if body and not (self._cycle.disconnected or self._cycle.response_complete):
            self._send(b"%x\r\n%b\r\n" % (len(body), body))


class _State(ServerState):
    """What the connections of a server share. Made in the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.flusher = Flusher(asyncio.get_running_loop())
        self.idlers: dict[BoundedProtocol, None] = {}  # of no request now; longest comes first
        self.unread: dict[BoundedProtocol, float] = {}  # since when; longest comes first
        self.most = most_connections()


class HttpServer(uvicorn.Server):
    """A uvicorn server on bound sockets; the process's signals are none of its business."""

    def __init__(self, app: Any, sock: socket.socket, *more: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                proxy_headers=False,  # who asks is known by keys, never by addresses
            )
        )
        self.server_state = _State()
        self._sockets = [sock, *more]
        self._stop = asyncio.Event()
        host, port = sock.getsockname()[:2]
        self.address = Address(host, port)

    async def main_loop(self) -> None:
        """Once a second (uvicorn: ten times) the date header is renewed."""
        while not self._stop.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._stop.wait()

    def stop_accepting(self) -> None:
        """New connections are no longer ours; those that are open stay."""
        for server in self.servers:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What ran has ended before: idle connections are closed, the last answers flushed."""
        self.stop_accepting()
        for sock in sockets or ():
            sock.close()
        connections = self.server_state.connections
        for connection in list(connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_S):
                while connections:
                    await asyncio.sleep(0.005)
        for connection in list(connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serves while the body runs."""
        task = asyncio.get_running_loop().create_task(self.serve(sockets=self._sockets))
        try:
            while not self.started and not task.done():
                await asyncio.sleep(0)
            if task.done():
                task.result()
            yield
        finally:
            self._stop.set()
            await asyncio.gather(task, return_exceptions=True)


def raise_descriptor_limit() -> None:
    """As many descriptors as the process may have: each client is one. Who starts us often
    gives 1,024, for programs that can't deal with more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems give less than they say
        log.warning("descriptors stay limited to %d: %s", soft, error)


def most_connections() -> int:
    """Of clients. When descriptors run out, accepting fails and nobody makes room any more."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(limit - SPARE_DESCRIPTORS, limit // 2))


def listen(address: Address, *, reuse_port: bool = False) -> list[socket.socket]:
    """Sockets bound to an address and, where it is a pod's own, to its loopback address: that
    is where `kubectl port-forward` and `kubectl exec` come from. OSError when it's taken."""
    sockets = [bind(address, reuse_port=reuse_port)]
    host, port = sockets[0].getsockname()[:2]
    ip = ipaddress.ip_address(host)
    if not (ip.is_loopback or ip.is_unspecified):
        inner = Address("127.0.0.1" if ip.version == 4 else "::1", port)
        try:
            sockets.append(bind(inner, reuse_port=reuse_port))
        except OSError as error:  # somebody else's: all but port-forward works without
            log.warning("not served on loopback: %s", error)
    return sockets


def bind(address: Address, *, reuse_port: bool = False) -> socket.socket:
    """A socket bound to an address; OSError when it's taken. Its connections inherit options."""
    family, kind, protocol, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(place)
        sock.setblocking(False)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise OSError(error.errno, f"can't listen on {address}: {error.strerror}") from error
        raise
    return sock
