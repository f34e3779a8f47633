"""Covers pd_router.app, answer and prepare over a real socket and the `openai` client: what
goes to the workers for a request, and what comes back, streaming and not."""

import asyncio
from dataclasses import fields, replace
from typing import Any

import pytest

from pd_router.types import Limits, Sampling
from pd_router.wire import sampling_to_pb
from tests import client
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says

HI: Any = [{"role": "user", "content": "hi"}]
FAMILY = "👨‍👩‍👧"  # many tokens of the tiny model, none of them whole characters


async def streamed(r: Rig, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed chat, [DONE] checked and left out."""
    whole = {"model": MODEL, "messages": HI, "stream": True} | body
    response = await client.request(r.http.host, r.http.port, "POST", "/v1/chat/completions", whole)
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [data async for _, data in response.events()]
    await response.close()
    assert events.pop() == "[DONE]"
    return [client.json.loads(event) for event in events]


def text_of(events: list[dict[str, Any]], choice: int = 0) -> str:
    choices = [c for event in events for c in event["choices"] if c["index"] == choice]
    return "".join(c["delta"].get("content", "") for c in choices)


@pytest.mark.parametrize(
    "name",
    [
        "x-prefiller-host-port",
        "x-prefiller-hosts-ports",
        "x-decoder-host-port",
        "x-gateway-destination-endpoint",
        "x-worker-id",
        "x-worker-instance-id",
        "x-prefill-instance-id",
        "x-data-parallel-rank",
        "x-sticky-session",
        "x-forwarded-host",
    ],
)
def test_headers_choose_no_worker(name: str) -> None:
    """What workers hear of a request is the same with and without such a header."""

    async def scenario() -> None:
        async with rig() as r:
            r.sessions.script = says(r.tokens("ok"))
            body = {"model": MODEL, "messages": HI, "seed": 1}
            address = (r.http.host, r.http.port, "POST", "/v1/chat/completions")
            for headers in ({}, {name: "127.0.0.1:1"}):
                response = await client.request(*address, body, headers)
                assert response.status == 200
                await response.body()
                await response.close()
            plain, given = (
                replace(g.request, request_id="", deadline_s=1.0) for g in r.sessions.started
            )
            assert given == plain

    go(scenario())


# ---- whole and streamed answers ------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["Hello wörld", f"a {FAMILY} b", "ü", ""])
def test_a_chat(stream: bool, text: str) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            tokens = r.tokens(text)
            r.sessions.script = says(tokens)
            if stream:
                events = await streamed(r, stream_options={"include_usage": True})
                usage = events[-1]["usage"]
                first = events[0]["choices"][0]["delta"]
                assert first["role"] == "assistant"
                assert not any("role" in e["choices"][0]["delta"] for e in events[1:-1])
                assert events[-2]["choices"][0]["finish_reason"] == "stop"
                assert text_of(events) == text
            else:
                answer = await api.chat.completions.create(model=MODEL, messages=HI)
                assert answer.usage is not None
                usage = answer.usage.model_dump()
                assert answer.choices[0].message.content == text
                assert answer.choices[0].message.role == "assistant"
                assert answer.choices[0].finish_reason == "stop"
            prompt = len(r.sessions.started[0].request.token_ids)
            assert usage["completion_tokens"] == len(tokens) + 1  # the end token counts
            assert usage["prompt_tokens"] == prompt
            assert usage["total_tokens"] == prompt + len(tokens) + 1

    go(scenario())


def test_the_openai_client_streams() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says(r.tokens("Hello there"))
            stream = await api.chat.completions.create(model=MODEL, messages=HI, stream=True)
            parts = [event.choices[0].delta.content async for event in stream]
            assert "".join(part or "" for part in parts) == "Hello there"
            texts = await api.completions.create(model=MODEL, prompt="x", stream=True)
            assert "".join([event.choices[0].text async for event in texts]) == "Hello there"

    go(scenario())


def test_what_the_workers_get() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says([])
            await api.chat.completions.create(
                model=MODEL,
                messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
                temperature=0.5,
                top_p=0.9,
                seed=7,
                max_tokens=5,
                n=2,
                logprobs=True,
                top_logprobs=3,
                presence_penalty=0.25,
                frequency_penalty=-0.5,
                logit_bias={"5": 2.5},
                extra_body={
                    "repetition_penalty": 1.25,
                    "top_k": 4,
                    "min_p": 0.1,
                    "min_tokens": 2,
                    "stop_token_ids": [9, 2],
                    "cache_salt": "tenant",
                },
            )
            request = r.sessions.started[0].request
            prompt = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
            assert list(request.token_ids) == r.tokens(prompt + "<|im_start|>assistant\n")
            sampling = request.sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
            assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 7, 5)
            assert (sampling.logprobs, sampling.top_logprobs) == (True, 3)
            assert (sampling.min_tokens, sampling.stop_token_ids) == (2, (9, 2))
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
            assert (sampling.repetition_penalty, sampling.logit_bias) == (1.25, ((5, 2.5),))
            assert (request.choices, request.cache_salt) == (2, b"tenant")
            assert 0 < request.deadline_s <= 600

    go(scenario())


def test_all_of_sampling_goes_over_the_wire() -> None:
    sampling = Sampling(
        max_tokens=5,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        seed=2**64 - 1,
        logprobs=True,
        top_logprobs=2,
        min_tokens=1,
        ignore_eos=True,
        stop_token_ids=(7, 8),
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias=((3, 1.5), (9, -100.0)),
        grammar="start: /a/",
    )
    message = sampling_to_pb(sampling)
    for name in (field.name for field in fields(sampling)):
        found = getattr(message, name)
        if name == "stop_token_ids":
            found = tuple(found)
        elif name == "logit_bias":
            found = tuple(sorted(found.items()))
        assert found == getattr(sampling, name), name
        assert found != getattr(Sampling(max_tokens=1), name), f"{name} isn't tried"


@pytest.mark.parametrize(
    ("fields", "limits", "expected"),
    [
        ({}, Limits(100, 200), 100),
        ({"max_tokens": 2**31 - 1}, Limits(100, 200), 100),
        ({"max_completion_tokens": 100_000}, Limits(200, 100), 100),
        ({"max_tokens": 1}, Limits(100, 200), 1),
        ({}, None, None),
    ],
)
def test_max_tokens_is_cut_to_what_fits(
    fields: dict[str, Any], limits: Limits | None, expected: int | None
) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says([])
            r.workers.given_limits = limits
            body = {"model": MODEL, "messages": HI} | fields
            await api.post("/chat/completions", body=body, cast_to=object)
            request = r.sessions.started[0].request
            allowed = request.sampling.max_tokens
            if expected is None:
                assert allowed == 2**31 - 1  # the workers know their own limits
            else:
                assert allowed == min(expected, 100 - len(request.token_ids))

    go(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_zero_computes_nothing(stream: bool) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            if stream:
                options = {"include_usage": True}
                events = await streamed(r, max_tokens=0, stream_options=options)
                assert events[0]["choices"][0]["finish_reason"] == "length"
                usage = events[-1]["usage"]
            else:
                answer = await api.chat.completions.create(
                    model=MODEL, messages=HI, max_tokens=0, n=2
                )
                assert [c.finish_reason for c in answer.choices] == ["length", "length"]
                assert answer.choices[1].message.content == ""
                assert answer.usage is not None
                usage = answer.usage.model_dump()
            assert usage["completion_tokens"] == 0
            assert usage["prompt_tokens"] > 0
            assert r.sessions.started == []

    go(scenario())


def test_top_p_zero_is_greedy() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says([])
            await api.chat.completions.create(model=MODEL, messages=HI, top_p=0)
            sampling = r.sessions.started[0].request.sampling
            assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)

    go(scenario())


# ---- choices and prompts -----------------------------------------------------------------


async def _three_voices(generation: PlayedGeneration) -> None:
    """Choices of different lengths and endings, tokens interleaved."""
    a, b = 70, 71
    for choice in (2, 0, 1):
        generation.emit(a, choice=choice)
    generation.emit(2, "stop", choice=1)
    await asyncio.sleep(0)
    generation.emit(b, choice=0)
    generation.emit(b, "length", choice=2)
    await asyncio.sleep(0)
    generation.emit(2, "stop", choice=0)
    generation.done()


@pytest.mark.parametrize("stream", [False, True])
def test_three_choices(stream: bool) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = _three_voices
            one = r.texts.current
            assert one is not None
            a, b = one.token_bytes(70).decode(), one.token_bytes(71).decode()
            if stream:
                events = await streamed(r, n=3, stream_options={"include_usage": True})
                texts = [text_of(events, choice) for choice in range(3)]
                ends = [c for e in events for c in e["choices"] if c["finish_reason"]]
                finishes = {c["index"]: c["finish_reason"] for c in ends}
                roles = [c["delta"].get("role") for e in events for c in e["choices"]]
                assert roles.count("assistant") == 3
                usage = events[-1]["usage"]
            else:
                answer = await api.chat.completions.create(model=MODEL, messages=HI, n=3)
                texts = [c.message.content or "" for c in answer.choices]
                finishes = {c.index: c.finish_reason for c in answer.choices}
                assert answer.usage is not None
                usage = answer.usage.model_dump()
            assert texts == [a + b, a, a + b]
            assert finishes == {0: "stop", 1: "stop", 2: "length"}
            assert usage["completion_tokens"] == 7

    go(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_each_with_choices(stream: bool) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:

            async def echo(generation: PlayedGeneration) -> None:
                for choice in range(generation.request.choices):
                    generation.emit(generation.request.token_ids[0], choice=choice)
                    generation.emit(2, "stop", choice=choice)
                generation.timeline.cached_tokens = 1
                generation.done()

            r.sessions.script = echo
            prompts: Any = ["hello", "world"]
            texts = {}
            if stream:
                events = await api.completions.create(
                    model=MODEL,
                    prompt=prompts,
                    n=2,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                async for event in events:
                    for c in event.choices:
                        texts[c.index] = texts.get(c.index, "") + c.text
                    usage = event.usage
            else:
                answer = await api.completions.create(model=MODEL, prompt=prompts, n=2)
                texts = {c.index: c.text for c in answer.choices}
                usage = answer.usage
            first = [r.tokens("hello")[0], r.tokens("world")[0]]
            stack = r.texts.current
            assert stack is not None
            h, w = (stack.token_bytes(token).decode() for token in first)
            assert texts == {0: h, 1: h, 2: w, 3: w}
            assert usage is not None
            assert usage.completion_tokens == 8
            assert usage.prompt_tokens == len(r.tokens("hello")) + len(r.tokens("world"))
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == 2
            ids = {generation.request.request_id for generation in r.sessions.started}
            assert len(ids) == 2

    go(scenario())


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_prompts_as_tokens(prompt: Any) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says([])
            await api.completions.create(model=MODEL, prompt=prompt)
            assert r.sessions.started[0].request.token_ids == (5, 6, 7)

    go(scenario())


# ---- where text ends ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", "STOP", "one "),
        ("one STOP two", [" STOP", "two"], "one"),
        ("STOP at once", ["STOP"], ""),
        ("no end", "STOP", "no end"),
        ("held back ST", "STOP", "held back ST"),
        (f"x{FAMILY}y", FAMILY, "x"),
        ("a\n\nb", "\n\n", "a"),
    ],
)
def test_stop_strings(stream: bool, text: str, stop: Any, expected: str) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says(r.tokens(text))
            if stream:
                events = await streamed(r, stop=stop)
                assert text_of(events) == expected
                assert events[-1]["choices"][0]["finish_reason"] == "stop"
            else:
                answer = await api.chat.completions.create(model=MODEL, messages=HI, stop=stop)
                assert answer.choices[0].message.content == expected
                assert answer.choices[0].finish_reason == "stop"

    go(scenario())


def test_a_stop_string_cancels_what_would_go_on() -> None:
    async def scenario() -> None:
        async with rig() as r:
            request = asyncio.create_task(streamed(r, stop="END", n=2))
            generation = await r.sessions.generation()
            for choice in (0, 1):
                assert not generation.cancelled.is_set()
                for token in r.tokens("an END and more"):
                    generation.emit(token, choice=choice)
            events = await request
            assert [text_of(events, choice) for choice in (0, 1)] == ["an ", "an "]
            await generation.cancelled.wait()

    go(scenario())


def test_stop_tokens_hold_where_end_tokens_are_ignored() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            tokens = r.tokens("abc")
            r.sessions.script = says([2, *tokens], "length")
            answer = await api.chat.completions.create(
                model=MODEL,
                messages=HI,
                extra_body={"ignore_eos": True, "stop_token_ids": [tokens[1]]},
            )
            assert answer.choices[0].message.content == "a"
            assert answer.choices[0].finish_reason == "stop"
            sampling = r.sessions.started[0].request.sampling
            assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (tokens[1],))
            await r.sessions.started[0].cancelled.wait()

    go(scenario())


def test_stop_strings_wait_for_min_tokens() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            tokens = r.tokens("x x x")
            r.sessions.script = says(tokens)
            answer = await api.chat.completions.create(
                model=MODEL, messages=HI, stop="x", extra_body={"min_tokens": len(tokens) - 1}
            )
            assert answer.choices[0].message.content == "x x "

    go(scenario())


def test_a_character_that_never_ends_shows_as_a_replacement() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says(r.tokens("a🙂")[:-1], "length")
            answer = await api.chat.completions.create(model=MODEL, messages=HI)
            assert answer.choices[0].message.content == "a\N{REPLACEMENT CHARACTER}"
            assert answer.choices[0].finish_reason == "length"

    go(scenario())


# ---- streams, event by event --------------------------------------------------------------


def test_text_leaves_at_once_and_nothing_before_it() -> None:
    async def scenario() -> None:
        async with rig() as r:
            body = {"model": MODEL, "messages": HI, "stream": True, "stop": ["🙂!"]}
            host, port = r.http.host, r.http.port
            asking = asyncio.create_task(
                client.request(host, port, "POST", "/v1/chat/completions", body)
            )
            generation = await r.sessions.generation()
            *smile, bang = r.tokens("🙂?")
            assert len(smile) > 1
            for token in smile:  # first half a character, then perhaps a stop string
                generation.emit(token)
                done, _ = await asyncio.wait({asking}, timeout=0.05)
                assert not done
            generation.emit(bang)
            response = await asking
            events = response.events()
            _, data = await anext(events)
            assert client.json.loads(data)["choices"][0]["delta"]["content"] == "🙂?"
            for word in ("a", "b"):
                generation.emit(r.tokens(word)[0])
                _, data = await anext(events)
                assert client.json.loads(data)["choices"][0]["delta"] == {"content": word}
            generation.emit(2, "stop")
            generation.done()
            assert [d async for _, d in events][-1] == "[DONE]"
            await response.close()

    go(scenario())


def test_usage_in_each_chunk() -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.script = says(r.tokens("abc"))
            options = {"include_usage": True, "continuous_usage_stats": True}
            events = await streamed(r, stream_options=options)
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert counts[-1] == 4

    go(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_cover_every_token(stream: bool) -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            tokens = r.tokens("a🙂")

            async def script(generation: PlayedGeneration) -> None:
                for number, token in enumerate([*tokens, 2]):
                    finish: Any = "stop" if token == 2 else None
                    top = ((token, -float(number)), (5, -9.0), (6, -10.0))
                    generation.emit(token, finish, logprob=-float(number), top=top)
                generation.done()

            r.sessions.script = script
            content: list[Any]
            if stream:
                events = await streamed(r, logprobs=True, top_logprobs=2)
                content = [
                    entry for e in events for entry in e["choices"][0]["logprobs"]["content"]
                ]
            else:
                answer = await api.chat.completions.create(
                    model=MODEL, messages=HI, logprobs=True, top_logprobs=2
                )
                logprobs = answer.choices[0].logprobs
                assert logprobs is not None
                assert logprobs.content is not None
                content = [entry.model_dump() for entry in logprobs.content]
            expected = [-float(number) for number in range(len(tokens) + 1)]
            assert [entry["logprob"] for entry in content] == expected
            spelled = b"".join(bytes(entry["bytes"]) for entry in content)
            assert spelled == "a🙂<|im_end|>".encode()
            assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)

    go(scenario())


def test_completion_logprobs() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            tokens = r.tokens("ab")

            async def script(generation: PlayedGeneration) -> None:
                for token in tokens:
                    generation.emit(token, logprob=-1.0, top=((token, -1.0),))
                generation.emit(2, "stop", logprob=-2.0)
                generation.done()

            r.sessions.script = script
            answer = await api.completions.create(model=MODEL, prompt="x", logprobs=1)
            logprobs = answer.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.tokens == ["a", "b", "<|im_end|>"]
            assert logprobs.token_logprobs == [-1.0, -1.0, -2.0]
            assert logprobs.text_offset == [0, 1, 2]
            assert logprobs.top_logprobs == [{"a": -1.0}, {"b": -1.0}, {}]

    go(scenario())


def test_token_ids_can_be_asked_for() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says([70, 71])
            answer = await api.chat.completions.create(
                model=MODEL, messages=HI, extra_body={"return_token_ids": True}
            )
            fields = answer.model_dump()
            assert fields["choices"][0]["token_ids"] == [70, 71, 2]
            assert fields["prompt_token_ids"] == list(r.sessions.started[0].request.token_ids)
            events = await streamed(r, return_token_ids=True)
            found = [t for e in events for c in e["choices"] for t in c["token_ids"]]
            assert found == [70, 71, 2]

    go(scenario())
