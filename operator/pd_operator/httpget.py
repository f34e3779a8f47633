"""One bounded HTTP GET: probes, the routers' admin ports, readiness of the whole."""

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
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(host, port, path, max_bytes)
    except TimeoutError:
        raise GetFailed(f"no answer within {timeout_s:g} s") from None
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise GetFailed(reason) from error


async def _get(host: str, port: int, path: str, max_bytes: int) -> Response:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
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
