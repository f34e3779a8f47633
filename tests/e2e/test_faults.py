"""kill -9 and SIGSTOP of each worker, one at a time, while eight streams run.

No request hangs: each ends with the right tokens or with one typed error. The worker is
restarted, the next request works, and all KV blocks are accounted for.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client import Streamed
from tests.cluster import Cluster, serving, spec
from tests.e2e.asking import Streams, assert_right_or_typed, body, expected, text, text_of
from tests.reference import Reference

STREAMS = 8
TOKENS = 400
DEADLINE_S = 60.0
RESTART_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def double(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two workers of each kind: there is another one to go to."""
    pools = {role: {"replicas": 2, "engine": {"threads": 1}} for role in ("prefill", "decode")}
    with serving(spec(model, **pools), tmp_path_factory.mktemp("double")) as running:
        running.until(running.all_ready, "all pods ready")
        yield running


@pytest.fixture(scope="module")
def single(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One worker of each kind: nothing else can take over."""
    pools = {role: {"replicas": 1, "engine": {"threads": 1}} for role in ("prefill", "decode")}
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
    return [body(text_of(60 + 40 * i, number=100 * i), TOKENS) for i in range(STREAMS)]


async def break_while_streaming(
    cluster: Cluster, pid: int, number: signal.Signals
) -> list[Streamed]:
    streams = Streams(cluster, contents())
    await streams.until_each_has(10)
    cluster.kill(pid, number)
    return await streams.end(DEADLINE_S)


def check_recovery(cluster: Cluster, name: str, old_pid: int) -> None:
    """The pod has a new process and is ready, a request works, all blocks are free."""

    def restarted() -> bool:
        pods = {p.name: p for p in cluster.pods()}
        return name in pods and pods[name].pid != old_pid and cluster.all_ready()

    cluster.until(restarted, f"{name} restarted and ready", RESTART_DEADLINE_S)
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
    check_recovery(double, victim.name, victim.pid)


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
    check_recovery(single, victim.name, victim.pid)


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
    check_recovery(double, victim.name, victim.pid)
