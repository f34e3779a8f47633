"""Covers the way of tokens past the request's coroutine: one event a token where nothing has
to be known but its text, in order with all others, and JSON whatever the text is."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router import http
from pd_router.text import TextStack
from tests import client
from tests.pd_router.http_rig import MODEL, Rig, go, rig, tiny_bundle

STACK = TextStack(tiny_bundle())


async def ask(r: Rig, **fields: Any) -> client.Response:
    body = {"model": MODEL, "prompt": "Hi", "stream": True, "max_tokens": 100} | fields
    return await client.request(r.http.host, r.http.port, "POST", "/v1/completions", body)


async def texts(events: AsyncIterator[tuple[float, str]], count: int) -> list[str]:
    return [json.loads((await anext(events))[1])["choices"][0]["text"] for _ in range(count)]


async def begun(token: int, r: Rig, **fields: Any) -> tuple[Any, client.Response, Any]:
    """A stream whose first token is out: its generation, the response, its events."""
    asking = asyncio.create_task(ask(r, **fields))
    generation = await r.sessions.generation()
    generation.emit(token)
    response = await asking
    return generation, response, response.events()


PLAIN: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stop_token_ids": [3]},
]
CAREFUL: list[dict[str, Any]] = [
    {"stop": ["zzz"]},
    {"logprobs": 1},
    {"return_token_ids": True},
    {"stream_options": {"continuous_usage_stats": True}},
    {"ignore_eos": True, "stop_token_ids": [3]},
]


@pytest.mark.parametrize(
    ("fields", "events_a_step"), [*((f, 3) for f in PLAIN), *((f, 1) for f in CAREFUL)]
)
def test_a_step_of_three_tokens(fields: dict[str, Any], events_a_step: int) -> None:
    """In one go: each goes out at once, or the coroutine says all that has come."""

    async def scenario() -> None:
        async with rig() as r:
            a, b, c = r.tokens("abc")
            generation, response, events = await begun(a, r, **fields)
            assert await texts(events, 1) == ["a"]
            for token in (a, b, c):
                generation.emit(token)
            assert await texts(events, events_a_step) in (["a", "b", "c"], ["abc"])
            generation.emit(a)
            generation.emit(2, "stop")
            generation.done()
            rest = [data async for _, data in events]
            assert rest[-1] == "[DONE]"
            said = [c["text"] for data in rest[:-1] for c in json.loads(data)["choices"]]
            assert "".join(said) == "a"
            await response.close()

    go(scenario())


def test_choices_stay_apart() -> None:
    async def scenario() -> None:
        async with rig() as r:
            asking = asyncio.create_task(ask(r, n=2))
            generation = await r.sessions.generation()
            words = {0: r.tokens("north wind"), 1: r.tokens("south sea")}
            for place in range(max(map(len, words.values()))):
                for choice, tokens in words.items():
                    if place < len(tokens):
                        generation.emit(tokens[place], choice=choice)
                await asyncio.sleep(0)
            for choice in words:
                generation.emit(2, "stop", choice=choice)
            generation.done()
            said = {0: "", 1: ""}
            response = await asking
            async for _, data in response.events():
                if data != "[DONE]":
                    choice = json.loads(data)["choices"][0]
                    said[choice["index"]] += choice["text"]
            assert said == {0: "north wind", 1: "south sea"}
            await response.close()

    go(scenario())


def test_an_answers_end_takes_along_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the router rests between two passes over its clients: a minute here."""
    monkeypatch.setattr(http, "REST_RATIO", 1e12)
    monkeypatch.setattr(http, "LONGEST_REST_S", 60.0)

    async def scenario() -> None:
        async with rig() as r:
            a, b, c = r.tokens("abc")
            generation, response, events = await begun(a, r)
            assert await texts(events, 1) == ["a"]
            generation.emit(b)
            assert await texts(events, 1) == ["b"]  # nothing went before it: no rest
            for token in (c, a, b):
                generation.emit(token)
            generation.emit(2, "stop")
            generation.done()
            assert await texts(events, 3) == ["c", "a", "b"]
            rest = [data async for _, data in events]
            assert json.loads(rest[0])["choices"][0]["finish_reason"] == "stop"
            assert rest[1:] == ["[DONE]"]
            await response.close()

    go(scenario())


class PlayedLoop:
    """Notes when callbacks are due."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append((self.now, callback))

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.due.append((self.now + delay_s, callback))


@pytest.mark.parametrize(
    ("took_s", "pause_s", "rest_s"),
    [
        (0.0, 0.0, 0.0),
        (0.0002, 0.0, 0.002),
        (0.0002, 0.0015, 0.0005),  # of the rest
        (0.0002, 0.02, 0.0),  # which is long over
        (5.0, 0.0, 0.01),  # the longest
    ],
)
def test_a_rest_is_as_long_as_what_went_before(
    took_s: float, pause_s: float, rest_s: float
) -> None:
    loop: Any = PlayedLoop()

    class SlowPipe:
        def flush(self) -> None:
            loop.now += took_s

    flusher, pipe = http.Flusher(loop, lambda: loop.now), cast("http.Pipe", SlowPipe())
    flusher.add(pipe)
    (first,) = loop.due
    assert first[0] == loop.now
    loop.due.clear()
    first[1]()
    loop.now += pause_s
    flusher.add(pipe)
    (second,) = loop.due
    assert second[0] == pytest.approx(loop.now + rest_s)


@given(st.lists(st.integers(0, 520)))
def test_json_and_text_are_the_same(tokens: list[int]) -> None:
    """Parts of characters, special tokens and ids that there aren't included."""
    one, other = STACK.detokenizer(), STACK.detokenizer()
    for token in tokens:
        assert json.loads(b'"%b"' % one.push_json(token)) == other.push(token)
    assert one.finish() == other.finish()


@given(st.lists(st.integers(0, 511)), st.lists(st.booleans()))
def test_both_ways_can_be_mixed(tokens: list[int], ways: list[bool]) -> None:
    one, other = STACK.detokenizer(), STACK.detokenizer()
    for token, way in zip(tokens, ways, strict=False):
        text = json.loads(b'"%b"' % one.push_json(token)) if way else one.push(token)
        assert text == other.push(token)
    assert one.finish() == other.finish()
