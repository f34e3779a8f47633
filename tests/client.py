"""A plain HTTP client for tests and benches: one socket a request, events with their times.

It is light (no library between the socket and the event), and it can do what a good
client doesn't: stop reading, or hang up in the middle.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass(slots=True)
class Response:
    """A response whose body is read or streamed by its owner, who also closes it."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's parts as they come, without the transfer coding."""
        if self.headers.get("transfer-encoding") != "chunked":
            left = int(self.headers.get("content-length", "0"))
            while left:
                part = await self.reader.read(left)
                if not part:
                    raise ConnectionError(f"the body ended {left} bytes early")
                left -= len(part)
                yield part
            return
        while size := int(await self.reader.readline() or b"0", 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readline()

    async def body(self) -> bytes:
        return b"".join([part async for part in self.chunks()])

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[tuple[float, str]]:
        """(time.perf_counter(), data) of each server-sent event, `[DONE]` included."""
        rest = b""
        async for part in self.chunks():
            now = time.perf_counter()
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield now, event[6:].decode()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except (ConnectionError, TimeoutError):
            return

    def hang_up(self) -> None:
        """Ends the connection at once, with unread data still in it."""
        self.writer.transport.abort()


async def request(
    host: str,
    port: int,
    method: str,
    path: str,
    body: bytes | Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Sends one request and reads the response's head."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode() if isinstance(body, Mapping) else body or b""
    lines = {
        "host": f"{host}:{port}",
        "content-type": "application/json",
        "content-length": str(len(data)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
        return await read_head(reader, writer)
    except BaseException:  # cancelled too: then the caller means to hang up
        writer.transport.abort()
        raise


async def read_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Response:
    status_line = await reader.readline()
    if not status_line:
        raise ConnectionError("closed without an answer")
    headers = {}
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Response(int(status_line.split()[1]), headers, reader, writer)


@dataclass(slots=True)
class Streamed:
    """What one streamed answer brought. Times are time.perf_counter() seconds."""

    sent: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)  # of each event with content
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False  # `[DONE]` came

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def stream(host: str, port: int, path: str, body: Mapping[str, Any]) -> Streamed:
    """One streamed request to its end, for n = 1. Errors are values, not exceptions."""
    result = Streamed()
    async for _ in follow(host, port, path, body, result):
        pass
    return result


async def follow(
    host: str, port: int, path: str, body: Mapping[str, Any], result: Streamed
) -> AsyncIterator[float]:
    """Fills `result` and yields the time of each event with content."""
    result.sent = time.perf_counter()
    response = await request(host, port, "POST", path, {**body, "stream": True})
    try:
        result.status = response.status
        if response.status != 200:
            result.error = (await response.json())["error"]
            return
        async for at, data in response.events():
            if data == DONE:
                result.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                result.error = event["error"]
                continue
            result.usage = event.get("usage") or result.usage
            for choice in event["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content")
                result.finish = choice["finish_reason"] or result.finish
                if piece:
                    result.text += piece
                    result.times.append(at)
                    yield at
    finally:
        await response.close()
