"""PDCluster documents and observed children for the operator's tests."""

import copy
from collections.abc import Mapping
from typing import Any

from pd_operator import api, desired
from pd_operator.api import Cluster, Role
from pd_operator.desired import Desired
from pd_operator.podparts import Manifest, Settings

SETTINGS = Settings()

_DOCUMENT: dict[str, Any] = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"name": "smollm2", "source": {"builtin": "smollm2-135m-instruct"}},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
}


def document(**changes: Any) -> dict[str, Any]:
    """A good document with changes: `document(**{"spec.decode.replicas": 3})`. A value of
    `...` removes the field."""
    made = copy.deepcopy(_DOCUMENT)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node: dict[str, Any] = made
        for name in parents:
            node = node.setdefault(name, {})
        if value is ...:
            del node[last]
        else:
            node[last] = value
    return made


def cluster(**changes: Any) -> Cluster:
    return api.parse(document(**changes))


def rendered(of: Cluster, settings: Settings = SETTINGS) -> Desired:
    return desired.render(of, desired.fixed_replicas(of), settings)


def flags(manifest: Manifest) -> dict[str, str]:
    """The flags of the only container of a workload."""
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    return dict(item.removeprefix("--").split("=", 1) for item in container["args"])


def pod(
    owner: Manifest,
    ordinal: int,
    *,
    ready: bool = True,
    terminating: bool = False,
    waiting: Mapping[str, Any] | None = None,
    terminated: Mapping[str, Any] | None = None,
) -> Manifest:
    """A pod of a StatefulSet or Deployment as the API server shows it."""
    metadata: dict[str, Any] = {
        "name": f"{owner['metadata']['name']}-{ordinal}",
        "labels": owner["spec"]["template"]["metadata"]["labels"],
    }
    if terminating:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status: dict[str, Any] = {"name": "engine", "image": "engine:1", "ready": ready}
    status["restartCount"] = 1 if terminated else 0
    status["state"] = {"waiting": waiting} if waiting else {"running": {}}
    status["lastState"] = {"terminated": terminated} if terminated else {}
    return {
        "kind": "Pod",
        "metadata": metadata,
        "status": {
            "podIP": f"10.0.0.{ordinal + 1}",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [status],
        },
    }


def running(wanted: Desired) -> list[Manifest]:
    """Everything that is desired, all of it there and ready."""
    found: list[Manifest] = [*wanted.surroundings]
    for item in wanted.pools:
        found += [item.service, item.stateful_set]
        found += [pod(item.stateful_set, ordinal) for ordinal in range(item.replicas)]
    deployment = routers(wanted)
    return [*found, *(pod(deployment, n) for n in range(deployment["spec"]["replicas"]))]


def child(wanted: Desired, kind: str, name: str) -> Manifest:
    """The one object of that kind and name, pools' sets aside."""
    [found] = [
        item
        for item in wanted.surroundings
        if (item["kind"], item["metadata"]["name"]) == (kind, name)
    ]
    return found


def routers(wanted: Desired) -> Manifest:
    [found] = [item for item in wanted.surroundings if item["kind"] == "Deployment"]
    return found


def pool_set(wanted: Desired, role: Role) -> Manifest:
    found = wanted.pool(role)
    assert found is not None
    return found.stateful_set
