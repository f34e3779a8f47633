"""PDPools on a real API server: seeded by a field manager of their own, scaled by kubectl in mode
External, set back otherwise; what others apply doesn't take the replicas away.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from e2e.cluster.envtest import Kube
from pd_operator import kube as pd_kube
from pd_operator.podparts import Manifest
from pd_operator.resources import EVENT, PDPOOL, STATEFUL_SET
from tests.envtest import podstub
from tests.envtest.operating import Watching, operating
from tests.pd_operator.objects import document

NAME = "chat"
DECODE = f"{NAME}-decode"
EXTERNAL: dict[str, Any] = {
    "spec.decode.replicas": ...,
    "spec.decode.scaling": {"mode": "External", "minReplicas": 1, "maxReplicas": 4},
}

pytestmark = pytest.mark.usefixtures("crds")


@asynccontextmanager
async def serving(kube: Kube, namespace: str, **changes: Any) -> AsyncIterator[Watching]:
    """The PDCluster is there and ready, and an operator looks after it."""
    api = pd_kube.Kube(await pd_kube.connect(str(kube.kubeconfig)))
    there = Watching(api, namespace)
    try:
        async with (
            podstub.running(kube.kubeconfig, namespace),
            operating(kube.kubeconfig, namespace),
        ):
            await there.create(document(**{"metadata.name": NAME} | changes))
            await there.until_ready(NAME)
            yield there
    finally:
        await api.close()


async def decode_pool(there: Watching) -> Manifest:
    return await there.api.get(PDPOOL, there.namespace, DECODE)


async def until_replicas(there: Watching, in_pool: int, in_set: int) -> None:
    async def so() -> bool:
        found = [
            (
                await there.api.list(kind, there.namespace, selector="pdcluster.dev/role=decode")
            ).items
            for kind in (PDPOOL, STATEFUL_SET)
        ]
        wanted, sets = ([item["spec"]["replicas"] for item in items] for items in found)
        told = [item.get("status", {}).get("replicas") for item in found[0]]
        return (wanted, sets, told) == ([in_pool], [in_set], [in_set])

    await there.until(f"PDPool {in_pool}, StatefulSet {in_set}", so)


async def kubectl_scale(kube: Kube, there: Watching, replicas: int) -> None:
    command = ("scale", "pdpool", DECODE, "-n", there.namespace, f"--replicas={replicas}")
    await asyncio.to_thread(kube.kubectl, *command)


def managers(pool: Manifest, path: tuple[str, str]) -> set[str]:
    first, second = path
    return {
        one["manager"]
        for one in pool["metadata"]["managedFields"]
        if second in one["fieldsV1"].get(first, {})
    }


def test_kubectl_scales_in_external_mode(run, kube: Kube, namespace: str) -> None:
    async def scenario() -> None:
        async with serving(kube, namespace, **EXTERNAL) as there:
            await until_replicas(there, 1, 1)
            await kubectl_scale(kube, there, 3)
            await until_replicas(there, 3, 3)
            await kubectl_scale(kube, there, 9)  # beyond the bounds
            await until_replicas(there, 9, 4)
            selector = (await decode_pool(there))["status"]["selector"]
            pods = await there.api.list(podstub.POD, namespace, selector=selector)
            assert len(list(pods.items)) == 4
            await there.edit(NAME, {"prefill": {"engine": {"maxRunning": 8}}})
            await there.until_ready(NAME)
            await until_replicas(there, 9, 4)
            assert managers(await decode_pool(there), ("f:spec", "f:replicas")) == {"kubectl"}

    run(scenario(), deadline_s=100.0)


def test_fixed_replicas_are_set_back_and_belong_to_a_manager_of_their_own(
    run, kube: Kube, namespace: str
) -> None:
    async def scenario() -> None:
        async with serving(kube, namespace, **{"spec.decode.replicas": 2}) as there:
            await until_replicas(there, 2, 2)
            own = {pd_kube.REPLICAS_MANAGER}
            assert managers(await decode_pool(there), ("f:spec", "f:replicas")) == own
            await kubectl_scale(kube, there, 5)
            await until_replicas(there, 2, 2)
            assert managers(await decode_pool(there), ("f:spec", "f:replicas")) == own

            async def told() -> bool:
                events = await there.api.list(EVENT, namespace)
                return any(one["reason"] == "ScaleReverted" for one in events.items)

            await there.until("the event", told)
            await there.edit(NAME, {"decode": {"replicas": 3}})
            await until_replicas(there, 3, 3)
            await there.delete("PDPool", DECODE)  # it comes back, and with it its size
            await until_replicas(there, 3, 3)

    run(scenario(), deadline_s=100.0)
