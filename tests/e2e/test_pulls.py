"""A conversation's next turn where what is known of it is with another worker than the one that
computes: its blocks are copied, and every token is the one that transformers' `generate` gives."""

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, http_get, serving, spec
from tests.e2e.asking import ask, body, expected, text_of
from tests.reference import Reference
from tests.tiny_model import tiny_model_dir

LAYERS = 16
PACE = "0.0005,0.001,0.002"
"""500 tokens of a prompt a second, so a copy is sooner by far, however busy the machine is."""
BLOCK = 16
BLOCK_BYTES = BLOCK * 2 * LAYERS * 2 * 16 * 4  # 2 KV heads of 16, in float32


@pytest.fixture(scope="module")
def deep() -> Path:
    return tiny_model_dir(layers=LAYERS)


@pytest.fixture(scope="module")
def its_reference(deep: Path) -> Reference:
    return Reference(deep, threads=1)


@pytest.fixture(scope="module")
def paced(root: Path) -> dict[str, Any]:
    """A pool's template: its workers compute as slowly as `PACE` says."""
    # What begins like a path is looked for among the pod's mounts.
    values = {"PYTHONPATH": f":{root / 'tests' / 'e2e' / 'paced'}:{root}", "PD_TEST_PACE": PACE}
    env = [{"name": name, "value": value} for name, value in values.items()]
    return {"template": {"spec": {"containers": [{"name": "engine", "env": env}]}}}


def turn(cluster: Cluster, reference: Reference, content: dict[str, Any]) -> tuple[str, Any]:
    """The whole text with a right answer, and what happened to it."""
    status, answer = ask(cluster, content)
    assert status == 200, answer
    said = str(answer["choices"][0]["text"])
    assert said == expected(reference, content)
    router = cluster.pod("router")
    page = http_get(f"http://{router.ip}:9090/debug/requests?id={answer['id']}")[1]
    return content["prompt"] + said, json.loads(page)["requests"][0]["timelines"][0]


def usable(cluster: Cluster) -> set[str]:
    router = cluster.pod("router")
    page = json.loads(http_get(f"http://{router.ip}:9090/debug/workers")[1])
    return {one["worker"] for one in page["workers"] if one["usable"]}


def copied(cluster: Cluster, pool: str, name: str, direction: str) -> float:
    pod = next(pod for pod in cluster.pods(pool) if pod.name == name)
    samples = cluster.metrics(pod)["pdcluster_engine_kv_copied_tokens_total"]
    wanted = {"direction": direction, "outcome": "done"}
    return sum(n for labels, n in samples.items() if wanted.items() <= dict(labels).items())


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_prefill_that_lost_its_cache_pulls_from_decode(
    deep: Path, its_reference: Reference, tmp_path: Path, paced: dict[str, Any], transport: str
) -> None:
    document = spec(deep)
    document["spec"]["prefill"] |= paced
    document["spec"]["decode"] |= paced
    document["spec"]["kvTransfer"] = {"transport": transport}
    document["spec"]["router"] = {"routing": {"disaggregate": "always"}}
    with serving(document, tmp_path) as cluster:
        text, first = turn(cluster, its_reference, body(text_of(1600, 1), 24))
        assert first["pulled_tokens"] == 0
        prefill, decode = cluster.pod("prefill"), cluster.pod("decode")
        cluster.kill(prefill.pid, signal.SIGKILL)
        cluster.until(lambda: cluster.pod("prefill").pid not in (0, prefill.pid), "its return")
        cluster.until(lambda: len(usable(cluster)) == 2, "both are usable")

        _, second = turn(cluster, its_reference, body(text + " and then?", 24))

        had = (first["prompt_tokens"] + 23) // BLOCK  # the last token's KV is never computed
        assert second["pulled_from"] == decode.name
        assert second["pulled_tokens"] == had * BLOCK == second["cached_tokens"]
        assert second["pulled_bytes"] == had * BLOCK_BYTES
        assert f"{had * BLOCK} tokens pulled from {decode.name}" in second["reason"]
        new_blocks = -(-second["prompt_tokens"] // BLOCK) - had
        assert second["kv_bytes"] == new_blocks * BLOCK_BYTES  # back to decode goes what is new
        assert copied(cluster, "prefill", prefill.name, "in") == had * BLOCK
        assert copied(cluster, "decode", decode.name, "out") == had * BLOCK
        cluster.until_settled()


@pytest.mark.parametrize("transport", ["shm", "tcp", "nixl"])
def test_a_worker_that_drains_is_taken_over_from(
    deep: Path, its_reference: Reference, tmp_path: Path, paced: dict[str, Any], transport: str
) -> None:
    document = spec(deep, colocated={"replicas": 2, **paced})
    document["spec"]["kvTransfer"] = {"transport": transport}
    with serving(document, tmp_path) as cluster:
        cluster.until(lambda: len(usable(cluster)) == 2, "both are usable")
        talk = {"session_id": "a talk"}
        text, first = turn(cluster, its_reference, body(text_of(1600, 2), 24, **talk))
        owner = next(p for p in cluster.pods("colocated") if p.name == first["decode_worker"])
        # Somebody else's long answer keeps it busy while it drains.
        long = body(text_of(20, 3), 1900, **talk)
        other = threading.Thread(target=ask, args=(cluster, long))
        other.start()
        cluster.until(lambda: cluster.blocks(owner)["active"] > 0, "the other one runs")
        cluster.kill(owner.pid, signal.SIGTERM)
        cluster.until(lambda: owner.name not in usable(cluster), "it drains")

        _, second = turn(cluster, its_reference, body(text + " and then?", 24, **talk))

        assert second["decode_worker"] != owner.name
        assert second["pulled_from"] == owner.name
        assert second["pulled_tokens"] == second["cached_tokens"] > 1500, second["reason"]
        assert second["attempts"] == 1
        other.join(60)
