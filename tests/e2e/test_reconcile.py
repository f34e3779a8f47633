"""Editing the PDCluster file while it runs: replicas change, a changed engine setting rolls
the pool under running streams, a bad edit leaves what runs.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client import Streamed
from tests.cluster import Cluster, pdcluster, serving, spec
from tests.e2e.asking import Streams, body, expected, text, text_of
from tests.reference import Reference

ROLL_DEADLINE_S = 90.0


@pytest.fixture
def alone(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with serving(spec(model), tmp_path) as running:
        yield running


def replicas(pool: str, count: int) -> Any:
    return lambda document: document["spec"][pool].update(replicas=count)


@pytest.mark.timeout(240)
def test_replicas_go_up_and_down(alone: Cluster):
    [first] = alone.pods("decode")
    alone.edit(replicas("decode", 2))
    alone.until(lambda: len(alone.pods("decode")) == 2 and alone.all_ready(), "two", 60)

    alone.edit(replicas("decode", 1))
    alone.until(lambda: len(alone.pods("decode")) == 1, "one again", 60)

    assert [p.pid for p in alone.pods("decode")] == [first.pid]
    assert text(alone, body("hello", 8))


@pytest.mark.timeout(240)
def test_a_changed_engine_setting_rolls_the_pool_under_running_streams(
    alone: Cluster, reference: Reference
):
    """Streams run one after the other in four lanes until the old worker is gone."""
    contents = [body(text_of(40, number=i), 300) for i in range(4)]
    wanted = [expected(reference, content) for content in contents]
    [old], [prefill] = alone.pods("decode"), alone.pods("prefill")

    def rolled() -> bool:
        pods = alone.pods("decode")
        return len(pods) == 1 and pods[0].revision != old.revision and pods[0].ready

    async def scenario() -> list[list[Streamed]]:
        rounds = [await Streams(alone, contents).end(ROLL_DEADLINE_S)]
        alone.edit(lambda d: d["spec"]["decode"].setdefault("engine", {}).update(maxRunning=32))
        rolling = asyncio.create_task(
            asyncio.to_thread(alone.until, rolled, "the pool rolled", ROLL_DEADLINE_S)
        )
        while not rolling.done():
            rounds.append(await Streams(alone, contents).end(ROLL_DEADLINE_S))
        await rolling
        return rounds

    rounds = asyncio.run(scenario())

    assert len(rounds) > 1
    for results in rounds:
        assert [r.error for r in results] == [None] * len(contents)
        assert [r.text for r in results] == wanted
    assert [p.pid for p in alone.pods("prefill")] == [prefill.pid]
    alone.until_settled()


@pytest.mark.timeout(240)
def test_a_bad_edit_leaves_what_runs_and_the_next_good_one_counts(alone: Cluster):
    before = {p.name: p.pid for p in alone.pods()}
    good = alone.file.read_text()
    alone.write("apiVersion: pdcluster.dev/v1alpha1\nkind: PDCluster\nspec: [broken")
    alone.wait_line("(?i)yaml|broken|invalid|not", 30)
    alone.write("kind: PDCluster\napiVersion: pdcluster.dev/v1alpha1\nmetadata: {name: test}\n")
    alone.wait_line(r"spec:? is missing|spec: ", 30)
    assert {p.name: p.pid for p in alone.pods()} == before
    assert text(alone, body("hello", 8))

    alone.write(good)
    alone.edit(replicas("prefill", 2))
    alone.until(lambda: len(alone.pods("prefill")) == 2 and alone.all_ready(), "two", 60)


def test_status_tells_what_runs(alone: Cluster):
    def shown_ready() -> bool:
        [shown] = alone.status()["clusters"]
        conditions = shown["document"]["status"]["conditions"]
        return {c["type"]: c["status"] for c in conditions}["Ready"] == "True"

    alone.until(shown_ready, "status says Ready", 10)
    status = alone.status()
    [shown] = status["clusters"]
    assert (shown["name"], shown["url"]) == ("test", alone.base_url)
    assert {p["pool"] for p in status["pods"]} == {"prefill", "decode", "router"}

    table = pdcluster("status", env=alone.env).stdout
    head, row = table.splitlines()[:2]
    assert head.split()[:4] == ["NAME", "READY", "PREFILL", "DECODE"]
    assert row.split()[:4] == ["test", "True", "1/1", "1/1"]


@pytest.mark.timeout(240)
def test_a_pod_that_is_killed_comes_back_under_its_name(alone: Cluster):
    [pod] = alone.pods("prefill")
    alone.kill(pod.pid, signal.SIGKILL)

    def back() -> bool:
        pods = alone.pods("prefill")
        return len(pods) == 1 and pods[0].pid != pod.pid and pods[0].ready

    alone.until(back, "a new process", 60)
    assert alone.pod("prefill").name == pod.name
    assert alone.pod("prefill").restarts == pod.restarts + 1
