"""Story: eight streams run all the time while the cluster is changed, shrunk, evicted and its
operator killed. Not one request fails, not one token is wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import ApiError, Manifest, wait_for
from e2e.load import Load, Question
from e2e.site import CLAIMED_MODEL, PDCLUSTER, Site, document

NAME = "busy"
DEADLINE_S = 600.0  # five workers one after the other, on two cores

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def namespace(site: Site, model: Path) -> Iterator[str]:
    """A namespace with the cluster in it, ready."""
    with site.namespace(model) as name:
        text = yaml.safe_dump(document(NAME, CLAIMED_MODEL))
        site.kubectl("apply", "-n", name, "-f", "-", input=text)
        site.wait_ready(name, NAME)
        yield name


@contextmanager
def undisturbed(site: Site, namespace: str, questions: list[Question]) -> Iterator[Load]:
    """The streams run during the block and a while after it; the cluster ends up ready."""
    address = site.address(namespace, NAME)
    with Load(site.layout.namespace_file, address, questions) as load:
        yield load
        wait_for("the cluster to be ready", lambda: settled(site, namespace), DEADLINE_S)
        load.until_more(16)
    load.assert_flawless()


def settled(site: Site, namespace: str) -> bool:
    going = any("deletionTimestamp" in pod["metadata"] for pod in site.pods(namespace))
    return site.is_ready(namespace, NAME) and not going


def edit(site: Site, namespace: str, change: Callable[[Manifest], None]) -> None:
    made = site.pdcluster(namespace, NAME)
    change(made["spec"])
    site.api.replace(made, namespace)


def by_uid(pods: list[Manifest]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def gone(site: Site, namespace: str, role: str, pod: dict[str, Any]) -> bool:
    return pod["uid"] not in by_uid(site.pods(namespace, role))


def test_a_changed_engine_setting_rolls(
    site: Site, namespace: str, questions: list[Question]
) -> None:
    before = by_uid(site.pods(namespace, "decode"))

    def change(spec: dict[str, Any]) -> None:
        spec["decode"]["engine"]["maxRunning"] = 32
        spec["prefill"]["engine"]["chunkTokens"] = 256

    with undisturbed(site, namespace, questions):
        edit(site, namespace, change)
        wait_for(
            "only new decode pods",
            lambda: not before & by_uid(site.pods(namespace, "decode")),
            DEADLINE_S,
        )
    assert len(site.pods(namespace, "decode")) == 3
    assert len(site.pods(namespace, "prefill")) == 2


def test_decode_shrinks_and_grows(site: Site, namespace: str, questions: list[Question]) -> None:
    def replicas(count: int) -> Callable[[dict[str, Any]], None]:
        return lambda spec: spec["decode"].update(replicas=count)

    with undisturbed(site, namespace, questions):
        edit(site, namespace, replicas(2))
        wait_for("two", lambda: len(site.pods(namespace, "decode")) == 2, DEADLINE_S)
    with undisturbed(site, namespace, questions):
        edit(site, namespace, replicas(3))
        wait_for("three", lambda: len(site.pods(namespace, "decode")) == 3, DEADLINE_S)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_pod_is_deleted(site: Site, namespace: str, questions: list[Question], role: str) -> None:
    victim = site.pods(namespace, role)[0]["metadata"]
    with undisturbed(site, namespace, questions):
        site.kubectl("delete", "pod", victim["name"], "-n", namespace, "--wait=false")
        wait_for("the pod's end", partial(gone, site, namespace, role, victim), DEADLINE_S)


def test_pods_are_evicted_as_a_drained_node_does(
    site: Site, namespace: str, questions: list[Question]
) -> None:
    """The Eviction API, one pod of each kind after the other, as PDBs allow."""
    with undisturbed(site, namespace, questions):
        for role in ("decode", "prefill", "router"):
            victim = site.pods(namespace, role)[0]["metadata"]
            wait_for(f"{role}'s eviction", partial(evict, site, namespace, victim), DEADLINE_S)
            wait_for(f"{role}'s end", partial(gone, site, namespace, role, victim), DEADLINE_S)


def evict(site: Site, namespace: str, pod: dict[str, Any]) -> bool:
    """Whether the API server let it go: a PDB may say 429 for a while."""
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod["name"], "namespace": namespace},
    }
    path = site.api.path("v1", "Pod", pod["name"], namespace, "eviction")
    try:
        site.api.call("POST", path, eviction)
    except ApiError as error:
        if error.code != 429:
            raise
        return False
    return True


def test_the_operator_is_killed_in_the_middle_of_a_rollout(
    site: Site, namespace: str, questions: list[Question]
) -> None:
    before = by_uid(site.pods(namespace, "decode"))
    with undisturbed(site, namespace, questions):
        edit(site, namespace, lambda spec: spec["decode"]["engine"].update(maxRunning=48))
        wait_for(
            "the first new decode pod",
            lambda: by_uid(site.pods(namespace, "decode")) - before,
            DEADLINE_S,
        )
        site.kill_operator()
        wait_for(
            "only new decode pods",
            lambda: not before & by_uid(site.pods(namespace, "decode")),
            DEADLINE_S,
        )


def test_the_object_has_survived_it_all(site: Site, namespace: str) -> None:
    assert site.pdcluster(namespace, NAME)["kind"] == PDCLUSTER[1]
    assert site.condition(namespace, NAME, "Degraded").get("status") == "False"
