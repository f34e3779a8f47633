"""Bytes of a client on a connection to the router, cut anywhere: HTTP, routes, bodies.

The first byte says into how many pieces the rest is cut. Sessions are played.
"""

import asyncio
import functools
import re
from typing import Any

import uvicorn

from pd_router.app import AppSettings, RouterApp
from pd_router.http import BoundedProtocol, _State
from pd_router.journal import Journal
from pd_router.metrics import Metrics
from pd_router.texts import Texts
from tests.fuzz.aloop import FuzzLoop
from tests.pd_router.http_rig import MODEL, PlayedSessions, PlayedWorkers, says, tiny_bundle

PACKAGES = ("pd_router",)
WORDS = (
    b"POST /v1/completions HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"HTTP/1.0\r\n", b"\r\n\r\n",
    b"content-length: ", b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n",
    b"connection: close\r\n", b"connection: upgrade\r\n", b"upgrade: websocket\r\n", b"0\r\n\r\n",
    b"x-session-id: ", b"authorization: Bearer ", b"/v1/chat/completions", b"/tokenize", b"%00",
    b"HEAD", b"OPTIONS", b"CONNECT", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"ffffffffffffffff\r\n",
)  # fmt: skip
_loop = FuzzLoop()
_SERVER_ERROR = re.compile(rb"HTTP/1\.1 (5\d\d)")
_ROUNDS = 2000


class _Wire(asyncio.Transport):
    """A connection without a socket: what is written is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.protocol: Any = None
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    abort = close

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.1", 9)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything goes out at once."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """All of the input comes anyway."""

    def resume_reading(self) -> None:
        """It was never paused."""


class _Router:
    """A router's application, and a state that its connections share."""

    def __init__(self) -> None:
        workers = PlayedWorkers(tiny_bundle())
        self.sessions = PlayedSessions()
        self.sessions.script = says((10, 20, 30))
        self.texts = Texts(workers)
        metrics = Metrics(MODEL)
        settings = AppSettings(model=MODEL, max_body_bytes=1 << 20)
        app = RouterApp(settings, workers, self.sessions, self.texts, metrics, Journal(metrics))
        self.config = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False
        )
        self.config.load()
        self.state = _State()


@functools.cache
def _router() -> _Router:
    async def made() -> _Router:
        router = _Router()
        await router.texts.get(10)
        return router

    return _loop.run(made())


def one(data: bytes) -> None:
    if data:
        router = _router()
        _loop.run(_connection(router, data[0] % 8 + 1, data[1:]))
        assert not router.state.connections
        router.sessions.started.clear()


async def _connection(router: _Router, cuts: int, data: bytes) -> None:
    wire = _Wire()
    protocol = BoundedProtocol(router.config, router.state, {})
    wire.protocol = protocol
    protocol.connection_made(wire)
    size = -(-len(data) // cuts) or 1
    for start in range(0, len(data), size):
        if not wire.is_closing():
            protocol.data_received(data[start : start + size])
        await asyncio.sleep(0)
    for _ in range(_ROUNDS):
        if wire.is_closing() or protocol.cycle is None or protocol.cycle.response_complete:
            break
        await asyncio.sleep(0)
        if not router.state.tasks:
            break
    wire.close()
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)
        if not router.state.tasks:
            break
    else:
        while router.state.tasks:  # what is in another thread; the loop's deadline bounds it
            await asyncio.sleep(0.001)
    failed = _SERVER_ERROR.search(wire.written)
    assert failed is None, bytes(wire.written[:2000])


def seeds() -> list[bytes]:
    body = b'{"model":"tiny","prompt":"hello","max_tokens":3%s}'
    made = [b"\0GET /health HTTP/1.1\r\nhost: a\r\n\r\n", b"\3GET /v1/models HTTP/1.0\r\n\r\n"]
    for cuts, more in ((b"\0", b""), (b"\5", b',"stream":true')):
        content = body % more
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
        made.append(cuts + head % len(content) + content)
        chunked = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        made.append(cuts + chunked + b"%x\r\n%s\r\n0\r\nx: y\r\n\r\n" % (len(content), content))
    return made
