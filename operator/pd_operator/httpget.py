"""One bounded HTTP request: probes, the routers' admin ports, readiness of the whole."""

import asyncio
import os
import re
from dataclasses import dataclass

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """What a kubelet's httpGet probe takes for success."""
        return 200 <= self.status < 400


class GetFailed(Exception):
    """No answer: refused, too late, too large, or not HTTP."""


async def get(
    host: str, port: int, path: str, *, timeout_s: float, max_bytes: int = 1 << 20
) -> Response:
    """GET with a deadline over all of it. Raises GetFailed; proxies are not used."""
    return await _ask("GET", host, port, path, b"", timeout_s, max_bytes)


async def post(
    host: str, port: int, path: str, body: bytes, *, timeout_s: float, max_bytes: int = 1 << 16
) -> Response:
    """POST of a JSON document, likewise."""
    return await _ask("POST", host, port, path, body, timeout_s, max_bytes)


async def _ask(
    method: str, host: str, port: int, path: str, body: bytes, timeout_s: float, max_bytes: int
) -> Response:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    head = f"{method} {path} HTTP/1.0\r\nHost: {place}\r\nConnection: close\r\n"
    if method == "POST":
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(host, port, f"{head}\r\n".encode() + body, max_bytes)
    except TimeoutError:
        raise GetFailed(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise GetFailed(reason) from error


async def _exchange(host: str, port: int, request: bytes, max_bytes: int) -> Response:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        raw = b""
        while chunk := await reader.read(65536):
            raw += chunk
            if len(raw) > max_bytes:
                raise GetFailed(f"answer is larger than {max_bytes} bytes")
    finally:
        writer.transport.abort()
    head, separator, body = raw.partition(b"\r\n\r\n")
    match = _STATUS_LINE.match(head)
    if match is None or not separator:
        raise GetFailed("the answer is not HTTP")
    return Response(int(match.group(1)), body)
