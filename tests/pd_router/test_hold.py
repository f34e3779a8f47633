"""Covers requests that come while a pool is at zero, by real announcements: they wait for the
worker that is started for them, before the router has seen one and after it has seen all go."""

import asyncio
from typing import Any

import pytest

from tests import client
from tests.pd_router.fake_worker import MODEL
from tests.pd_router.http_rig import go
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
