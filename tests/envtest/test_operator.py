"""The operator on a real API server: from creation to deletion, nothing written at rest,
children by hand, names that are taken, objects made again, many edits, two namespaces.
"""

import asyncio
from typing import Any

import pytest

from e2e.cluster.audit import Audit
from e2e.cluster.envtest import EnvTest, Kube
from pd_operator import apierrors, reconcile
from pd_operator.informer import is_watched
from pd_operator.podparts import Manifest
from pd_operator.resources import BY_KIND, EVENT, POD_MONITOR, PROMETHEUS_RULE, SERVICE
from tests.envtest.access import rules
from tests.envtest.operating import Scene, condition, is_settled, looking_on, operating, scene
from tests.envtest.podstub import running
from tests.foreign import MONITORING
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
REST_S = 3.0
DEADLINE_S = 110.0


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in objects if one["kind"] == kind]


async def at_rest(stage: Scene) -> None:
    """What was under way ends, and then nothing is written while nothing changes."""

    async def quiet() -> bool:
        stage.seam.writes.clear()
        await asyncio.sleep(0.5)
        return not stage.seam.writes

    await stage.there.until("writes end", quiet)
    await asyncio.sleep(REST_S)
    assert stage.writes() == []


def test_a_life(own_kube: EnvTest, namespace: str, audit: Audit, run):
    """Creation, rest, a restart, scaling, a rollout, deletion: with the rights that it has."""
    account = own_kube.service_account(
        namespace, "operator", rules=rules("namespaced", "certificates", "lease")
    )

    def written() -> list[str]:
        writes = audit.writes(user=f"{namespace}:operator")
        return [f"{w.verb} {w.resource}/{w.name}" for w in writes if w.resource != "leases"]

    async def quiet() -> bool:
        audit.forget()
        await asyncio.sleep(0.5)
        return not written()

    async def scenario() -> None:
        async with looking_on(own_kube.kubeconfig, namespace) as there:
            async with running(own_kube.kubeconfig, namespace):
                async with operating(account, namespace):
                    await there.create(document())
                    await there.until_ready("chat")
                    await there.until("writes end", quiet)
                    await asyncio.sleep(REST_S)
                    assert written() == []
                async with operating(account, namespace):
                    await asyncio.sleep(REST_S)
                    assert written() == []
                    await there.edit("chat", {"decode": {"replicas": 3}})
                    await there.until_ready("chat")
                    sets = of_kind(await there.objects(), "StatefulSet")
                    assert sorted(one["spec"]["replicas"] for one in sets) == [1, 3]
                    await there.edit("chat", {"decode": {"engine": {"maxRunning": 8}}})
                    await there.until_ready("chat")
                    assert len(of_kind(await there.objects(), "StatefulSet")) == 2
                    await there.until("writes end", quiet)
                    await there.delete("PDCluster", "chat")
                    await there.until_empty()
                    assert written() == []
            for one in await there.objects():
                assert "finalizers" not in one["metadata"]

    run(scenario(), DEADLINE_S)


def test_no_finalizers_no_annotations_on_what_users_write(kube: Kube, namespace: str, run):
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            await stage.there.create(document())
            await stage.there.until_ready("chat")
            found = await stage.there.cluster("chat")
            assert found["metadata"].keys().isdisjoint({"finalizers", "annotations"})
            managers = {
                (one["manager"], one.get("subresource"))
                for one in found["metadata"]["managedFields"]
            }
            assert ("pdcluster-operator-status", "status") in managers
            assert ("pdcluster-operator", None) not in {m for m in managers if m[1]}

    run(scenario(), DEADLINE_S)


