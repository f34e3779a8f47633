"""The operator's own HTTP: /metrics, /livez, /readyz. Plain, tiny, and in the operator's loop,
so that an answer of /livez is the proof that the loop turns."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

log = logging.getLogger("pd_operator.web")

READ_S = 5.0
MAX_HEAD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[], Page]]
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}


@asynccontextmanager
async def serving(places: Mapping[tuple[str, int], Pages]) -> AsyncIterator[list[int]]:
    """Serves pages on each (host, port); the ports that they got."""
    async with AsyncExitStack() as stack:
        ports = []
        for (host, port), pages in places.items():
            server = await asyncio.start_server(partial(_answer, pages), host, port)
            stack.callback(server.close)
            ports.append(server.sockets[0].getsockname()[1])
        yield ports


async def _answer(pages: Pages, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        try:
            async with asyncio.timeout(READ_S):
                head = await reader.readuntil(b"\r\n\r\n")
                page = _page(pages, head)
                reason = _REASONS.get(page.status, "Error")
                writer.write(
                    f"HTTP/1.1 {page.status} {reason}\r\n"
                    f"Content-Type: {page.content_type}\r\n"
                    f"Content-Length: {len(page.body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                    + (b"" if head.startswith(b"HEAD ") else page.body)
                )
                await writer.drain()
        finally:
            writer.close()


def _page(pages: Pages, head: bytes) -> Page:
    parts = head.split(b"\r\n", 1)[0].split(b" ")
    if len(parts) != 3 or len(head) > MAX_HEAD_BYTES:
        return Page(b"bad request\n", 400)
    if parts[0] not in (b"GET", b"HEAD"):
        return Page(b"only GET\n", 405)
    path = parts[1].partition(b"?")[0].decode(errors="replace")
    make = pages.get(path)
    if make is None:
        return Page(b"not found\n", 404)
    try:
        return make()
    except Exception:
        log.exception("page %s", path)
        return Page(b"error\n", 500)
