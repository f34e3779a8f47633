"""A plain HTTP server in the test's own loop: answers by path, records what was asked."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Pages:
    """Path -> (status, body). A path that isn't there gets no answer at all."""

    pages: Mapping[str, tuple[int, bytes]]
    port: int = 0
    asked: list[str] = field(default_factory=list)
    raw: bytes = b""
    """Sent instead of any page when it is set."""


@asynccontextmanager
async def serving(pages: Mapping[str, tuple[int, bytes]], raw: bytes = b"") -> AsyncIterator[Pages]:
    made = Pages(pages, raw=raw)

    answering: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split()[1].decode()
        made.asked.append(path)
        if made.raw:
            writer.write(made.raw)
        elif path in made.pages:
            status, body = made.pages[path]
            writer.write(b"HTTP/1.1 %d x\r\nA: b\r\n\r\n%b" % (status, body))
        else:
            await reader.read()  # until the client gives up
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        try:
            yield made
        finally:
            await asyncio.gather(*answering)
