"""Instant HTTP engines for routers that forward HTTP: a prefill and a decode port.

`python -m bench.router.engine --model-dir DIR --prefill PORT --decode PORT`. Both dialects
of prefill and decode are answered: one request after the other with transfer parameters
(vLLM), or both at once with a bootstrap room (SGLang). Decode sends one event a token;
the request's `seed` is its pace in microseconds a token. Like a real engine's step, one
timer serves all streams of a pace; a stream that isn't read waits and catches up.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop

from bench.router.words import words

_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}]}\n\n'
)
_ABOUT: dict[str, dict[str, Any]] = {
    "/v1/models": {"object": "list", "data": [{"id": "bench", "object": "model"}]},
    "/version": {"version": "0.11.0"},
}


def _chunk(text: str, finish: bytes) -> bytes:
    event = _EVENT % (text.encode(), finish)
    return b"%x\r\n%b\r\n" % (len(event), event)


class Pace:
    """All streams of one pace, stepped together."""

    def __init__(self, step_s: float, events: list[bytes], last: list[bytes]) -> None:
        self.step_s = step_s
        self.streams: set[Engine] = set()
        self._events = events
        self._last = last
        self._timer: asyncio.TimerHandle | None = None

    def join(self, stream: "Engine") -> None:
        self.streams.add(stream)
        self._send(stream, time.monotonic())
        if self._timer is None and self.streams:
            self._timer = asyncio.get_running_loop().call_later(self.step_s, self._step)

    def _step(self) -> None:
        now = time.monotonic()
        for stream in list(self.streams):
            if not stream.paused:
                self._send(stream, now)
        self._timer = None
        if self.streams:
            self._timer = asyncio.get_running_loop().call_later(self.step_s, self._step)

    def _send(self, stream: "Engine", now: float) -> None:
        due = min(stream.tokens, 1 + int((now - stream.began) / self.step_s))
        if due <= stream.sent:
            return
        events, count = self._events, len(self._events)
        pieces = [events[i % count] for i in range(stream.sent, due)]
        stream.sent = due
        if due == stream.tokens:
            pieces[-1] = self._last[(due - 1) % count] + _DONE
            self.streams.discard(stream)
        stream.transport.write(b"".join(pieces))


class Engine(asyncio.Protocol):
    """One connection of a router."""

    transport: asyncio.Transport

    def __init__(self, prefill: bool, pace: Callable[[int], Pace]) -> None:
        self.paused = False
        self.tokens = self.sent = 0
        self.began = 0.0
        self._prefill = prefill
        self._pace = pace
        self._current: Pace | None = None
        self._parser: Any = httptools.HttpRequestParser(self)
        self._body = bytearray()
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._current is not None:
            self._current.streams.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_begin(self) -> None:
        self._body.clear()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self._body:
            about = _ABOUT.get(self._url.decode(), {"status": "ok"})
            self._answer(about)
            return
        request = msgspec.json.decode(self._body)
        if request.get("stream"):
            self.tokens = 1 if self._prefill else int(request["max_tokens"])
            self.sent = 0
            self.began = time.monotonic()
            self.transport.write(_STREAM_HEAD)
            self._current = self._pace(int(request.get("seed") or 1000))
            self._current.join(self)
            return
        choice = {"index": 0, "text": " a", "logprobs": None, "finish_reason": "length"}
        transfer = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [1]}
        self._answer(
            {
                "id": "cmpl-0123456789abcdef",
                "object": "text_completion",
                "created": 1700000000,
                "model": "bench",
                "choices": [choice],
                "usage": {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65},
                "kv_transfer_params": transfer,
            }
        )

    def _answer(self, document: dict[str, Any]) -> None:
        body = msgspec.json.encode(document)
        self.transport.write(_JSON_HEAD % (len(body), body))


async def serve(model: Path, prefill: int, decode: int) -> None:
    texts = [text for _, text in words(model)]
    events = [_chunk(text, b"null") for text in texts]
    last = [_chunk(text, b'"length"') for text in texts]
    paces: dict[int, Pace] = {}

    def pace(step_us: int) -> Pace:
        return paces.setdefault(step_us, Pace(step_us / 1e6, events, last))

    loop = asyncio.get_running_loop()
    for port, does_prefill in ((prefill, True), (decode, False)):
        if port:
            await loop.create_server(
                partial(Engine, does_prefill, pace),
                "127.0.0.1",
                port,
                backlog=4096,
            )
    print("serving", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--prefill", type=int, default=0, help="0: none")
    parser.add_argument("--decode", type=int, default=0, help="0: none")
    given = parser.parse_args()
    uvloop.run(serve(given.model_dir, given.prefill, given.decode))


if __name__ == "__main__":
    main()
