"""One streamed answer over the OpenAI API, without a client library."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

_LINE_BYTES = 1 << 20


class ChatFailed(Exception):
    """The server refused, broke off, or said something that isn't the API."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the answer; `reply_id` names the answer."""

    reply_id: str
    text: str


async def stream(
    host: str, port: int, body: dict[str, Any], *, timeout_s: float
) -> AsyncIterator[Piece]:
    """The answer's pieces as they come. `timeout_s` bounds the wait for each line."""
    async for event in events(host, port, "/v1/chat/completions", body, timeout_s=timeout_s):
        yield _piece(event)


async def events(
    host: str, port: int, path: str, body: dict[str, Any], *, timeout_s: float, key: str = ""
) -> AsyncIterator[dict[str, Any]]:
    """A streamed answer's events as they come. `key`: an API key, where one is needed."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port, limit=_LINE_BYTES)
    except (OSError, TimeoutError) as error:
        raise ChatFailed(f"can't connect to {host}:{port}: {error}") from error
    try:
        data = json.dumps({**body, "stream": True}).encode()
        # The router sends whole events a chunk, so chunk sizes are lines of their own.
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        )
        head += f"Authorization: Bearer {key}\r\n\r\n" if key else "\r\n"
        writer.write(head.encode() + data)
        status = await _status(reader, timeout_s)
        if status != 200:
            raise ChatFailed(f"status {status}: {(await reader.read(4096)).decode()}")
        while (data_of := await _event(reader, timeout_s)) != "[DONE]":
            yield _decoded(data_of)
    finally:
        writer.transport.abort()


async def _line(reader: asyncio.StreamReader, timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            line = await reader.readline()
    except (OSError, ValueError, TimeoutError) as error:
        raise ChatFailed(f"the answer stopped: {str(error) or 'no more of it came'}") from error
    if not line:
        raise ChatFailed("the answer broke off")
    return line.decode().rstrip("\r\n")


async def _status(reader: asyncio.StreamReader, timeout_s: float) -> int:
    """The status of the response; its headers are read past."""
    words = (await _line(reader, timeout_s)).split()
    while await _line(reader, timeout_s):
        continue
    if len(words) < 2 or not words[1].isdecimal():
        raise ChatFailed("the answer is not HTTP")
    return int(words[1])


async def _event(reader: asyncio.StreamReader, timeout_s: float) -> str:
    """The data of the next server-sent event."""
    while True:
        line = await _line(reader, timeout_s)
        if line.startswith("data:"):
            return line.removeprefix("data:").strip()


def _decoded(event: str) -> dict[str, Any]:
    try:
        data = json.loads(event)
        if "error" in data:
            raise ChatFailed(str(data["error"].get("message", data["error"])))
        return dict(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise ChatFailed(f"not an event of the API: {event[:200]}") from error


def _piece(event: dict[str, Any]) -> Piece:
    try:
        choices = event["choices"]
        text = choices[0]["delta"].get("content") if choices else None
        return Piece(str(event["id"]), text or "")
    except (TypeError, KeyError, AttributeError) as error:
        raise ChatFailed(f"not an event of the API: {str(event)[:200]}") from error