def test_children_deleted_and_edited_by_hand(kube: Kube, namespace: str, run):
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            before = {
                (one["kind"], one["metadata"]["name"]): one["metadata"]["uid"]
                for one in await there.objects()
                if one["kind"] not in ("Pod", "PDCluster")
            }
            for kind, name in before:
                await there.delete(kind, name)

            async def again() -> bool:
                now = {
                    (one["kind"], one["metadata"]["name"]): one["metadata"]["uid"]
                    for one in await there.objects()
                    if one["kind"] not in ("Pod", "PDCluster")
                }
                return now.keys() == before.keys() and not set(now.values()) & set(before.values())

            await there.until("all children are there again", again)
            await there.until_ready("chat")

            foreign = {"metadata": {"annotations": {"example.com/note": "theirs"}}}
            ours = {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": 81}]}}
            await there.api.patch(SERVICE, namespace, "chat-router", {**foreign, **ours})

            async def repaired() -> bool:
                found = await there.get("Service", "chat-router")
                return [one["port"] for one in found["spec"]["ports"]] == [8000]

            await there.until("our fields are back", repaired)
            found = await there.get("Service", "chat-router")
            assert found["metadata"]["annotations"]["example.com/note"] == "theirs"
            await there.until_ready("chat")
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


@pytest.mark.parametrize("label", [None, "Helm"])
def test_the_label_by_which_children_are_watched_comes_back(
    kube: Kube, namespace: str, run, label: str | None
):
    """Without it no watch tells of the child any more."""

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            change = {"metadata": {"labels": {"app.kubernetes.io/managed-by": label}}}
            names = [
                (one["kind"], one["metadata"]["name"])
                for one in await there.objects()
                if one["kind"] not in ("Pod", "PDCluster")
            ]
            for kind, name in names:
                await there.api.patch(BY_KIND[kind], namespace, name, change)

            async def healed() -> bool:
                found = [await there.get(kind, name) for kind, name in names]
                return all(map(is_watched, found))

            await there.until("all children are watched again", healed)
            await there.edit("chat", {"decode": {"engine": {"maxRunning": 8}}})
            await there.until_ready("chat")
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_a_foreign_object_is_reported_and_never_taken(
    kube: Kube, namespace: str, run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reconcile, "RETRY_S", 0.5)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat-router", "namespace": namespace},
        "spec": {"ports": [{"port": 1234}]},
    }

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            made = await there.api.create(SERVICE, service)
            await there.create(document())
            found = await there.until_condition("chat", "Ready", "NameTaken")
            assert "Service chat-router exists and isn't ours" in found["message"]
            now = await there.get("Service", "chat-router")
            assert now["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
            assert len(of_kind(await there.objects(), "StatefulSet")) == 2  # the rest goes on
            await there.delete("Service", "chat-router")
            await there.until_ready("chat")

    run(scenario(), DEADLINE_S)


def test_made_again_under_the_same_name(
    kube: Kube, namespace: str, run, monkeypatch: pytest.MonkeyPatch
):
    """What the predecessor had isn't taken over: it goes first."""
    monkeypatch.setattr(reconcile, "RETRY_S", 0.5)

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace, stub={"collects": False}) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            old = {one["metadata"]["uid"] for one in await there.objects()}
            await there.delete("PDCluster", "chat")
            await there.create(document())
            found = await there.until_condition("chat", "Progressing", "NameTaken")
            assert "of an earlier PDCluster of this name is still being deleted" in found["message"]
            status = (await there.cluster("chat"))["status"]
            assert status["prefill"]["ready"] == status["decode"]["ready"] == 0
            left = {one["metadata"]["uid"] for one in await there.objects()}
            assert len(left & old) == len(old) - 1  # all but the PDCluster itself
            stage.stub.collect()
            await there.until_ready("chat")
            assert not {one["metadata"]["uid"] for one in await there.objects()} & old
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_fifty_edits_end_in_the_last(kube: Kube, namespace: str, run):
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            for number in range(50):
                edit: dict[str, Any] = {"engine": {"maxRunning": 10 + number}}
                await there.edit("chat", {"decode": {"replicas": 1 + number % 4, **edit}})
                await asyncio.sleep(0.1)
            await there.until_ready("chat")
            sets = of_kind(await there.objects(), "StatefulSet")
            assert len(sets) == 2
            [decode] = [one for one in sets if one["metadata"]["name"].startswith("chat-d-")]
            [container] = decode["spec"]["template"]["spec"]["containers"]
            assert "--max-running=59" in container["args"]
            assert decode["spec"]["replicas"] == 1 + 49 % 4
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_names_and_namespaces(kube: Kube, namespace: str, run):
    """A name of 40 characters, a model's with / and :, two in one namespace, and the same
    name in another, for which a namespaced operator is there: each has its own writer."""
    other = f"{namespace}-other"
    for kind, metadata in (
        ("Namespace", {"name": other}),
        ("ServiceAccount", {"name": "default", "namespace": other}),
    ):
        kube.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata})
    longest = "n" * 40

    async def scenario() -> None:
        async with (
            looking_on(kube.kubeconfig, other) as elsewhere,
            running(kube.kubeconfig, other),
            operating(kube.kubeconfig, other) as (_, namespaced),
            scene(kube.kubeconfig, namespace, cluster_wide=True) as stage,
        ):
            there = stage.there
            await there.create(document(**{"metadata.name": longest}))
            await there.create(document(**{"spec.model.name": "org/model:7b"}))
            await elsewhere.create(document())
            for one, name in ((there, longest), (there, "chat"), (elsewhere, "chat")):
                await one.until_ready(name)
            # Namespaces that earlier tests left behind are its own, too.
            wide = {one.namespace for one in stage.seam.writes}
            assert namespace in wide
            assert other not in wide
            assert {one.namespace for one in namespaced.writes} == {other}
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_a_kind_that_appears_later(
    kube: Kube, namespace: str, run, monkeypatch: pytest.MonkeyPatch
):
    """Monitors are made as soon as their kind is there, without a restart."""
    monkeypatch.setattr("pd_operator.informer.ABSENT_S", 0.3)

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            assert not any("Monitor" in one for one in stage.writes())
            for crd in MONITORING:
                kube.api.create(crd)

            async def monitored() -> bool:
                try:
                    return all(
                        [
                            (await there.api.list(one, namespace)).items
                            for one in (POD_MONITOR, PROMETHEUS_RULE)
                        ]
                    )
                except apierrors.NotFound:
                    return False  # the definitions aren't served yet

            await there.until("monitors are there", monitored)
            await there.until_ready("chat")
            await at_rest(stage)
            for crd in MONITORING:
                name = crd["metadata"]["name"]
                kube.api.delete("apiextensions.k8s.io/v1", "CustomResourceDefinition", name)
            await asyncio.sleep(1)
            await there.edit("chat", {"decode": {"replicas": 2}})
            await there.until_ready("chat")

    try:
        run(scenario(), DEADLINE_S)
    finally:
        for crd in MONITORING:
            name = crd["metadata"]["name"]
            kube.api.delete("apiextensions.k8s.io/v1", "CustomResourceDefinition", name)


