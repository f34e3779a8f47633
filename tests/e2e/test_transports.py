"""A cluster of real processes by each transport that one machine has: the same right answer,
the metrics say by which way the KV went, and a worker that is killed leaves nothing. Pools with
other blocks: the same answers, for whatever of a prompt decode has already. Pools of two
precisions: prefill's own is what travels."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster import Cluster, serving, spec
from tests.e2e.asking import ask, body, expected, text, text_of
from tests.reference import Reference


def bytes_taken(cluster: Cluster) -> dict[str, float]:
    """KV that the decode worker has taken, by transport."""
    samples = cluster.metrics(cluster.pod("decode")).get("pdcluster_engine_kv_bytes_total", {})
    return {dict(labels)["transport"]: size for labels, size in samples.items() if size}


def sent_by(cluster: Cluster) -> set[str]:
    """Transports by which the decode worker has taken KV."""
    return set(bytes_taken(cluster))


@pytest.mark.parametrize(
    ("asked", "taken"), [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp"), ("nixl", "nixl")], ids=str
)
def test_the_answer_is_right_by_each(
    model: Path, reference: Reference, tmp_path: Path, asked: str, taken: str
) -> None:
    document = spec(model)
    document["spec"]["kvTransfer"] = {"transport": asked}
    document["spec"]["router"] = {"routing": {"disaggregate": "always"}}
    files = set(os.listdir("/dev/shm"))
    with serving(document, tmp_path) as cluster:
        for number in range(2):
            question = body(text_of(100 + number, number), 12)
            assert text(cluster, question) == expected(reference, question)
        assert sent_by(cluster) == {taken}
        pod = cluster.pod("prefill")
        cluster.kill(pod.pid, signal.SIGKILL)
        cluster.until(
            lambda: cluster.pod("prefill").ready and cluster.pod("prefill").pid != pod.pid,
            "the prefill worker's return",
        )
        question = body(text_of(90, 7), 12)
        assert text(cluster, question) == expected(reference, question)
        decode = cluster.pod("decode")
        maps = Path(f"/proc/{decode.pid}/maps").read_text()
        assert maps.count("memfd:pdcluster-kv") <= 2  # its own pool, and the new sender's
    assert set(os.listdir("/dev/shm")) <= files


@pytest.mark.parametrize(("transport", "blocks"), [("shm", (16, 24)), ("tcp", (32, 16))], ids=str)
def test_pools_with_other_blocks_give_the_same_answers(
    model: Path,
    reference: Reference,
    tmp_path: Path,
    transport: str,
    blocks: tuple[int, int],
) -> None:
    document = spec(model)
    document["spec"]["kvTransfer"] = {"transport": transport}
    document["spec"]["router"] = {"routing": {"disaggregate": "always"}}
    for pool, block_tokens in zip(("prefill", "decode"), blocks, strict=True):
        document["spec"][pool]["engine"] = {"blockTokens": block_tokens}
    whole = text_of(110, 1)
    with serving(document, tmp_path) as cluster:
        for asked in (whole[:240], whole[:240], whole):  # new, known to both, known in part
            question = body(asked, 12)
            assert text(cluster, question) == expected(reference, question)
        assert sent_by(cluster) == {transport}


def test_pools_of_two_precisions(model: Path, reference: Reference, tmp_path: Path) -> None:
    document = spec(model, dtype="float32")
    document["spec"]["router"] = {"routing": {"disaggregate": "always"}}
    document["spec"]["prefill"]["engine"] = {"dtype": "bfloat16"}
    question = body(text_of(60, 3), 12)
    blocks = -(-len(reference.ids(question["prompt"])) // 16)
    with serving(document, tmp_path) as cluster:
        status, answer = ask(cluster, question)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 12
        layers, kv_heads, head_dim, two_bytes = 3, 2, 16, 2
        assert bytes_taken(cluster) == {
            "shm": blocks * 16 * 2 * layers * kv_heads * head_dim * two_bytes
        }
