"""The soak's client: a kept connection that asks one thing after the other, cheaply."""

import asyncio
from dataclasses import dataclass
from typing import cast

import httptools

CONNECT_S = 10.0
ANSWER_S = 120.0
"""No request may take longer, whatever happens to the workers."""


class Broken(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` without the transfer coding."""

    status: int
    body: bytes


class _Wire(asyncio.Protocol):
    """One connection. At most one request is under way on it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.open = False
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._waiting: asyncio.Future[Answer] | None = None

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        self._parser = httptools.HttpResponseParser(self)
        self._body.clear()
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._waiting

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Broken(f"no HTTP: {error}: {data[:200]!r}"))
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._end(Broken(f"cut off: {exc}; {sum(map(len, self._body))} bytes had come"))

    # what httptools calls

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            status = self._parser.get_status_code()
            self._waiting.set_result(Answer(status, b"".join(self._body)))
        if not self._parser.should_keep_alive():
            self.open = False
            self.transport.close()

    def _end(self, broken: Broken) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(broken)


class Client:
    """Asks on one connection, which is made again when it has gone."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._wire: _Wire | None = None

    async def ask(self, request: bytes) -> Answer:
        """Raises Broken, OSError, or TimeoutError."""
        wire = await self._connected()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await wire.ask(request)
        except TimeoutError:
            self.hang_up()
            raise

    async def leave(self, request: bytes, after_s: float) -> Answer | None:
        """Asks and hangs up after so long; the answer, if it was there before."""
        wire = await self._connected()
        try:
            async with asyncio.timeout(after_s):
                return await wire.ask(request)
        except TimeoutError:
            self.hang_up()
            return None

    async def write(self, part: bytes) -> None:
        """Sends what is no whole request, and hangs up."""
        (await self._connected()).transport.write(part)
        await asyncio.sleep(0)
        self.hang_up()

    def hang_up(self) -> None:
        """At once, with what may be unread in the connection."""
        if self._wire is not None:
            self._wire.transport.abort()
            self._wire = None

    async def _connected(self) -> _Wire:
        if self._wire is None or not self._wire.open or self._wire.transport.is_closing():
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(CONNECT_S):
                _, self._wire = await loop.create_connection(_Wire, self._host, self._port)
        return self._wire
