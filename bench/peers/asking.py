"""Streams of one load, and how each ended: right, wrong, and its longest silence."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import msgspec

PATH = "/v1/completions"
Count = Callable[[bytes], int]
"""Tokens in a whole answer's body: systems put them into events in their own ways."""


def by_words(body: bytes) -> int:
    """Of engines that say `bench.router.words`."""
    return body.count(b" ") - body.count(b"[")


def by_events(body: bytes) -> int:
    """Of systems that send an event a token, and one more that says why it ended."""
    return body.count(b"data: {") - 1


@dataclass(slots=True)
class Answer:
    """`wrong` is empty where all tokens came, and the end. `silence_s`: the longest time without
    a byte."""

    wrong: str = ""
    ttft_s: float = 0.0
    silence_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """`step_us`: the pace, microseconds a token, of engines that take it from a request."""

    prompt: str
    tokens: int
    step_us: int

    def http(self) -> bytes:
        body = msgspec.json.encode(
            {
                "model": "bench",
                "prompt": self.prompt,
                "max_tokens": self.tokens,
                "stream": True,
                "temperature": 0,
                "seed": self.step_us,
                "ignore_eos": True,
            }
        )
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class Stream(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._parts: list[bytes] = []
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._asked = self._heard = 0.0
        self._answer = Answer()
        self._transport: asyncio.Transport | None = None
        self.first = asyncio.Event()
        self.over: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._asked = self._heard = self._now()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._ask.http())

    def data_received(self, data: bytes) -> None:
        now = self._now()
        if not self.first.is_set() and b"data: " in data:
            self._answer.ttft_s = now - self._asked
            self.first.set()
        elif self.first.is_set():
            self._answer.silence_s = max(self._answer.silence_s, now - self._heard)
        self._heard = now
        self._parts.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.first.set()
        if not self.over.done():
            self.over.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def judged(self, count: Count) -> Answer:
        """Once it is over, or is given up."""
        answer, said = self._answer, b"".join(self._parts)
        head, _, body = said.partition(b"\r\n\r\n")
        answer.tokens = max(count(body), 0)
        if not self.over.done():
            answer.wrong = f"nothing for {self._now() - self._heard:.1f} s"
            answer.silence_s = max(answer.silence_s, self._now() - self._heard)
        elif not head.startswith(b"HTTP/1.1 200"):
            answer.wrong = (head.partition(b"\r\n")[0] + b" " + body[:200]).decode(
                "utf-8", "replace"
            )
        elif b"data: [DONE]" not in body:
            answer.wrong = "cut off"
        elif answer.tokens != self._ask.tokens:
            answer.wrong = f"{answer.tokens} tokens of {self._ask.tokens}"
        return answer


@dataclass(slots=True)
class Crowd:
    """Streams that were begun together."""

    streams: list[Stream] = field(default_factory=list)

    @classmethod
    async def begun(cls, port: int, asks: Sequence[Ask]) -> "Crowd":
        made, loop = cls(), asyncio.get_running_loop()
        for ask in asks:
            factory = partial(Stream, ask)
            _, stream = await loop.create_connection(factory, "127.0.0.1", port)
            made.streams.append(stream)
        return made

    async def answering(self, within_s: float) -> None:
        """TimeoutError: not all have begun."""
        async with asyncio.timeout(within_s):
            for stream in self.streams:
                await stream.first.wait()

    async def ended(self, within_s: float, count: Count) -> list[Answer]:
        """How they ended; who hasn't by then is given up."""
        await asyncio.wait([stream.over for stream in self.streams], timeout=within_s)
        found = [stream.judged(count) for stream in self.streams]
        for stream in self.streams:
            stream.close()
        return found
