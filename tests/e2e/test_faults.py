"""kill -9 and SIGSTOP of workers while sixteen streams run, at default settings: of each, of
all prefill workers, of all decode workers, and decode workers restarted one after the other.

No request hangs: each ends with the right tokens or, where nobody is left to take over, with
one typed error. The workers are restarted, the next request works, and all KV blocks are
accounted for.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client import Streamed, request
from tests.cluster import Cluster, Pod, http_get, serving, spec
from tests.e2e.asking import (
    COMPLETIONS,
    Streams,
    assert_right_or_typed,
    body,
    expected,
    text,
    text_of,
)
from tests.reference import Reference

STREAMS = 16
TOKENS = 400
DEADLINE_S = 60.0
RESTART_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def double(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of each kind: there is another one to go to."""
    pools = {role: {"replicas": 2} for role in ("prefill", "decode")}
    with serving(spec(model, **pools), tmp_path_factory.mktemp("double")) as running:
        running.until(running.all_ready, "all pods ready")
        yield running


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each kind: nothing else can take over."""
    pools = {role: {"replicas": 1} for role in ("prefill", "decode")}
    with serving(spec(model, **pools), tmp_path_factory.mktemp("single")) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(double: Cluster) -> list[str]:
    """What an untroubled cluster answers: test_serving compares that with transformers."""

    async def undisturbed() -> list[Streamed]:
        return await Streams(double, contents()).end(DEADLINE_S)

    results = asyncio.run(undisturbed())
    assert all(r.done for r in results)
    return [r.text for r in results]


def contents() -> list[dict[str, object]]:
    return [body(text_of(60 + 20 * i, number=100 * i), TOKENS) for i in range(STREAMS)]


async def break_while_streaming(
    cluster: Cluster, pid: int, number: signal.Signals
) -> list[Streamed]:
    streams = Streams(cluster, contents())
    await streams.until_each_has(10)
    cluster.kill(pid, number)
    return await streams.end(DEADLINE_S)


def restarted(cluster: Cluster, *victims: Pod) -> bool:
    """They have new processes, and all that there are are ready."""
    pids = {p.name: p.pid for p in cluster.pods()}
    return cluster.all_ready() and all(pids.get(v.name, v.pid) != v.pid for v in victims)


def check_recovery(cluster: Cluster, *victims: Pod) -> None:
    """The pods have new processes and are ready, a request works, all blocks are free."""
    names = " and ".join(v.name for v in victims)
    cluster.until(
        lambda: restarted(cluster, *victims), f"{names} restarted and ready", RESTART_DEADLINE_S
    )
    assert text(cluster, body("hello", 8))
    cluster.until_settled()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_with_another_worker_to_go_to_every_stream_ends_right(
    double: Cluster, wanted: list[str], pool: str, index: int, number: signal.Signals
):
    victim = double.pod(pool, index)
    results = asyncio.run(break_while_streaming(double, victim.pid, number))
    assert [r.error for r in results] == [None] * STREAMS
    assert [r.text for r in results] == wanted
    check_recovery(double, victim)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_without_any_prefill_worker_every_stream_ends_right(
    double: Cluster, wanted: list[str], number: signal.Signals
) -> None:
    """Decode computes prompts: those that prefill had begun, and those that come meanwhile."""
    victims = double.pods("prefill")

    async def scenario() -> list[Streamed]:
        before = Streams(double, contents())
        await before.until_any_has(1)
        for victim in victims:
            double.kill(victim.pid, number)
        meanwhile = Streams(double, contents())
        return await before.end(DEADLINE_S) + await meanwhile.end(DEADLINE_S)

    results = asyncio.run(scenario())
    assert [r.error for r in results] == [None] * 2 * STREAMS
    assert [r.text for r in results] == wanted * 2
    check_recovery(double, *victims)


@pytest.mark.timeout(300)
def test_decode_workers_that_restart_one_after_the_other_lose_nothing(
    double: Cluster, wanted: list[str]
) -> None:
    """As a rollout does it: each is told to end while streams run, and comes back."""

    async def while_it_ends(victim: Pod) -> list[Streamed]:
        streams = Streams(double, contents())
        await streams.until_each_has(10)
        double.kill(victim.pid, signal.SIGTERM)
        return await streams.end(DEADLINE_S)

    for victim in double.pods("decode"):
        results = asyncio.run(while_it_ends(victim))
        assert [(r.error, r.text) for r in results] == [(None, want) for want in wanted]
        check_recovery(double, victim)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_without_any_decode_worker_requests_are_refused_until_it_is_back(
    double: Cluster, wanted: list[str], number: signal.Signals
) -> None:
    victims = double.pods("decode")
    ready = f"http://127.0.0.1:{double.port}/ready"

    async def scenario() -> tuple[list[Streamed], list[Streamed]]:
        streams = Streams(double, contents())
        await streams.until_each_has(10)
        for victim in victims:
            double.kill(victim.pid, number)
        await asyncio.to_thread(double.until, lambda: http_get(ready)[0] == 503, "not ready")
        refused = await request("127.0.0.1", double.port, "POST", COMPLETIONS, body("hi", 8))
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert (await refused.json())["error"]["code"] == "no_workers"
        await refused.close()
        await asyncio.to_thread(
            double.until, lambda: http_get(ready)[0] == 200, "ready by itself", DEADLINE_S
        )
        return await streams.end(DEADLINE_S), await Streams(double, contents()).end(DEADLINE_S)

    during, after = asyncio.run(scenario())
    for result, want in zip(during, wanted, strict=True):
        assert_right_or_typed(result, want)
    assert [(r.error, r.text) for r in after] == [(None, want) for want in wanted]
    check_recovery(double, *victims)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_without_another_each_stream_ends_right_or_with_one_typed_error(
    single: Cluster, wanted: list[str], pool: str, number: signal.Signals
):
    victim = single.pod(pool)
    results = asyncio.run(break_while_streaming(single, victim.pid, number))
    for result, want in zip(results, wanted, strict=True):
        assert_right_or_typed(result, want)
    if pool == "prefill":
        assert [r.error for r in results] == [None] * STREAMS
    check_recovery(single, victim)


@pytest.mark.timeout(300)
def test_a_stopped_worker_gets_no_new_requests(double: Cluster, reference: Reference):
    """It accepts connections and never answers; requests that follow don't wait for it."""
    victim = double.pod("decode")
    double.kill(victim.pid, signal.SIGSTOP)
    prompts = [body(f"{i} boats", 8) for i in range(6)]

    async def one_after_another() -> list[Streamed]:
        return [(await Streams(double, [p]).end(DEADLINE_S))[0] for p in prompts]

    results = asyncio.run(one_after_another())
    assert [r.text for r in results] == [expected(reference, p) for p in prompts]
    assert all(r.ttft_s < 1.0 for r in results[-3:])
    check_recovery(double, victim)
