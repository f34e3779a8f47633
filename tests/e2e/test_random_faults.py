"""Random runs of eight streams through real processes, while frames between workers are cut,
stalled, delayed, repeated and corrupted, and workers are killed, stopped and told to end. No
token is wrong, every stream ends in time, no block is left held. By shared memory and NIXL no
frame with KV passes a proxy: there workers are killed and stopped alone, and more often.
PD_FAULT_RUNS=200 is the long way; `make soak` takes it.
"""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client import Streamed
from tests.cluster import Cluster, Pod, serving, spec
from tests.e2e.asking import Streams, assert_right_or_typed, body, expected, text_of
from tests.reference import Reference

RUNS = int(os.environ.get("PD_FAULT_RUNS", "8"))
"""By tcp; as many again by the two other transports together."""
SEED = int(os.environ.get("PD_FAULT_SEED", "1"))
STREAMS = 8
PODS = 5  # two workers of each kind, and a router
PROMPTS = 24
FAULT_RATE = 0.08
DEADLINE_S = 90.0
SETTLE_S = 60.0  # leases and liveness included
Kinds = list[signal.Signals | None]
FEW: Kinds = [None, None, None, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]
MANY: Kinds = [None, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]


@pytest.fixture(scope="module")
def troubled(
    model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Two workers of each kind, KV by tcp; that of decode goes through a proxy in its process."""
    # What begins like a path is looked for among the pod's mounts.
    path = f":{root / 'tests' / 'e2e' / 'faulty'}:{root}"
    values = {"PYTHONPATH": path, "PD_TEST_KV_FAULTS": str(FAULT_RATE), "PD_TEST_SEED": str(SEED)}
    env = [{"name": name, "value": value} for name, value in values.items()]
    container = {"name": "engine", "env": env}
    made = two_of_each(model, "tcp")
    made["spec"]["decode"]["template"] = {"spec": {"containers": [container]}}
    with serving(made, tmp_path_factory.mktemp("troubled")) as running:
        yield running


def two_of_each(model: Path, transport: str) -> dict[str, Any]:
    pool = {"replicas": 2, "engine": {"threads": 1}}
    return spec(
        model, prefill=pool, decode=dict(pool), kvTransfer={"transport": transport},
        router={"routing": {"disaggregate": "always"}},
    )  # fmt: skip


def whole(cluster: Cluster) -> bool:
    """All pods are there and ready. One that waits to be started again has no process, and is
    none of those that `all_ready` looks at."""
    return len(cluster.pods()) == PODS and cluster.all_ready()


def questions() -> list[dict[str, Any]]:
    chance = random.Random(SEED)
    return [
        body(text_of(chance.randint(10, 450), number=1000 * n), chance.randint(1, 120))
        for n in range(PROMPTS)
    ]


async def run(
    cluster: Cluster,
    chance: random.Random,
    asked: list[dict[str, Any]],
    victim: Pod,
    fault: signal.Signals | None,
) -> list[Streamed]:
    streams = Streams(cluster, asked)
    await asyncio.sleep(0)
    # It may end for an earlier run's fault meanwhile: stopped, it lives until liveness has seen it.
    with contextlib.suppress(ProcessLookupError):
        if fault is not None:
            # At any moment: while they wait, prefill, hand over or decode.
            await asyncio.sleep(chance.uniform(0, 0.5))
            cluster.kill(victim.pid, fault)
        if fault is signal.SIGSTOP and chance.random() < 0.7:  # else liveness ends it
            await asyncio.sleep(chance.uniform(0.05, 2))
            cluster.kill(victim.pid, signal.SIGCONT)
    return await streams.end(DEADLINE_S)


def hurt(
    cluster: Cluster, reference: Reference, chance: random.Random, kinds: Kinds, runs: int
) -> None:
    """So many runs, in which no token is wrong, and after which nothing is left."""
    pool = questions()
    answers = {one["prompt"]: expected(reference, one) for one in pool}
    right = 0
    for number in range(runs):
        cluster.until(lambda: whole(cluster), f"run {number}: all pods ready", SETTLE_S)
        asked, victim = chance.sample(pool, STREAMS), chance.choice(cluster.workers())
        fault = chance.choice(kinds)
        results = asyncio.run(run(cluster, chance, asked, victim, fault))
        for one, result in zip(asked, results, strict=True):
            assert_right_or_typed(result, answers[one["prompt"]])
            right += result.error is None
        failed = Counter(str(r.error["code"]) for r in results if r.error is not None)
        assert sum(failed.values()) < STREAMS, f"run {number}: nobody was answered: {failed}"
        of_whom = "" if fault is None else f" {fault.name} of {victim.name}"
        print(f"run {number}:{of_whom} {right} streams answered {dict(failed) or ''}", flush=True)
    cluster.until(lambda: whole(cluster), "all pods ready", SETTLE_S)
    cluster.until_settled(SETTLE_S)
    print(f"{right} of {runs * STREAMS} streams were answered")
    assert right >= 0.9 * runs * STREAMS, "there was another worker to go to"


@pytest.mark.timeout(120 + 60 * RUNS)
def test_no_token_is_wrong_and_nothing_is_left(troubled: Cluster, reference: Reference) -> None:
    hurt(troubled, reference, random.Random(SEED), FEW, RUNS)
    metrics = troubled.metrics(troubled.pod("router"))
    assert sum(metrics["pdcluster_router_retries_total"].values()), "nothing was hurt"
    assert carried(troubled).keys() == {"tcp"}


def carried(cluster: Cluster) -> dict[str, float]:
    """KV that was handed over, by transport."""
    samples = cluster.metrics(cluster.pod("router")).get("pdcluster_router_kv_bytes_total", {})
    return {dict(labels)["transport"]: size for labels, size in samples.items() if size}


@pytest.mark.timeout(120 + 60 * RUNS)
@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_workers_that_are_killed_and_stopped_within_reads(
    model: Path, reference: Reference, tmp_path: Path, transport: str
) -> None:
    """There memory of others is read, of processes that may be gone or stand still."""
    with serving(two_of_each(model, transport), tmp_path) as cluster:
        chance = random.Random(f"{SEED} {transport}")
        hurt(cluster, reference, chance, MANY, -(-RUNS // 2))
        assert carried(cluster).keys() == {transport}
