"""Covers pd_router.page, live and stretches: the live page's files and what guards them, its way
to the API, and the document that it shows."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pd_router import live, page, sizes
from pd_router.admin import AdminApp
from pd_router.http import HttpServer, bind
from pd_router.page import LivePage
from pd_router.relay import Relay
from pd_router.settings import Address
from pd_router.signals import Queued
from pd_router.stretches import stretches
from tests import client
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says, worker

FILES = {
    "/": "text/html; charset=utf-8",
    "/live/style.css": "text/css; charset=utf-8",
    "/live/logic.js": "text/javascript; charset=utf-8",
    "/live/page.js": "text/javascript; charset=utf-8",
    "/live/icon.svg": "image/svg+xml",
}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
WEB = Path(page.__file__).parent / "web"

LINE: dict[str, Any] = {
    "prompt_tokens": 44, "cached_tokens": 12, "completion_tokens": 57, "tokenize_s": 0.001,
    "queue_s": 0.002, "grant_wait_s": 0.003, "prefill_worker": "p-0", "prefill_queue_s": 0.004,
    "prefill_s": 0.4, "transfer_s": 0.3, "transport": "tcp", "decode_worker": "d-0",
    "ttft_s": 0.45, "tpot_s": 0.03, "attempts": 1, "reason": "decode d-0: soonest",
}  # fmt: skip


def entry(*lines: dict[str, Any], **changes: Any) -> dict[str, Any]:
    known = {
        "id": "chatcmpl-1", "request_id": "mine", "status": 200, "failure": None,
        "total_s": 2.0, "ended_at": 1e9, "timelines": list(lines),
    }  # fmt: skip
    return known | changes


async def ask(
    r: Rig, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """On the admin port."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await client.request(r.admin.host, r.admin.port, method, path, body, headers=given)
    try:
        return response.status, response.headers, await response.body()
    finally:
        await response.close()


def test_the_files_and_their_policy() -> None:
    async def scenario() -> None:
        async with rig() as r:
            for path, kind in FILES.items():
                status, headers, body = await ask(r, "GET", path)
                assert (status, headers["content-type"]) == (200, kind)
                name = "index.html" if path == "/" else path.removeprefix("/live/")
                assert body == (WEB / name).read_bytes()
                policy = headers["content-security-policy"]
                assert policy.startswith("default-src 'none'; ")
                assert "unsafe" not in policy
                assert headers["x-content-type-options"] == "nosniff"
            assert (await ask(r, "POST", "/", {}))[0] == 405
            assert (await ask(r, "GET", "/live/../page.py"))[0] == 404

    go(scenario())


def test_every_file_is_served_and_nothing_comes_from_elsewhere() -> None:
    """What the policy forbids isn't there: no script or style in the page, no other place."""
    assert {f"/live/{path.name}" for path in WEB.iterdir()} - {"/live/index.html"} == (
        set(FILES) - {"/"}
    )
    html = (WEB / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="([^"#]+)"', html)) == set(FILES) - {"/"}
    assert not re.search(r"<style|style=|<script>| on\w+=", html)
    for path in WEB.iterdir():
        places = set(re.findall(r"https?://[^\s\"']+", path.read_text()))
        assert places <= {"http://www.w3.org/2000/svg"}, path
    script = (WEB / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


def test_a_chat_as_any_client_has_it() -> None:
    async def scenario() -> None:
        async with rig() as r:
            r.sessions.script = says(r.tokens("abc"))
            status, _, body = await ask(r, "POST", page.CHAT, CHAT, origin=f"http://{r.admin}")
            assert status == 200
            assert client.json.loads(body)["choices"][0]["message"]["content"] == "abc"
            status, _, body = await ask(r, "POST", page.CHAT, CHAT | {"model": "other"})
            assert status == 404
            status, headers, body = await ask(r, "GET", page.STATE)
            assert (status, headers["content-type"]) == (200, "application/json")
            state = client.json.loads(body)
            assert (state["model"], state["router"], state["ready"]) == (MODEL, "router-0", True)
            assert [one["status"] for one in state["requests"]] == [404, 200]
            assert state["requests"][1]["completion_tokens"] == 4
            counts = state["distributions"]["ttft"]["counts"]
            assert counts[-1] == 1
            assert counts == sorted(counts)
            assert len(counts) == len(state["distributions"]["ttft"]["bounds"]) + 1

    go(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"host": "evil.example"},
        {"host": "[::"},
        {"host": "localhost.evil.example:80"},
    ],
)
def test_another_sites_page_gets_nothing(headers: dict[str, str]) -> None:
    async def scenario() -> None:
        async with rig() as r:
            status, _, body = await ask(r, "POST", page.CHAT, CHAT, **headers)
            assert status == 403
            code = client.json.loads(body)["error"]["code"]
            assert code == ("wrong_host" if "host" in headers else "wrong_origin")
            assert r.sessions.started == []
            if "host" in headers:
                for path in ("/", page.STATE, "/debug/requests", "/sketches"):
                    assert (await ask(r, "GET", path, **headers))[0] == 403

    go(scenario())


