"""Covers the client port beside generating: /tokenize, /detokenize, who asks, the trace."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from pd_core.failures import Failure, FailureKind
from pd_router import tokens
from pd_router.types import Considered
from tests import client
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says

JSON = "application/json"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    document: Any


async def post(
    r: Rig, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Answer:
    response = await client.request(r.http.host, r.http.port, "POST", path, body, headers)
    whole = await response.body()
    await response.close()
    document = json.loads(whole) if response.headers["content-type"] == JSON else None
    return Answer(response.status, response.headers, document)


def test_tokens_there_and_back() -> None:
    async def body() -> None:
        async with rig() as r:
            made = (await post(r, "/tokenize", {"model": MODEL, "prompt": "Grüße, 世界"})).document
            assert made["count"] == len(made["tokens"])
            assert made["max_model_len"] == 2048
            assert made["tokens"] == r.tokens("Grüße, 世界")
            back = await post(r, "/detokenize", {"tokens": made["tokens"]})
            assert back.document == {"prompt": "Grüße, 世界"}
            chat = await post(r, "/tokenize", {"messages": CHAT["messages"]})
            text = (await post(r, "/detokenize", {"tokens": chat.document["tokens"]})).document
            assert "hi" in text["prompt"]

    go(body())


@pytest.mark.parametrize(
    ("path", "sent", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "max": 1}, 400, "max"),
        ("/tokenize", {"prompt": "a" * (tokens.MAX_CHARS + 1)}, 400, "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 1 << 40]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(path: str, sent: dict[str, Any], status: int, param: str) -> None:
    async def body() -> None:
        async with rig() as r:
            answer = await post(r, path, sent)
            assert (answer.status, answer.document["error"]["param"]) == (status, param)

    go(body())


async def asked(r: Rig, headers: dict[str, str] | None = None, **fields: Any) -> tuple[Any, Answer]:
    r.sessions.script = says(r.tokens("yes"))
    answer = await post(r, "/v1/chat/completions", CHAT | fields, headers)
    return r.sessions.started[-1].request, answer


def test_who_asks() -> None:
    async def body() -> None:
        async with rig(class_header=True) as r:
            nobody, _ = await asked(r)
            assert (nobody.tenant, nobody.sla, nobody.session, nobody.priority) == (
                "",
                None,
                b"",
                0,
            )
            alice, _ = await asked(
                r,
                {"authorization": "Bearer a", "x-pdcluster-class": "vip", "x-session-id": "s"},
                priority=3,
            )
            assert (alice.sla, alice.priority, len(alice.session)) == ("vip", 3, 16)
            assert alice.tenant
            assert "a" not in (alice.tenant, alice.session)
            again, _ = await asked(r, {"Authorization": "Bearer a"}, session_id="s")
            assert (again.tenant, again.session) == (alice.tenant, alice.session)
            bob, _ = await asked(r, {"Authorization": "Bearer b"}, session_id="s")
            assert bob.tenant != alice.tenant
            assert bob.session != alice.session, "a name is a tenant's own"

    go(body())


def test_a_class_is_not_the_clients_to_choose_unless_allowed() -> None:
    async def body() -> None:
        async with rig() as r:
            request, _ = await asked(r, {"X-PDCluster-Class": "vip"})
            assert request.sla is None

    go(body())


@pytest.mark.parametrize("fields", [{"priority": 1001}, {"session_id": ""}, {"priority": 1.5}])
def test_bad_extras_are_named(fields: dict[str, Any]) -> None:
    async def body() -> None:
        async with rig() as r:
            answer = await post(r, "/v1/chat/completions", CHAT | fields)
            assert answer.status == 400
            assert answer.document["error"]["param"] == next(iter(fields))

    go(body())


def test_a_refusal_says_when_to_come_again() -> None:
    async def body() -> None:
        async with rig() as r:
            r.sessions.refusal = Failure(FailureKind.OVERLOADED, "full", retry_after_s=17)
            answer = await post(r, "/v1/chat/completions", CHAT)
            assert (answer.status, answer.headers["retry-after"]) == (429, "17")

    go(body())


@pytest.mark.parametrize("stream", [False, True])
def test_the_trace_is_given_when_asked_for_and_allowed(stream: bool) -> None:
    async def body() -> None:
        async with rig(allow_trace=True) as r:
            talk = says(r.tokens("yes"))

            async def script(generation: PlayedGeneration) -> None:
                line = generation.timeline
                line.prefill_worker, line.decode_worker, line.reason = "p-0", "d-0", "because"
                line.considered = (Considered("d-0", "p-0", 5, 0.1, 0.2, 0.3, 0.4004),)
                await talk(generation)

            r.sessions.script = script
            sent = CHAT | {"stream": stream}
            plain = await post(r, "/v1/chat/completions", sent)
            assert "x-pdcluster-trace" not in plain.headers
            answer = await post(r, "/v1/chat/completions", sent, {"x-pdcluster-trace": "1"})
            (trace,) = json.loads(answer.headers["x-pdcluster-trace"])
            assert (trace["prefill"], trace["decode"], trace["reason"]) == ("p-0", "d-0", "because")
            assert trace["considered"][0]["total_s"] == 0.4

    go(body())


def test_the_trace_stays_inside_unless_allowed() -> None:
    async def body() -> None:
        async with rig() as r:
            _, answer = await asked(r, {"x-pdcluster-trace": "1"})
            assert "x-pdcluster-trace" not in answer.headers

    go(body())
