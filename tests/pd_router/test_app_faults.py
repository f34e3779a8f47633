"""Covers pd_router.app and answer where things go wrong: refusals and failures at each stage,
clients that go away or don't read, missing workers, limits, deadlines, the drain."""

import asyncio
import json
import logging
import socket
from typing import Any

import openai
import pytest

from pd_core.failures import Failure, FailureKind
from pd_router import answer, app
from pd_router.types import Limits
from tests import client
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says, tiny_bundle
from tests.pd_router.test_hold import held

pytestmark = pytest.mark.slow

HI: Any = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HI} | fields


async def post(r: Rig, body: Any, path: str = CHAT, **headers: str) -> client.Response:
    return await client.request(r.http.host, r.http.port, "POST", path, body, headers)


async def error_of(response: client.Response) -> dict[str, Any]:
    body = await response.json()
    await response.close()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


async def works(r: Rig) -> None:
    """The server goes on."""
    script, refusal, bug = r.sessions.script, r.sessions.refusal, r.sessions.bug
    r.sessions.script, r.sessions.refusal, r.sessions.bug = says(r.tokens("fine")), None, None
    async with r.client() as api:
        reply = await api.chat.completions.create(model=MODEL, messages=HI)
        assert reply.choices[0].message.content == "fine"
    r.sessions.script, r.sessions.refusal, r.sessions.bug = script, refusal, bug


async def written_down(r: Rig, number: int = 1) -> dict[str, Any]:
    """The journal's latest entry, once so many requests are over."""
    while len(r.journal.find(None)) < number:
        await asyncio.sleep(0.005)
    return r.journal.find(None)[0]


# ---- failures --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [k for k in FailureKind if k is not FailureKind.CLIENT_GONE])
def test_each_refusal_has_its_status(kind: FailureKind, stream: bool) -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.refusal = failure = Failure(kind, "for this reason")
            response = await post(r, ask(stream=stream))
            assert response.status == failure.traits.http_status
            retry_after = failure.traits.retry_after_s
            expected = None if retry_after is None else str(retry_after)
            assert response.headers.get("retry-after") == expected
            error = await error_of(response)
            assert (error["code"], error["message"]) == (kind.value, "for this reason")
            assert error["type"] == failure.traits.openai_type
            await works(r)

    go(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_text_is_a_status(stream: bool) -> None:
    async def scenario() -> None:
        async with rig() as r:

            async def half_a_character(generation: PlayedGeneration) -> None:
                generation.emit(r.tokens("🙂")[0])
                await asyncio.sleep(0.02)
                generation.fail(FailureKind.WORKER_LOST)

            r.sessions.script = half_a_character
            response = await post(r, ask(stream=stream))
            assert response.status == 502
            assert (await error_of(response))["code"] == "worker_lost"
            await works(r)

    go(scenario())


def test_a_failure_after_the_first_text_ends_the_stream_with_an_error() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            tokens = r.tokens("ab")

            async def breaks(generation: PlayedGeneration) -> None:
                generation.emit(tokens[0])
                await asyncio.sleep(0.02)
                generation.emit(tokens[1])  # what came before the failure still goes out
                generation.fail(FailureKind.TRANSFER_FAILED, "a byte flipped")

            r.sessions.script = breaks
            response = await post(r, ask(stream=True))
            assert response.status == 200
            events = [json.loads(data) async for _, data in response.events()]
            await response.close()
            texts = [e["choices"][0]["delta"]["content"] for e in events[:-1]]
            assert texts == ["a", "b"]
            assert events[-1]["error"]["code"] == "transfer_failed"
            with pytest.raises(openai.APIError, match="a byte flipped"):
                async for _ in await api.chat.completions.create(
                    model=MODEL, messages=HI, stream=True
                ):
                    pass
            entry = await written_down(r)
            assert (entry["status"], entry["failure"]["kind"]) == (200, "transfer_failed")
            await works(r)

    go(scenario())


def test_a_failure_in_the_middle_of_a_whole_answer_is_a_status() -> None:
    async def scenario() -> None:
        async with rig() as r:

            async def breaks(generation: PlayedGeneration) -> None:
                generation.emit(70)
                await asyncio.sleep(0.02)
                generation.fail(FailureKind.STEP_FAILED)

            r.sessions.script = breaks
            response = await post(r, ask())
            assert response.status == 500
            assert (await error_of(response))["code"] == "step_failed"

    go(scenario())


def test_one_refused_prompt_cancels_the_others() -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.refuse_from = 1
            response = await post(r, {"model": MODEL, "prompt": ["a", "b"]}, "/v1/completions")
            assert response.status == 429
            await r.sessions.started[0].cancelled.wait()
            await response.close()

    go(scenario())


def test_a_bug_is_a_500_and_the_log_tells_no_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.bug = RuntimeError("a bug")
            with caplog.at_level(logging.DEBUG):
                response = await post(r, ask(messages=[{"role": "user", "content": "sesame"}]))
                assert response.status == 500
                assert (await error_of(response))["code"] == "internal_error"
            assert "a bug" in caplog.text
            assert "sesame" not in caplog.text
            await works(r)

    go(scenario())


@pytest.mark.parametrize("wrong", ["gap", "unfinished"])
def test_workers_that_break_the_rules_end_their_request(wrong: str) -> None:
    async def scenario() -> None:
        async with rig() as r:

            async def breaks(generation: PlayedGeneration) -> None:
                generation.emit(70)
                if wrong == "gap":
                    generation.sink.on_token(0, 5, 70, None, None, ())
                else:
                    generation.done()

            r.sessions.script = breaks
            response = await post(r, ask())
            assert response.status == 500
            await response.close()
            await works(r)

    go(scenario())


# ---- limits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "code"),
    [(Limits(12, 99), "context_length_exceeded"), (Limits(99, 12), "kv_pool_too_small")],
)
def test_a_prompt_that_does_not_fit_is_refused_with_the_numbers(limits: Limits, code: str) -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.workers.given_limits = limits
            body = {"model": MODEL, "prompt": [5] * 12}
            response = await post(r, body, "/v1/completions")
            assert response.status == 400
            error = await error_of(response)
            assert (error["code"], error["param"]) == (code, "prompt")
            assert "has 12 tokens" in error["message"]
            assert " 12 tokens, answer included" in error["message"]
            r.sessions.script = says([], "stop")
            response = await post(r, body | {"prompt": [5] * 11}, "/v1/completions")
            assert response.status == 200
            assert r.sessions.started[0].request.sampling.max_tokens == 1
            await response.close()
            response = await post(r, body | {"max_tokens": 0}, "/v1/completions")
            assert response.status == 200
            await response.close()

    go(scenario())


