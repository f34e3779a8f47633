"""A request passed on to the clients' port of this router, and its answer as it comes."""

import asyncio
from contextlib import suppress

import httptools

from pd_core.failures import FailureKind, RequestFailure
from pd_router.errors import ApiError
from pd_router.exchange import Exchange, Receive, Scope, Send
from pd_router.settings import Address

MAX_BODY_BYTES = 8 * 1024 * 1024
_CONNECT_S = 5.0
_READ_BYTES = 65536
_PASSED_ON = (b"authorization", b"content-type", b"x-request-id")
_PASSED_BACK = (b"content-type", b"retry-after", b"x-request-id", b"cache-control")


class _Answer:
    """What httptools calls with the parts of an answer."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.begun = self.complete = False
        self.pieces: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in _PASSED_BACK:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class Relay:
    """The ASGI application; `place` is where the router answers clients."""

    def __init__(self, place: Address) -> None:
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        with suppress(RequestFailure):  # the client went while it sent its body
            body = await exchange.read_body(MAX_BODY_BYTES)
            await self._pass_on(exchange, body, send)

    async def _pass_on(self, exchange: Exchange, body: bytes, send: Send) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(self._place.host, self._place.port)
        except (OSError, TimeoutError):
            message = "None of the router's processes answers."
            raise ApiError(503, message, code="starting", kind=FailureKind.INTERNAL) from None
        exchange.when_gone(writer.transport.abort)
        try:
            writer.write(_head(exchange, len(body)) + body)
            if not await _bring_back(reader, send):
                exchange.abort()
        finally:
            exchange.when_gone(None)
            writer.transport.abort()


def _head(exchange: Exchange, length: int) -> bytes:
    lines = [b"%s %s HTTP/1.1" % (exchange.method.encode(), exchange.path.encode())]
    lines += [b"host: localhost", b"connection: close", b"content-length: %d" % length]
    for name in _PASSED_ON:
        value = exchange.header(name)
        if value is not None:
            lines.append(name + b": " + value)
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _bring_back(reader: asyncio.StreamReader, send: Send) -> bool:
    """Until the answer ends; False when it breaks off."""
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    started = False
    while not answer.complete:
        try:
            data = await reader.read(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return False
        parser.feed_data(data)
        if answer.begun and not started:
            started = True
            status = parser.get_status_code()
            start = {"type": "http.response.start", "status": status, "headers": answer.headers}
            await send(start)
        if answer.pieces and not answer.complete:
            body = b"".join(answer.pieces)
            answer.pieces.clear()
            await send({"type": "http.response.body", "body": body, "more_body": True})
    last = b"".join(answer.pieces)
    await send({"type": "http.response.body", "body": last, "more_body": False})
    return True
