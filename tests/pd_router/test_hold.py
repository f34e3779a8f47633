"""Covers requests that come while a pool is at zero: they wait for the worker that is started
for them, before the router has seen one and after it has seen all go, and are bounded."""

import asyncio
from typing import Any

import pytest

from pd_router import app
from tests import client
from tests.cluster import parse_metrics
from tests.pd_router import http_rig
from tests.pd_router.fake_worker import MODEL
from tests.pd_router.http_rig import Rig, go, rig, says
from tests.pd_router.rig import until
from tests.pd_router.whole_rig import Whole, whole

ASK: dict[str, Any] = {"model": MODEL, "prompt": "three boats", "max_tokens": 3}
FEW = 3


async def ask(r: Whole) -> tuple[int, Any]:
    response = await client.request(r.http.host, r.http.port, "POST", "/v1/completions", ASK)
    answer = await response.json()
    await response.close()
    return response.status, answer


async def woken(r: Whole, name: str, **options: Any) -> None:
    """A few ask, and then a worker comes."""
    asking = [asyncio.create_task(ask(r)) for _ in range(FEW)]
    await until(lambda: r.metrics.signals_json()["held_requests"] == FEW, "they wait")
    await r.add("prefill", f"p-{name}")  # by itself it is of no use to them
    await asyncio.sleep(0)
    assert r.metrics.signals_json()["held_requests"] == FEW
    await r.add("decode", f"d-{name}", **options)
    for status, answer in await asyncio.gather(*asking):
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3), answer
    assert r.metrics.signals_json()["held_requests"] == 0


def held(r: Rig) -> tuple[float, int]:
    """How many requests wait for a worker: for Prometheus, and for those who scale."""
    told = parse_metrics(r.metrics.expose().decode())["pdcluster_router_held_requests"]
    return sum(told.values()), r.metrics.signals_json()["held_requests"]


async def post(r: Rig) -> client.Response:
    chat = {"model": http_rig.MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return await client.request(r.http.host, r.http.port, "POST", "/v1/chat/completions", chat)


async def refused(r: Rig) -> str:
    """What a request hears for which there is no worker."""
    response = await post(r)
    assert (response.status, response.headers["retry-after"]) == (503, "5")
    error = (await response.json())["error"]
    await response.close()
    assert error["code"] == "no_workers"
    return str(error["message"])


def test_requests_wait_where_the_workers_have_gone_to_zero() -> None:
    """The tokenizer is known; the pool is started for those who wait."""

    async def scenario() -> None:
        async with rig(hold_s=20.0) as r:
            r.workers.given_limits, limits = None, r.workers.given_limits
            r.sessions.script = says(r.tokens("awake"))
            waiting = [asyncio.create_task(post(r)) for _ in range(3)]
            while held(r)[1] < 3:
                await asyncio.sleep(0.005)
            assert held(r) == (3.0, 3)
            assert r.sessions.started == []
            gone = waiting.pop()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            while held(r)[1] > 2:
                await asyncio.sleep(0.005)
            r.workers.given_limits = limits
            r.workers.came.set()
            for task in waiting:
                response = await task
                answer = await response.json()
                assert answer["choices"][0]["message"]["content"] == "awake"
                await response.close()
            assert held(r) == (0.0, 0)

    go(scenario())


def test_who_finds_the_worker_gone_again_waits_for_the_next() -> None:
    """It was there when the request came, and isn't when its prompt is ready."""

    async def scenario() -> None:
        async with rig(hold_s=20.0) as r:
            r.sessions.script = says(r.tokens("at last"))
            r.workers.settling.clear()
            waiting = asyncio.create_task(post(r))
            while r.app.running < 1:
                await asyncio.sleep(0.005)
            r.workers.given_limits, limits = None, r.workers.given_limits
            r.workers.settling.set()
            while held(r)[1] < 1:
                await asyncio.sleep(0.005)
            assert r.sessions.started == []
            r.workers.given_limits = limits
            r.workers.came.set()
            response = await waiting
            answer = await response.json()
            assert answer["choices"][0]["message"]["content"] == "at last"
            await response.close()
            assert held(r) == (0.0, 0)

    go(scenario())


@pytest.mark.parametrize("bundled", [False, True])
def test_who_waits_for_workers_that_do_not_come_is_told(bundled: bool) -> None:
    async def scenario() -> None:
        async with rig(hold_s=0.05, bundled=bundled) as r:
            r.workers.given_limits = None
            assert "No worker has" in await refused(r)
            assert held(r) == (0.0, 0)

    go(scenario())


def test_those_who_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_HELD", 1)

    async def scenario() -> None:
        async with rig(hold_s=20.0) as r:
            r.workers.given_limits = None
            waiting = asyncio.create_task(post(r))
            while held(r)[1] < 1:
                await asyncio.sleep(0.005)
            assert "no more are held" in await refused(r)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    go(scenario())


# ---- by real announcements -------------------------------------------------------------------


@pytest.mark.slow
def test_who_asks_at_zero_waits_for_the_worker_that_comes() -> None:
    async def scenario() -> None:
        async with whole(on_demand=True, hold_s=20.0) as r:
            await woken(r, "0")
            for fake in r.fakes:
                await fake.die()
            await until(lambda: r.workers.limits() is None, "nobody is usable")
            await woken(r, "1")

    go(scenario())


@pytest.mark.slow
def test_without_that_there_is_nothing_to_wait_for() -> None:
    async def scenario() -> None:
        async with whole() as r:
            assert (await ask(r))[0] == 503
            await r.add("both", "b-0")
            assert (await ask(r))[0] == 200
            await r.fakes[0].die()
            await until(lambda: r.workers.limits() is None, "nobody is usable")
            status, answer = await ask(r)
            assert (status, answer["error"]["code"]) == (503, "no_workers")

    go(scenario())