@pytest.mark.parametrize("text", ["a" * 1_000_000, "a " * 500_000, "\n" * 1_000_000])
def test_a_hopelessly_long_text_is_refused_before_it_is_encoded(text: str) -> None:
    async def scenario() -> None:
        async with rig() as r:
            messages = [{"role": "user", "content": text}]
            response = await post(r, ask(messages=messages))
            assert response.status == 400
            error = await error_of(response)
            assert error["code"] == "context_length_exceeded"
            assert "at least" in error["message"]
            assert "2048" in error["message"]

    go(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [5, 512]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[5], [5, 10**40]]}, "prompt[1][1]"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ],
)
def test_tokens_are_checked(body: Any, param: str) -> None:
    async def scenario() -> None:
        async with rig() as r:
            response = await post(r, {"model": MODEL} | body, "/v1/completions")
            assert response.status == 400
            assert (await error_of(response))["param"] == param
            assert r.sessions.started == []

    go(scenario())


def test_an_unknown_model_and_a_refusing_template() -> None:
    async def scenario() -> None:
        source = "{{ raise_exception('Roles must alternate') }}"
        async with rig(bundle=tiny_bundle(chat_template=source)) as r:
            response = await post(r, ask(model="other"))
            assert response.status == 404
            error = await error_of(response)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            response = await post(r, ask())
            assert response.status == 400
            error = await error_of(response)
            assert (error["code"], error["param"]) == ("chat_template_error", "messages")
            assert "Roles must alternate" in error["message"]

    go(scenario())


def test_more_requests_than_allowed() -> None:
    async def scenario() -> None:
        async with rig(max_requests=2) as r:
            running = [asyncio.create_task(post(r, ask())) for _ in range(2)]
            await r.sessions.generation(1)
            response = await post(r, ask())
            assert response.status == 429
            assert response.headers["retry-after"] == "1"
            assert (await error_of(response))["type"] == "rate_limit_error"
            for generation in r.sessions.started:
                generation.emit(2, "stop")
                generation.done()
            for task in running:
                await (await task).close()
            await works(r)

    go(scenario())