def test_local_names_and_addresses_are_let_in() -> None:
    async def scenario() -> None:
        async with rig() as r:
            for host in ("localhost:9090", "127.64.3.1:9090", "[::1]:9090", "10.0.0.7"):
                assert (await ask(r, "GET", "/", host=host))[0] == 200
                assert (await ask(r, "GET", page.STATE, host=host))[0] == 200

    go(scenario())


@asynccontextmanager
async def relaying(r: Rig) -> AsyncIterator[Address]:
    """An admin port that passes chats on, as that of a router of several processes."""
    pages = AdminApp("r", r.workers, r.metrics, r.journal, live_page=LivePage(Relay(r.http)))
    server = HttpServer(pages, bind(Address("127.0.0.1", 0)))
    async with server.serving():
        yield server.address


async def begun(r: Rig, at: Address) -> tuple[client.Response, PlayedGeneration]:
    """A chat that streams, after its first token, which is `a`."""
    body = CHAT | {"stream": True}
    asking = asyncio.create_task(client.request(at.host, at.port, "POST", page.CHAT, body))
    generation = await r.sessions.generation()
    generation.emit(r.tokens("a")[0])
    return await asking, generation


def test_a_chat_passed_on_to_another_process_streams() -> None:
    async def scenario() -> None:
        async with rig() as r, relaying(r) as at:
            answer, generation = await begun(r, at)
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.events()
            assert '"content":"a"' in (await anext(events))[1]  # before there is more
            for token in r.tokens("abc")[1:]:
                generation.emit(token)
            generation.emit(2, "stop")
            generation.done()
            assert [data async for _, data in events][-1] == client.DONE
            await answer.close()

    go(scenario())


def test_who_leaves_a_chat_that_was_passed_on_ends_it() -> None:
    async def scenario() -> None:
        async with rig() as r, relaying(r) as at:
            answer, generation = await begun(r, at)
            await answer.close()
            async with asyncio.timeout(10):
                await generation.cancelled.wait()

    go(scenario())


def test_a_router_that_is_not_there_is_said_to_start() -> None:
    async def scenario() -> None:
        async with rig() as r:
            nobody = bind(Address("127.0.0.1", 0))
            relay = Relay(Address(*nobody.getsockname()[:2]))
            nobody.close()
            pages = AdminApp("r", r.workers, r.metrics, r.journal, live_page=LivePage(relay))
            server = HttpServer(pages, bind(Address("127.0.0.1", 0)))
            async with server.serving():
                at = server.address
                answer = await client.request(at.host, at.port, "POST", page.CHAT, CHAT)
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "starting"
                await answer.close()

    go(scenario())


def test_switched_off_there_is_neither_page_nor_chat() -> None:
    async def scenario() -> None:
        async with rig(live_page=False) as r:
            for path in FILES:
                assert (await ask(r, "GET", path))[0] == 404
            assert (await ask(r, "POST", page.CHAT, CHAT))[0] == 404
            assert (await ask(r, "GET", page.STATE))[0] == 200  # `pdcluster top` reads it

    go(scenario())


def test_the_client_port_has_no_page() -> None:
    async def scenario() -> None:
        async with rig() as r:
            for path in (*FILES, page.STATE):
                response = await client.request(r.http.host, r.http.port, "GET", path)
                assert response.status == 404
                await response.close()

    go(scenario())


def test_the_document() -> None:
    load = {"queued": 1, "running": 2, "waiting_grants": 3, "kv_blocks": 40, "step_s": 0.01}
    workers = [
        worker("d-0", "decode", load=load, kv_used=10, pending_tokens=5),
        worker("p-0", "prefill", usable=False, why_unusable="it drains"),
    ]
    made = live.document({"model": "m"}, Queued(2, 30, 2), workers, [entry(LINE)] * 99, {})
    assert made["queued"] == {"requests": 2, "tokens": 30}
    decode, prefill = made["workers"]
    assert (decode["state"], decode["kv_share"], decode["running"]) == ("ready", 0.25, 2)
    assert (prefill["state"], prefill["usable"], prefill["kv_share"]) == ("it drains", False, 0.0)
    assert len(made["requests"]) == live.RECENT_REQUESTS
    [request] = {one["id"]: one for one in made["requests"]}.values()
    assert request["reason"] == "decode d-0: soonest"
    assert (request["ttft_s"], request["prefill"], request["decode"]) == (0.45, "p-0", "d-0")


