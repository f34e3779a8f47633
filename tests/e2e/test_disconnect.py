"""A client that hangs up, at each stage of its request: queued, prefilling, transferring,
decoding, whichever way KV goes. Everything of it is free at both workers within a second, and
the next request isn't kept waiting.

Chunks of one token make prefill slow enough to be caught in the middle.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client import Response, request
from tests.cluster import Cluster, serving, spec
from tests.e2e.asking import COMPLETIONS, Streams, body, text_of

FREE_WITHIN_S = 1.0
LONG = 1800  # tokens; several seconds of prefill here
POOL_TOKENS = 2048


@pytest.fixture(scope="module", params=["shm", "tcp", "nixl"])
def slow(
    tmp_path_factory: pytest.TempPathFactory, model: Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """Prefill goes token by token; decode has room for one long request, and doesn't guess,
    which would bring that to its end before the test has looked."""
    decode = {"kvCacheTokens": POOL_TOKENS, "speculation": {"method": "none"}}
    made = spec(
        model,
        prefill={"replicas": 1, "engine": {"chunkTokens": 1}},
        decode={"replicas": 1, "engine": decode},
        kvTransfer={"transport": request.param},
        router={"routing": {"disaggregate": "always"}},
    )
    with serving(made, tmp_path_factory.mktemp("slow")) as running:
        yield running


def gauge(cluster: Cluster, pool: str, name: str) -> float:
    return sum(cluster.metrics(cluster.pod(pool))[f"pdcluster_engine_{name}"].values())


def holds_nothing(cluster: Cluster) -> bool:
    names = ("queued_requests", "running_sequences", "waiting_grants", "pending_tokens")
    for pod in cluster.workers():
        metrics = cluster.metrics(pod)
        if any(sum(metrics[f"pdcluster_engine_{name}"].values()) for name in names):
            return False
        states = {dict(k)["state"]: v for k, v in metrics["pdcluster_engine_kv_blocks"].items()}
        if states["active"] or states["granted"] or states["quarantined"]:
            return False
    return True


async def begin(cluster: Cluster, content: dict[str, Any]) -> asyncio.Task[Response]:
    """Sends a streamed request and doesn't wait for its head, which may come late."""
    sending = request("127.0.0.1", cluster.port, "POST", COMPLETIONS, {**content, "stream": True})
    return asyncio.create_task(sending)


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 20.0) -> float:
    """Polls from a thread; seconds that it took."""
    started = time.monotonic()
    while not await asyncio.to_thread(condition):
        if time.monotonic() - started > deadline_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
    return time.monotonic() - started


async def hang_up_when(cluster: Cluster, stage: Callable[[], bool], what: str) -> float:
    """Hangs up at that stage; the seconds until nothing is held any more."""
    sending = await begin(cluster, body(text_of(LONG, number=time.monotonic_ns() % 10_000), 200))
    await until(stage, what)
    if sending.done():
        (await sending).hang_up()
    else:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return await until(lambda: holds_nothing(cluster), f"all free after: {what}")


def test_while_it_prefills(slow: Cluster):
    def stage() -> bool:
        return gauge(slow, "prefill", "pending_tokens") > LONG * 0.7

    took = asyncio.run(hang_up_when(slow, stage, "prefilling"))
    assert took < FREE_WITHIN_S


def test_while_its_kv_is_on_its_way(slow: Cluster):
    def stage() -> bool:
        """Half of the blocks are computed and pushed as they come; the seal is far."""
        return 0 < gauge(slow, "prefill", "pending_tokens") < LONG * 0.5

    took = asyncio.run(hang_up_when(slow, stage, "transferring"))
    assert took < FREE_WITHIN_S


def test_while_it_decodes(slow: Cluster):
    async def scenario() -> float:
        sending = await begin(slow, body("hello", 1900))
        response = await sending
        events = response.events()
        for _ in range(5):
            await anext(events)
        response.hang_up()
        return await until(lambda: holds_nothing(slow), "all free after decoding")

    assert asyncio.run(scenario()) < FREE_WITHIN_S


def test_while_it_waits_for_room(slow: Cluster):
    """The first request fills decode's pool; the second waits for its grant and hangs up."""

    async def scenario() -> float:
        first = await begin(slow, body("hello", 1900))
        response = await first
        events = response.events()
        await anext(events)
        second = await begin(slow, body(text_of(LONG), 100))
        await until(lambda: gauge(slow, "decode", "waiting_grants") == 1, "one waits")
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        took = await until(lambda: gauge(slow, "decode", "waiting_grants") == 0, "none waits")
        await anext(events)  # the other one goes on
        assert gauge(slow, "prefill", "pending_tokens") == 0
        response.hang_up()
        await until(lambda: holds_nothing(slow), "all free")
        return took

    assert asyncio.run(scenario()) < FREE_WITHIN_S


def test_the_next_request_is_not_kept_waiting(slow: Cluster):
    """A long prefill whose client has gone stops within a step."""

    async def scenario() -> float:
        sending = await begin(slow, body(text_of(LONG, number=5), 10))
        await until(lambda: gauge(slow, "prefill", "pending_tokens") > LONG * 0.7, "prefilling")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        [result] = await Streams(slow, [body("hello", 2)]).end(30)
        assert result.error is None
        return result.ttft_s

    assert asyncio.run(scenario()) < FREE_WITHIN_S
