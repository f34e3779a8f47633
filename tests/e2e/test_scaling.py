"""Story: a PDCluster with `scaling: {mode: SLO}` on this machine, with engines of known speed.
Chats grow and decode goes from one worker to two and back; prompts get long and prefill alone
grows. Nobody's request fails, and `explain` tells why.
"""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client import Streamed
from tests.cluster import PDCLUSTER, Cluster, serving, spec
from tests.e2e.asking import Streams, body, text_of

PACE = "0.010,0.006,0.002"
"""A step 10 ms, each sequence 6 ms more: 5 sequences are within 40 ms. Prompts: 500 tokens/s."""
CHATS, CHAT_TOKENS = 10, 80
LONG_PROMPT_TOKENS, LONG_PROMPTS = 350, 6
MOVED_S = 150.0
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def scaled(model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # What begins like a path is looked for among the pod's mounts.
    values = {"PYTHONPATH": f":{root / 'tests' / 'e2e' / 'paced'}:{root}", "PD_TEST_PACE": PACE}
    env = [{"name": name, "value": value} for name, value in values.items()]
    windows = {"window": "10s", "panicWindow": "5s", "scaleDownWindow": "20s"}
    pool: dict[str, Any] = {
        "scaling": {"minReplicas": 1, "maxReplicas": 2, **windows},
        "engine": {"threads": 1},
        "template": {"spec": {"containers": [{"name": "engine", "env": env}]}},
    }
    decode = {**pool, "engine": {"threads": 1, "speculation": {"method": "none"}}}
    made = spec(
        model, prefill=pool, decode=decode,
        slo={"ttft": {"target": "3s"}, "tpot": {"target": "40ms"}},
        router={"routing": {"disaggregate": "always"}},
    )  # fmt: skip
    with serving(made, tmp_path_factory.mktemp("scaled")) as running:
        running.until(running.all_ready, "all pods ready", 60)
        yield running


def sizes(cluster: Cluster) -> tuple[int, int]:
    """Workers that serve: prefill, decode."""
    return (
        sum(pod.ready and not pod.terminating for pod in cluster.pods("prefill")),
        sum(pod.ready and not pod.terminating for pod in cluster.pods("decode")),
    )


class Load:
    """So many streams at any time, each followed by another; `ended` are their results."""

    def __init__(self, cluster: Cluster, streams: int, prompt: int, output: int) -> None:
        self.ended: list[Streamed] = []
        self._going = True
        self._cluster, self._shape = cluster, (prompt, output)
        self._tasks = [asyncio.create_task(self._follow(number)) for number in range(streams)]

    async def _follow(self, number: int) -> None:
        prompt, output = self._shape
        while self._going:
            content = body(text_of(prompt, number=number), output)
            number += 1000
            self.ended += await Streams(self._cluster, [content]).end(60.0)

    async def stop(self) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)
        assert self.ended
        assert all(one.done for one in self.ended), [one.error for one in self.ended if one.error]


async def reach(cluster: Cluster, wanted: tuple[int, int]) -> None:
    await asyncio.to_thread(
        cluster.until, lambda: sizes(cluster) == wanted, f"{wanted} workers", MOVED_S
    )


def test_each_pool_follows_its_own_load(scaled: Cluster) -> None:
    asyncio.run(story(scaled))


async def story(scaled: Cluster) -> None:
    assert sizes(scaled) == (1, 1)
    chats = Load(scaled, CHATS, prompt=20, output=CHAT_TOKENS)
    await reach(scaled, (1, 2))
    await chats.stop()
    await reach(scaled, (1, 1))
    prompts = Load(scaled, LONG_PROMPTS, prompt=LONG_PROMPT_TOKENS, output=2)
    await reach(scaled, (2, 1))
    await prompts.stop()
    await reach(scaled, (1, 1))


def test_explain_tells_why(scaled: Cluster) -> None:
    found = subprocess.run(
        [*PDCLUSTER, "explain", "test", "--last", "1000"],
        env=scaled.env, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "decode from 1 to 2" in found.stdout
    assert "decode from 2 to 1: nothing has asked for so many for a whole window" in found.stdout
    assert "prefill from 1 to 2" in found.stdout