def test_the_deadline_holds_even_if_nobody_else_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_DEADLINE_MARGIN_S", 0.0)

    async def scenario() -> None:
        async with rig(request_timeout_s=0.2) as r:
            response = await post(r, ask())
            assert response.status == 504
            assert (await error_of(response))["code"] == "deadline_exceeded"
            await r.sessions.started[0].cancelled.wait()
            await works(r)

    go(scenario())


# ---- before there are workers -----------------------------------------------------------------


def test_requests_wait_for_the_first_bundle() -> None:
    async def scenario() -> None:
        async with rig(bundled=False) as r:
            waiting = [asyncio.create_task(post(r, ask())) for _ in range(3)]
            done, _ = await asyncio.wait(waiting, timeout=0.05)
            assert not done
            assert held(r) == (3.0, 3)
            r.sessions.script = says([])
            r.workers.bring(tiny_bundle())
            for task in waiting:
                response = await task
                assert response.status == 200
                await response.close()
            assert held(r) == (0.0, 0)

    go(scenario())


@pytest.mark.parametrize("expecting", [False, True])
def test_no_bundle_is_a_503(expecting: bool) -> None:
    async def scenario() -> None:
        async with rig(bundled=False, bundle_wait_s=0.05) as r:
            r.workers.is_expecting = expecting
            response = await post(r, ask())
            assert response.status == 503
            assert response.headers["retry-after"] == "5"
            assert (await error_of(response))["code"] == "no_workers"

    go(scenario())


def test_who_comes_before_the_workers_have_found_the_router_waits() -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.workers.settling.clear()
            asking = asyncio.create_task(post(r, ask()))
            while r.app.running == 0:
                await asyncio.sleep(0.005)
            assert r.sessions.started == []
            r.workers.settling.set()
            assert await r.sessions.generation() is r.sessions.started[0]
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    go(scenario())


# ---- clients that go away -----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["bundle", "queued", "decoding"])
def test_a_client_that_goes_frees_all(stage: str, stream: bool) -> None:
    async def scenario() -> None:
        async with rig(bundled=stage != "bundle") as r:
            asking = asyncio.create_task(post(r, ask(stream=stream)))
            if stage == "bundle":
                while r.app.running == 0:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.02)
            else:
                generation = await r.sessions.generation()
            if stage == "decoding":
                generation.emit(r.tokens("a")[0])
                if stream:
                    await asking
            if asking.done():
                asking.result().hang_up()
            else:
                asking.cancel()
            async with asyncio.timeout(1):
                if stage != "bundle":
                    await generation.cancelled.wait()
                entry = await written_down(r)
            assert (entry["status"], entry["failure"]["kind"]) == (499, "client_gone") or (
                stream and stage == "decoding" and entry["status"] == 200
            )
            assert r.app.running == 0
            if stage != "bundle":
                await works(r)

    go(scenario())


def test_http_1_0_has_no_streams() -> None:
    async def scenario() -> None:
        async with rig() as r:
            reader, writer = await asyncio.open_connection(r.http.host, r.http.port)
            body = json.dumps(ask(stream=True)).encode()
            head = b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (CHAT.encode(), len(body)) + body)
            async with asyncio.timeout(10):
                answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.split()[1] == b"400"
            assert b"Streaming needs HTTP/1.1" in answer
            assert b"transfer-encoding" not in answer
            await works(r)

    go(scenario())