def test_several_documents_are_one() -> None:
    many = {"bounds": [0.1], "counts": [1, 2]}
    made = [
        live.document({"router": f"r.{n}", "ready": ready}, Queued(n, 10, 1),
                      [worker("p-0", "prefill")],
                      [entry(LINE, id=f"c-{n}", ended_at=1e9 + n)], {"itl": many})
        for n, ready in ((1, False), (2, True))
    ]  # fmt: skip
    found = live.merged("r", made)
    assert (found["router"], found["ready"]) == ("r", True)
    assert found["queued"] == {"requests": 3, "tokens": 20}
    assert [one["id"] for one in found["requests"]] == ["c-2", "c-1"]
    assert found["distributions"]["itl"] == {"bounds": [0.1], "counts": [2, 4]}
    assert len(found["workers"]) == 1


DECISION = {
    "time": "2026-01-01T00:00:00Z", "pool": "decode", "to": 2, "reason": "Burst",
    "text": "decode from 1 to 2: the last seconds", "details": ["9 needed"],
}  # fmt: skip


def test_what_the_operator_tells_of_sizes_is_shown() -> None:
    async def scenario() -> None:
        async with rig() as r:

            async def shown() -> Any:
                return client.json.loads((await ask(r, "GET", page.STATE))[2])["sizes"]

            assert await shown() == {"standing": [], "changes": []}
            told = {"standing": [DECISION], "changes": [DECISION, DECISION]}
            assert (await ask(r, "POST", "/scaling", told))[0] == 200
            assert await shown() == told
            assert (await ask(r, "POST", "/scaling", {}))[0] == 200
            assert await shown() == {"standing": [], "changes": []}

    go(scenario())


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ([], {}, 400),
        ({"standing": [DECISION | {"to": "2"}]}, {}, 400),
        ({"standing": [DECISION] * 5}, {}, 400),
        ({"changes": [DECISION] * 33}, {}, 400),
        ({"changes": [DECISION | {"text": "x" * 2000}]}, {}, 400),
        ({"changes": [], "more": "x" * sizes.MAX_BODY_BYTES}, {}, 413),
        ({"changes": [DECISION]}, {"origin": "https://evil.example"}, 403),
        ({"changes": [DECISION]}, {"host": "evil.example"}, 403),
    ],
)
def test_what_nobody_may_tell(body: Any, headers: dict[str, str], status: int) -> None:
    async def scenario() -> None:
        async with rig() as r:
            assert (await ask(r, "POST", "/scaling", body, **headers))[0] == status
            assert (await ask(r, "GET", "/scaling"))[0] == 405
            state = client.json.loads((await ask(r, "GET", page.STATE))[2])
            assert state["sizes"]["changes"] == []
            response = await client.request(r.http.host, r.http.port, "POST", "/scaling", {})
            assert response.status == 404  # clients tell nothing
            await response.close()

    go(scenario())


def test_of_several_routers_the_one_that_was_told_last_is_right() -> None:
    made = [
        live.document({"router": name, "ready": True, "sizes": told}, Queued(), [], [], {})
        for name, told in (
            ("a", {"standing": [DECISION], "changes": []}),
            ("b", {"standing": [DECISION | {"time": "2026-01-01T00:05:00Z"}], "changes": []}),
            ("c", {"standing": [], "changes": []}),
        )
    ]
    older = [{k: v for k, v in one.items() if k != "sizes"} for one in made[:1]]
    [found] = live.merged("r", made)["sizes"]["standing"]
    assert found["time"] == "2026-01-01T00:05:00Z"
    assert live.merged("r", older)["sizes"] == {}


def test_requests_that_failed_early_and_those_of_many_prompts() -> None:
    refused = entry(id="", status=400, failure={"kind": "invalid_request", "message": "secret"})
    many = entry(LINE, LINE | {"attempts": 3})
    first, second = live.document({}, Queued(), [], [refused, many], {})["requests"]
    assert (first["id"], first["failure"], first["stretches"]) == ("mine", "invalid_request", [])
    assert "secret" not in str(first)
    assert (second["prompt_tokens"], second["attempts"]) == (88, 3)


def test_stretches_follow_each_other_and_the_hand_over_overlaps() -> None:
    found = {one.name: one for one in stretches(entry(LINE))}
    assert list(found) == [
        "tokenize", "queue", "reserve", "wait", "prefill", "transfer", "decode",
    ]  # fmt: skip
    assert found["prefill"].start_s == pytest.approx(0.01)
    assert found["transfer"].start_s == pytest.approx(0.11)
    assert found["decode"].start_s + found["decode"].seconds == 2.0
    alone = stretches(entry(LINE | {"transport": "", "prefill_worker": "", "ttft_s": None}))
    assert [one.name for one in alone] == ["tokenize", "queue", "reserve", "wait", "prefill"]
    assert alone[-1].where == "d-0"
    assert stretches(entry()) == []
