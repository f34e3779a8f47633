"""Covers bench.peers: how an answer is judged, and what counts as better."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bench.peers import __main__ as report
from bench.peers.asking import Ask, Crowd, by_events, by_words

Run = Callable[[Coroutine[Any, Any, Any]], Any]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices":[{"text":" a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def ended(writer: asyncio.StreamWriter, over: asyncio.Event) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    over.set()


def test_tokens_are_counted_as_each_system_writes_them() -> None:
    assert by_words(EVENT * 3 + DONE) == 3
    assert by_events(b'data: {"text":""}\n\n' * 4 + DONE) == 3


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (HEAD + EVENT * 3 + DONE, ""),
        (HEAD + EVENT * 2 + DONE, "2 tokens of 3"),
        (HEAD + EVENT * 3, "cut off"),
        (b"HTTP/1.1 503 Unavailable\r\n\r\nno worker", "HTTP/1.1 503 Unavailable no worker"),
        (b"", " "),
    ],
)
def test_how_a_stream_ended(run: Run, said: bytes, wrong: str) -> None:
    async def body() -> str:
        over = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await ended(writer, over)

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            crowd = await Crowd.begun(server.sockets[0].getsockname()[1], [Ask("p", 3, 1000)])
            await crowd.answering(10)
            [found] = await crowd.ended(10, by_words)
            await over.wait()
        return found.wrong

    assert run(body()) == wrong


def test_who_never_ends_is_given_up(run: Run) -> None:
    async def body() -> str:
        over = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(HEAD + EVENT)
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
            await ended(writer, over)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with server:
            crowd = await Crowd.begun(server.sockets[0].getsockname()[1], [Ask("p", 3, 1000)])
            await crowd.answering(10)
            [found] = await crowd.ended(0.05, by_words)
            await over.wait()
        return found.wrong

    assert run(body()).startswith("nothing for")


def test_what_is_better() -> None:
    mine = {"us_per_token": 10.0, "kill_wrong": 1, "kill_silence_s": 2.0, "stop_wrong": 0}
    assert report.better(mine, dict(mine)) == []
    other = {"us_per_token": 9.8, "kill_wrong": 0, "kill_silence_s": 1.0, "stop_wrong": 3}
    assert report.better(mine, other) == ["kill_silence_s 1 and not 2", "kill_wrong 0 and not 1"]
    assert report.better(mine, {**other, "kill_wrong": 16}) == [], "who loses streams isn't sooner"
