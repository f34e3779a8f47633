"""PURE. What all objects of a PDCluster have in common: names, labels, owner, hashes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from pd_operator.api import API_VERSION, GROUP, KIND, Cluster, Role
from pd_operator.podparts import Manifest as Manifest

APPLIED_ANNOTATION = f"{GROUP}/applied"
CLUSTER_LABEL = f"{GROUP}/cluster"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
WORKER_LABEL = f"{GROUP}/worker-of"
"""On all workers of a cluster and nothing else: what they are placed by, near each other."""
ROUTER = "router"
_ENCODER = msgspec.json.Encoder(order="sorted")
_SET_LETTER = {Role.PREFILL: "p", Role.DECODE: "d", Role.COLOCATED: "c"}


def set_name(cluster: str, role: Role, revision: str) -> str:
    """At most 52 characters: the controller-revision-hash label adds 11 (63 in all)."""
    return f"{cluster}-{_SET_LETTER[role]}-{revision}"


def pool_name(cluster: str, role: Role) -> str:
    """Of what a pool has once, whatever its revision."""
    return f"{cluster}-{role}"


def router_name(cluster: str) -> str:
    return f"{cluster}-router"


def workers_name(cluster: str) -> str:
    """Of what all workers have in common."""
    return f"{cluster}-workers"


def control_name(cluster: str) -> str:
    """The headless Service behind which the routers' control ports are."""
    return f"{cluster}-control"


def selector(cluster: Cluster, component: str = "") -> dict[str, str]:
    """Labels of everything of a cluster, or of one of its components."""
    labels = {
        "app.kubernetes.io/name": "pdcluster",
        "app.kubernetes.io/instance": cluster.name,
        "app.kubernetes.io/managed-by": "pdcluster-operator",
        CLUSTER_LABEL: cluster.name,
    }
    if component:
        labels |= {"app.kubernetes.io/component": component, ROLE_LABEL: component}
    return labels


def component(cluster: Cluster, name: str) -> dict[str, str]:
    """As few labels as select the pods of one component, of all revisions."""
    return {CLUSTER_LABEL: cluster.name, ROLE_LABEL: name}


def owned(
    cluster: Cluster,
    api_version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    fields: Mapping[str, Any],
) -> Manifest:
    """An object that the cluster owns, with a hash that shows when it is to be applied again."""
    return stamped(
        {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": cluster.namespace,
                "labels": dict(labels),
                "ownerReferences": [_owner(cluster)],
            },
            **fields,
        }
    )


def stamped(manifest: Manifest, annotations: Mapping[str, str] | None = None) -> Manifest:
    """The manifest with its hash and further annotations, which the hash doesn't cover."""
    made = {APPLIED_ANNOTATION: applied_hash(manifest), **(annotations or {})}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": made}}


def applied_hash(manifest: Manifest) -> str:
    """Of all but the replicas, which are written apart.

    Comparing fields alone wouldn't show a field that we no longer write.
    """
    spec = {key: value for key, value in manifest.get("spec", {}).items() if key != "replicas"}
    return revision_of({**manifest, "spec": spec})


def revision_of(template: Mapping[str, Any]) -> str:
    """8 hex digits of everything that makes pods differ."""
    return hashlib.sha256(canonical(template)).hexdigest()[:8]


def canonical(content: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces: equal contents are equal texts. A fifth of what a
    look costs was spent on this, with the standard library's encoder."""
    return _ENCODER.encode(content)


def _owner(cluster: Cluster) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
