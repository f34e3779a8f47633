"""The operator is killed after each single write of a story (creation, scaling, rollouts, a
change from two pools to one, deletion), and started again: what exists in the end is what a
story without any crash ends with.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.envtest import Kube
from pd_operator import kube as pd_kube
from pd_operator.podparts import Manifest
from tests.envtest import podstub
from tests.envtest.operating import (
    CrashAfter,
    Watching,
    differences,
    is_settled,
    normalised,
    operating,
)
from tests.pd_operator.objects import document

NAME = "chat"
LEAST_POINTS = 100
AT_ONCE = 4
STORY: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("creation", None),
    ("scaling up", {"decode": {"replicas": 3}}),
    (
        "rollout of both pools",
        {"prefill": {"engine": {"chunkTokens": 64}}, "decode": {"engine": {"maxRunning": 8}}},
    ),
    ("scaling down and a rollout", {"decode": {"replicas": 1, "engine": {"maxRunning": 16}}}),
    ("one pool instead of two", {"prefill": None, "decode": None, "colocated": {"replicas": 2}}),
    ("two pools again", {"colocated": None, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}),
)


@asynccontextmanager
async def namespace_of(api: pd_kube.Kube, kube: Kube) -> AsyncIterator[Watching]:
    """A namespace of its own for one story."""
    name = f"crash-{secrets.token_hex(4)}"
    for kind, metadata in (
        ("Namespace", {"name": name}),
        ("ServiceAccount", {"name": "default", "namespace": name}),
    ):
        await asyncio.to_thread(
            kube.api.create, {"apiVersion": "v1", "kind": kind, "metadata": metadata}
        )
    yield Watching(api, name)


async def trigger(there: Watching, edit: dict[str, Any] | None) -> None:
    if edit is None:
        await there.create(document(**{"metadata.name": NAME}))
    else:
        await there.edit(NAME, edit)


async def story(kubeconfig: Path, there: Watching, crash_after: int) -> "Told":
    """What exists after each chapter, and where the operator was killed. 0: never."""
    told = Told()
    async with podstub.running(kubeconfig, there.namespace):
        for chapter, edit in STORY:
            crash = CrashAfter(crash_after)
            async with operating(
                kubeconfig, there.namespace, clean=False, on_send=crash if crash_after else None
            ) as (_, seam):
                await trigger(there, edit)
                ready = asyncio.create_task(there.until_ready(NAME))
                crashed = asyncio.create_task(crash.crashed.wait())
                await asyncio.wait((ready, crashed), return_when=asyncio.FIRST_COMPLETED)
                if not crash.crashed.is_set():
                    await ready
                elif crash.at is not None:
                    await asyncio.sleep(0)  # the write is on its way; the server finishes it
                    told.points[f"{chapter}: {crash.at.verb} {crash.at.path}"] += 1
                told.writes[chapter] = len(seam.writes)
                for task in (ready, crashed):
                    task.cancel()
                await asyncio.wait((ready, crashed))
                if crash.at is not None:
                    await crash.done.wait()
            async with operating(kubeconfig, there.namespace):
                await there.until_ready(NAME)
                told.states[chapter] = normalised(await there.objects())
        await there.delete("PDCluster", NAME)  # nobody is at work
        await there.until_empty()
    return told


class Told:
    def __init__(self) -> None:
        self.states: dict[str, list[Manifest]] = {}
        self.points: Counter[str] = Counter()
        self.writes: dict[str, int] = {}


async def hopeless_story(kubeconfig: Path, there: Watching) -> "Told":
    """As `story`, but no operator lives longer than one write."""
    told = Told()
    async with podstub.running(kubeconfig, there.namespace):
        for chapter, edit in STORY[:3]:
            await trigger(there, edit)
            while not is_settled(await there.cluster(NAME)):
                crash = CrashAfter(1)
                async with operating(kubeconfig, there.namespace, clean=False, on_send=crash) as (
                    _,
                    seam,
                ):
                    ready = asyncio.create_task(there.until_ready(NAME))
                    crashed = asyncio.create_task(crash.done.wait())
                    await asyncio.wait((ready, crashed), return_when=asyncio.FIRST_COMPLETED)
                    for task in (ready, crashed):
                        task.cancel()
                    await asyncio.wait((ready, crashed))
                    told.points[chapter] += len(seam.writes)
            told.states[chapter] = normalised(await there.objects())
    return told


@pytest.mark.usefixtures("crds")
@pytest.mark.timeout(900)
def test_killed_after_each_write(kube: Kube, run):
    async def scenario() -> None:
        api = pd_kube.Kube(await pd_kube.connect(str(kube.kubeconfig)))
        async with namespace_of(api, kube) as there:
            calm = await story(kube.kubeconfig, there, 0)
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(crash_after: int) -> Told:
            async with slots, namespace_of(api, kube) as there:
                return await story(kube.kubeconfig, there, crash_after)

        most = max(calm.writes.values())
        all_told = await asyncio.gather(*(one(n) for n in range(1, most + 1)))
        async with namespace_of(api, kube) as there:
            all_told.append(await hopeless_story(kube.kubeconfig, there))
        await api.close()
        points = sum(told.points.total() for told in all_told)
        print(f"killed at {points} points; writes of the calm story: {calm.writes}")
        for number, told in enumerate(all_told, 1):
            for chapter, state in told.states.items():
                different = differences(calm.states[chapter], state)
                assert not different, f"killed after write {number} of {chapter}"
        assert points >= LEAST_POINTS

    run(scenario(), deadline_s=880)
