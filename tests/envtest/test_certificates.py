"""Certificates by an authority of the PDCluster's own, on a real API server: made before pods,
renewed by the clock, nothing written at rest, killed at any write, nobody's Secret overwritten,
gone with the PDCluster or with the mode, keys nowhere but in Secrets.
"""

import base64
import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from e2e.cluster.envtest import EnvTest, Kube
from pd_core.identity import Identity, Part
from pd_operator import pki, reconcile
from pd_operator.podparts import Manifest, Settings
from pd_operator.resources import EVENT, SECRET
from tests.envtest.operating import (
    CrashAfter,
    Scene,
    Watching,
    condition,
    looking_on,
    operating,
    scene,
)
from tests.envtest.podstub import running
from tests.envtest.test_operator import at_rest
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 100.0
AUTO = {"spec.security": {"tls": {"mode": "Auto"}}}
NAMES = ["chat-tls-ca", "chat-tls-router", "chat-tls-workers"]


@dataclass
class Clock:
    """Real time, and as much later as a test wants."""

    ahead: timedelta = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


async def secrets(there: Watching) -> dict[str, Manifest]:
    """Those of certificates."""
    listed = await there.api.list(SECRET, there.namespace)
    named = {one["metadata"]["name"]: one for one in listed.items}
    return {name: one for name, one in named.items() if not name.endswith("-token")}


def files(secret: Manifest) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in secret["data"].items()}


def is_whole(namespace: str, found: dict[str, Manifest]) -> bool:
    """Whether each part has a certificate of an authority that is kept and trusted by both."""
    kept = pki.read_bundle(
        b"".join(text for name, text in files(found[NAMES[0]]).items() if name.endswith(".crt"))
    )
    for part, name in zip(Part, NAMES[1:], strict=True):
        one = files(found[name])
        pair = pki.Pair(one["tls.crt"], one["tls.key"])
        leaf = pki.read_leaf(pair, Identity(namespace, "chat", part), kept)
        if leaf is None or {known.facts.id for known in pki.read_bundle(one["ca.crt"])} != {
            known.facts.id for known in kept
        }:
            return False
    return True


async def look_again(stage: Scene, number: int) -> None:
    """A change of the object that asks for nothing: it only makes the operator look."""
    await stage.there.edit("chat", {"rollout": {"pendingTimeout": f"{300 + number}s"}})
    await stage.there.until_ready("chat")


def test_a_life_of_certificates(kube: Kube, namespace: str, run, caplog) -> None:
    """Made, kept, renewed, the authority followed by the next one; each write is due."""
    clock = Clock()
    seen: list[dict[str, Manifest]] = []

    async def changed_after(stage: Scene, days: float) -> set[str]:
        clock.ahead += timedelta(days=days)
        await look_again(stage, len(seen))
        seen.append(await secrets(stage.there))
        assert is_whole(namespace, seen[-1])
        return {name for name in NAMES if seen[-1][name]["data"] != seen[-2][name]["data"]}

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace, clock=clock) as stage:
            await stage.there.create(document(**AUTO))
            await stage.there.until_ready("chat")
            seen.append(await secrets(stage.there))
            assert sorted(seen[0]) == NAMES
            assert is_whole(namespace, seen[0])
            await at_rest(stage)
            assert await changed_after(stage, 19) == set()
            assert await changed_after(stage, 2) == {*NAMES[1:]}
            assert await changed_after(stage, 250) == {*NAMES[1:]}
            assert await changed_after(stage, 5) == {*NAMES}  # the next authority is told of
            assert await changed_after(stage, 1.1) == {*NAMES[1:]}  # and used
            assert await changed_after(stage, 1.1) == {*NAMES}  # and the last one forgotten
            assert await changed_after(stage, 1.1) == set()
            await at_rest(stage)
            document_now = await stage.there.cluster("chat")
            events = list((await stage.there.api.list(EVENT, namespace)).items)
            shown = json.dumps([document_now, events])
            for one in seen:
                for name in NAMES:
                    for file, text in one[name]["data"].items():
                        if file.endswith(".key"):
                            assert text not in shown
                            assert text not in caplog.text
            assert "PRIVATE KEY" not in shown + caplog.text

    with caplog.at_level(logging.DEBUG, logger="pd_operator"):
        run(scenario(), DEADLINE_S)


