"""The load generator: so many streams at a time, each followed by the next.

It counts tokens by single bytes (see `words`), whoever sent them and however cut.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

PATH = "/v1/completions"
_END = b"0\r\n\r\n"
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked for. `step_us`: the engines' pace, microseconds a token."""

    live: int
    tokens: int
    step_us: int


@dataclass(slots=True)
class Counts:
    """What came, since the last `reset`."""

    tokens: int = 0
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    def reset(self) -> None:
        self.tokens = self.requests = 0
        self.wrong.clear()
        self.ttft_s.clear()


class Stream(asyncio.Protocol):
    """One connection: asks, reads the answer to its end, asks again."""

    transport: asyncio.Transport

    def __init__(self, request: bytes, tokens: int, counts: Counts) -> None:
        self._request = request
        self._tokens = tokens
        self._counts = counts
        self._head = b""
        self._in_body = False
        self._first = False
        self._got = 0
        self._tail = b""
        self._asked = 0.0
        self._again = True
        self.over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self._counts.wrong.append(f"cut after {self._got} tokens: {exc}")
            self.over.set_result(None)

    def finish(self) -> None:
        """Asks no more after this answer."""
        self._again = False

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._in_body = True
            if not head.startswith(b"HTTP/1.1 200"):
                self._wrong(head.partition(b"\r\n")[0] + data)
                return
        count = data.count(b" ") - data.count(b"[")
        if count:
            self._got += count
            self._counts.tokens += count
            if not self._first:
                self._first = True
                self._counts.ttft_s.append(time.perf_counter() - self._asked)
        self._tail = (self._tail + data)[-5:] if len(data) < len(_END) else data[-5:]
        if self._tail == _END:
            self._answered()

    def _ask(self) -> None:
        self._head = self._tail = b""
        self._in_body = self._first = False
        self._got = 0
        self._asked = time.perf_counter()
        self.transport.write(self._request)

    def _answered(self) -> None:
        self._counts.requests += 1
        if self._got != self._tokens:
            self._wrong(b"%d tokens of %d" % (self._got, self._tokens))
        elif self._again:
            self._ask()
        else:
            self._end()

    def _wrong(self, what: bytes) -> None:
        self._counts.wrong.append(what[:300].decode("utf-8", "replace"))
        self._end()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
        self.transport.close()


def request(prompt: str, shape: Shape, port: int) -> bytes:
    """The whole HTTP request."""
    body = msgspec.json.encode(
        {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": shape.tokens,
            "stream": True,
            "temperature": 0,
            "seed": shape.step_us,
        }
    )
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Load:
    """Streams that run while the body of `running` does."""

    def __init__(self, port: int, shape: Shape, prompts: Sequence[str]) -> None:
        self.counts = Counts()
        self._port = port
        self._shape = shape
        self._prompts = prompts
        self._streams: list[Stream] = []

    async def __aenter__(self) -> "Load":
        shape, prompts = self._shape, self._prompts
        for number in range(shape.live):
            await self._open(request(prompts[number % len(prompts)], shape, self._port))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for stream in self._streams:
            stream.transport.abort()
            if not stream.over.done():
                stream.over.set_result(None)

    async def answering(self) -> None:
        """Waits until so many first tokens have come as there are streams."""
        async with asyncio.timeout(_DEADLINE_S):
            while len(self.counts.ttft_s) < self._shape.live and not self.counts.wrong:
                await asyncio.sleep(0.02)

    async def finish(self) -> None:
        """Waits until each stream's answer has come."""
        for stream in self._streams:
            stream.finish()
        async with asyncio.timeout(_DEADLINE_S):
            await asyncio.gather(*(stream.over for stream in self._streams))

    async def _open(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(
            lambda: Stream(request, self._shape.tokens, self.counts), "127.0.0.1", self._port
        )
        self._streams.append(stream)
