"""Random runs of eight streams through real processes, while frames between workers are cut,
stalled, delayed, repeated and corrupted, and workers are killed, stopped and told to end. No
token is wrong, every stream ends in time, no block is left held. PD_FAULT_RUNS=200 is the long
way; `make soak` takes it.
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
SEED = int(os.environ.get("PD_FAULT_SEED", "1"))
STREAMS = 8
PODS = 5  # two workers of each kind, and a router
PROMPTS = 24
FAULT_RATE = 0.08
DEADLINE_S = 90.0
SETTLE_S = 60.0  # leases and liveness included
KINDS: list[signal.Signals | None] = [
    None, None, None, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
]  # fmt: skip


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
    plain: dict[str, Any] = {"replicas": 2, "engine": {"threads": 1}}
    hurt = {**plain, "template": {"spec": {"containers": [container]}}}
    made = spec(
        model, prefill=plain, decode=hurt, kvTransfer={"transport": "tcp"},
        router={"routing": {"disaggregate": "always"}},
    )  # fmt: skip
    with serving(made, tmp_path_factory.mktemp("troubled")) as running:
        running.until(running.all_ready, "all pods ready")
        yield running


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
    cluster: Cluster, chance: random.Random, asked: list[dict[str, Any]], victim: Pod
) -> list[Streamed]:
    streams = Streams(cluster, asked)
    await asyncio.sleep(0)
    fault = chance.choice(KINDS)
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


@pytest.mark.timeout(120 + 60 * RUNS)
def test_no_token_is_wrong_and_nothing_is_left(troubled: Cluster, reference: Reference) -> None:
    chance = random.Random(SEED)
    pool = questions()
    answers = {one["prompt"]: expected(reference, one) for one in pool}
    right = 0
    for number in range(RUNS):
        troubled.until(lambda: whole(troubled), f"run {number}: all pods ready", SETTLE_S)
        asked = chance.sample(pool, STREAMS)
        results = asyncio.run(run(troubled, chance, asked, chance.choice(troubled.workers())))
        for one, result in zip(asked, results, strict=True):
            assert_right_or_typed(result, answers[one["prompt"]])
            right += result.error is None
        failed = Counter(str(r.error["code"]) for r in results if r.error is not None)
        assert sum(failed.values()) < STREAMS, f"run {number}: nobody was answered: {failed}"
        print(f"run {number}: {right} streams answered {dict(failed) or ''}", flush=True)
    troubled.until(lambda: whole(troubled), "all pods ready", SETTLE_S)
    troubled.until_settled(SETTLE_S)
    print(f"{right} of {RUNS * STREAMS} streams were answered")
    assert right >= 0.9 * RUNS * STREAMS, "there was another worker to go to"
    metrics = troubled.metrics(troubled.pod("router"))
    assert sum(metrics["pdcluster_router_retries_total"].values()), "nothing was hurt"
    carried = metrics.get("pdcluster_router_kv_bytes_total", {})
    assert sum(carried.values()), "no KV was handed over"
