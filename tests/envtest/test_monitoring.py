"""The kinds of Prometheus' operator, installed after ours: what watches a PDCluster comes without
a restart, comes back where somebody deletes it, and nothing else changes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.api import install_crds
from e2e.cluster.envtest import EnvTest
from pd_operator import informer
from tests import foreign
from tests.envtest.operating import Watching, scene
from tests.envtest.test_operator import at_rest
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 100.0
KINDS = ("PodMonitor", "PrometheusRule")


@pytest.fixture
def monitoring(own_kube: EnvTest, tmp_path: Path) -> Iterator[Path]:
    with foreign.written(own_kube.api, foreign.MONITORING, tmp_path / "monitoring.yaml") as file:
        yield file


async def until_watched(there: Watching) -> None:
    async def watched() -> bool:
        return all([await there.find(kind, "chat") for kind in KINDS])

    await there.until("what watches it is there", watched)


def test_they_come_once_their_kinds_are_there(
    own_kube: EnvTest, namespace: str, run: Any, monitoring: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(informer, "ABSENT_S", 0.2)

    async def scenario() -> None:
        async with scene(own_kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            before = await there.objects()

            install_crds(own_kube.api, [monitoring])
            await until_watched(there)
            rule = await there.get("PrometheusRule", "chat")
            alerts = [one.get("alert") for one in rule["spec"]["groups"][0]["rules"]]
            assert "PDClusterNoWorkers" in alerts
            await at_rest(stage)
            for kind in KINDS:
                await there.delete(kind, "chat")
            await until_watched(there)
            uids = {one["metadata"]["uid"] for one in before}
            assert {one["metadata"]["uid"] for one in await there.objects()} == uids

    run(scenario(), DEADLINE_S)