def test_deletion_leaves_nothing(own_kube: EnvTest, namespace: str, run, controllers: Any) -> None:
    """By the real garbage collector, while no operator runs."""
    controllers("garbage-collector-controller")

    async def scenario() -> None:
        async with looking_on(own_kube.kubeconfig, namespace) as there:
            async with (
                running(own_kube.kubeconfig, namespace, collects=False),
                operating(own_kube.kubeconfig, namespace),
            ):
                await there.create(document(**AUTO))
                await there.until_ready("chat")
                for one in (await secrets(there)).values():
                    [owner] = one["metadata"]["ownerReferences"]
                    assert (owner["kind"], owner["name"]) == ("PDCluster", "chat")
            await there.delete("PDCluster", "chat")

            async def gone() -> bool:
                return not await secrets(there)

            await there.until("no Secret is left", gone)

    run(scenario(), DEADLINE_S)


@pytest.mark.parametrize("name", NAMES)
def test_nobodys_secret_is_overwritten(
    kube: Kube, namespace: str, run, monkeypatch, name: str
) -> None:
    """Without its authority's Secret nothing is issued; with the name free all goes on."""
    monkeypatch.setattr(reconcile, "RETRY_S", 0.2)
    foreign = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "data": {"theirs": "eA=="},
    }

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.api.create(SECRET, foreign)
            await there.create(document(**AUTO))
            told = await there.until_condition("chat", "Ready", "NameTaken")
            assert f"Secret {name} exists and isn't ours" in told["message"]
            found = await secrets(there)
            assert found[name]["data"] == foreign["data"]
            assert "ownerReferences" not in found[name]["metadata"]
            if name == NAMES[0]:
                assert set(found) == {name}
            await there.delete("Secret", name)
            await there.until_ready("chat")
            assert is_whole(namespace, await secrets(there))

    run(scenario(), DEADLINE_S)


def test_killed_after_each_write(kube: Kube, namespace: str, run) -> None:
    """An authority that issued is always one that is kept."""

    async def scenario() -> None:
        async with (
            looking_on(kube.kubeconfig, namespace) as there,
            running(kube.kubeconfig, namespace),
        ):
            for writes in range(1, 6):
                crash = CrashAfter(writes)
                async with operating(kube.kubeconfig, namespace, clean=False, on_send=crash):
                    await there.create(document(**AUTO))
                    await crash.done.wait()
                async with operating(kube.kubeconfig, namespace):
                    await there.until_ready("chat")
                    assert is_whole(namespace, await secrets(there))
                await there.delete("PDCluster", "chat")
                await there.until_empty()

    run(scenario(), DEADLINE_S)


def test_what_is_deleted_or_edited_comes_back(kube: Kube, namespace: str, run) -> None:
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document(**AUTO))
            await there.until_ready("chat")
            before = await secrets(there)
            broken = {"data": {"tls.key": base64.b64encode(b"x").decode()}}
            await there.api.patch(SECRET, namespace, NAMES[1], broken)
            await there.delete("Secret", NAMES[2])

            async def whole() -> bool:
                found = await secrets(there)
                return sorted(found) == NAMES and is_whole(namespace, found)

            await there.until("all are whole again", whole)
            assert (await secrets(there))[NAMES[0]]["data"] == before[NAMES[0]]["data"]

    run(scenario(), DEADLINE_S)


def test_secrets_go_after_the_pods_that_mount_them(kube: Kube, namespace: str, run) -> None:
    """Another mode rolls both pools and the routers; what old pods mount outlives them."""
    held: list[str] = []

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document(**AUTO))
            await there.until_ready("chat")
            stage.stub.ready = lambda pod: "pdcluster.dev/tls" in pod["metadata"]["labels"]
            await there.edit("chat", {"security": {"tls": {"mode": "Disabled"}}})
            await there.until_condition("chat", "Progressing", "RollingOut")
            held.extend(await secrets(there))
            stage.stub.ready = lambda _pod: True
            stage.stub.collect()

            async def gone() -> bool:
                return not await secrets(there)

            await there.until("the Secrets have gone", gone)
            await there.until_ready("chat")

    run(scenario(), DEADLINE_S)
    assert sorted(held) == NAMES


def test_an_operator_without_the_right_says_so(kube: Kube, namespace: str, run) -> None:
    async def scenario() -> None:
        settings = Settings(certificates=False)
        async with scene(kube.kubeconfig, namespace, settings=settings) as stage:
            await stage.there.create(document(**AUTO))
            told = await stage.there.until_condition("chat", "Ready", "InvalidSpec")
            assert "certificates.enabled=true" in told["message"]
            assert condition(await stage.there.cluster("chat"), "Available") == {}
            assert not await secrets(stage.there)

    run(scenario(), DEADLINE_S)