def test_events_tell_changes_and_nothing_twice(kube: Kube, namespace: str, run):
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")

            async def told() -> bool:
                listed = await there.api.list(EVENT, namespace)
                return any(one["reason"] == "AllReady" for one in listed.items)

            # Posted beside the work: an operator that ends at once may not have told it.
            await there.until("an event says that it is ready", told)

        async with scene(kube.kubeconfig, namespace) as stage:
            await at_rest(stage)
            events = (await stage.there.api.list(EVENT, namespace)).items
            texts = [(one["reason"], one["note"]) for one in events]
            assert len(texts) == len(set(texts))
            assert {one["regarding"]["name"] for one in events} == {"chat"}

    run(scenario(), DEADLINE_S)


def test_pods_that_never_get_ready_and_a_fix(kube: Kube, namespace: str, run):
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            good = {
                one["metadata"]["name"] for one in of_kind(await there.objects(), "StatefulSet")
            }
            stage.stub.ready = lambda pod: (
                not pod["metadata"]["name"].startswith("chat-d-")
                or any(pod["metadata"]["name"].startswith(name) for name in good)
            )
            await there.edit("chat", {"decode": {"engine": {"maxRunning": 8}}})
            await there.until_condition("chat", "Ready", "RollingOut")
            await at_rest(stage)
            found = await there.cluster("chat")
            assert condition(found, "Available")["status"] == "True"
            names = {
                one["metadata"]["name"] for one in of_kind(await there.objects(), "StatefulSet")
            }
            assert good < names  # the old revision serves on
            await there.edit("chat", {"decode": {"engine": None}})
            await there.until_ready("chat")
            assert is_settled(await there.cluster("chat"))

    run(scenario(), DEADLINE_S)


def test_every_kind_that_is_watched_has_a_path(kube: Kube):
    """The paths that `resources` writes are those of the server's discovery."""
    for resource in BY_KIND.values():
        if not resource.optional:
            path = resource.path("default", "x")
            assert kube.api.path(resource.api_version, resource.kind, "x", "default") == path