def test_a_client_that_goes_while_it_sends_its_body() -> None:
    async def scenario() -> None:
        async with rig() as r:
            _, writer = await asyncio.open_connection(r.http.host, r.http.port)
            writer.write(b"POST %s HTTP/1.1\r\ncontent-length: 100\r\n\r\n{" % CHAT.encode())
            while r.app.running == 0:
                await asyncio.sleep(0.005)
            writer.transport.abort()
            assert (await written_down(r))["failure"]["kind"] == "client_gone"
            await works(r)

    go(scenario())


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_client_that_does_not_read_loses_its_own_request_only(with_logprobs: bool) -> None:
    async def scenario() -> None:
        async with rig() as r:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (r.http.host, r.http.port))
            _, writer = await asyncio.open_connection(sock=sock, limit=1024)
            fields: Any = {"logprobs": True, "top_logprobs": 20} if with_logprobs else {}
            body = json.dumps(ask(stream=True, **fields)).encode()
            head = b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % (CHAT.encode(), len(body)) + body)
            stuck = await r.sessions.generation()
            other_asking = asyncio.create_task(post(r, ask(stream=True)))
            other = await r.sessions.generation(1)
            token = r.tokens("a")[0]
            other.emit(token)
            response = await other_asking
            events = response.events()
            await anext(events)
            top = tuple((t, -1.0) for t in range(20)) if with_logprobs else ()
            emitted = 0
            while not stuck.cancelled.is_set():
                for _ in range(500):
                    stuck.emit(token, logprob=-1.0, top=top)
                emitted += 500
                assert emitted < 500_000
                other.emit(token)
                await anext(events)
            other.emit(2, "stop")
            other.done()
            assert [data async for _, data in events][-1] == "[DONE]"
            await response.close()
            writer.close()
            entries = {entry["id"]: entry for entry in r.journal.find(None)}
            failure = entries[stuck.request.request_id]["failure"]
            assert failure["kind"] == "client_gone"
            assert entries[other.request.request_id]["failure"] is None

    go(scenario())


def test_what_is_held_for_a_request_is_bounded() -> None:
    async def scenario() -> None:
        inbox = answer.Inbox()
        gone = []
        inbox.on_gone = lambda: gone.append(True)
        sink = answer.PromptSink(inbox, 0, 1)
        for index in range(answer.MAX_HELD_TOKENS):
            sink.on_token(0, index, 70, None, None, ())
        assert not gone
        sink.on_token(0, answer.MAX_HELD_TOKENS, 70, None, None, ())
        assert gone == [True]
        sink.on_token(0, answer.MAX_HELD_TOKENS + 1, 70, None, None, ())
        sink.on_failed(Failure(FailureKind.INTERNAL, "too late"))
        with pytest.raises(answer.RequestFailure) as caught:
            await inbox.take()
        assert caught.value.failure.kind is FailureKind.CLIENT_GONE

    go(scenario())


# ---- the drain -----------------------------------------------------------------------------


def test_a_drain_serves_what_still_comes_and_sends_clients_away() -> None:
    async def scenario() -> None:
        async with rig() as r:
            asking = asyncio.create_task(post(r, ask(stream=True)))
            generation = await r.sessions.generation()
            r.app.drain()
            quiet = asyncio.create_task(r.app.wait_quiet(0.01))
            r.sessions.script = says(r.tokens("late"))
            response = await post(r, ask())
            assert response.status == 200
            assert response.headers["connection"] == "close"
            assert json.loads(await response.body())["choices"][0]["message"]["content"] == "late"
            await response.close()
            ready = await client.request(r.http.host, r.http.port, "GET", "/ready")
            assert (ready.status, ready.headers["connection"]) == (200, "close")
            await ready.close()
            assert not quiet.done()
            generation.emit(r.tokens("a")[0])
            generation.emit(2, "stop")
            generation.done()
            response = await asking
            assert [data async for _, data in response.events()][-1] == "[DONE]"
            await response.close()
            await quiet
            assert r.app.running == 0

    go(scenario())


def test_the_end_of_the_grace_is_a_typed_failure() -> None:
    async def scenario() -> None:
        async with rig(bundled=True) as r:
            streaming = asyncio.create_task(post(r, ask(stream=True)))
            (await r.sessions.generation(0)).emit(r.tokens("a")[0])
            response = await streaming
            whole = asyncio.create_task(post(r, ask()))
            await r.sessions.generation(1)
            r.app.drain()
            r.app.fail_running()
            events = [json.loads(data) async for _, data in response.events()]
            await response.close()
            assert events[-1]["error"]["code"] == "draining"
            response = await whole
            assert response.status == 503
            await response.close()
            late = await post(r, ask())
            assert (await error_of(late))["code"] == "draining"
            await r.app.wait_quiet(0.01)
            for generation in r.sessions.started:
                assert generation.cancelled.is_set()

    go(scenario())
