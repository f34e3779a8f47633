"""PURE. What a PDCluster becomes: (cluster, replicas, settings) -> Kubernetes manifests.

For each pool a StatefulSet with its headless Service, named by the hash of what makes
its pods differ; for the router a Deployment, the Service for clients, and a headless
Service where workers announce themselves.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pd_operator import podspec
from pd_operator.api import API_VERSION, GROUP, KIND, Cluster, Pool, Role
from pd_operator.podparts import Manifest, Settings, service_ports
from pd_operator.podspec import ADMIN_PORT, CONTROL_PORT, HTTP_PORT, REVISION_LABEL

APPLIED_ANNOTATION = f"{GROUP}/applied"
_SET_LETTER = {Role.PREFILL: "p", Role.DECODE: "d", Role.COLOCATED: "c"}


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """One pool at the revision that the object asks for."""

    role: Role
    revision: str
    replicas: int
    gpus_each: int
    service: Manifest
    stateful_set: Manifest

    @property
    def name(self) -> str:
        return str(self.stateful_set["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Desired:
    """Everything that should exist, pools apart: they change by rollout."""

    pools: tuple[DesiredPool, ...]
    surroundings: tuple[Manifest, ...]
    max_surge: int = 1
    max_unavailable: int = 0
    gpus: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def pool(self, role: Role) -> DesiredPool | None:
        return next((pool for pool in self.pools if pool.role is role), None)


def fixed_replicas(cluster: Cluster) -> dict[Role, int]:
    """The replicas of pools that aren't scaled."""
    return {pool.role: pool.replicas for pool in cluster.pools}


def render(cluster: Cluster, replicas: Mapping[Role, int], settings: Settings) -> Desired:
    """The manifests of a cluster. The same input always gives the same output."""
    return Desired(
        pools=tuple(_pool(cluster, pool, replicas[pool.role], settings) for pool in cluster.pools),
        surroundings=tuple(_router(cluster, settings)),
        max_surge=cluster.rollout.max_surge,
        max_unavailable=cluster.rollout.max_unavailable,
        gpus=cluster.gpus,
        labels=podspec.selector(cluster),
    )


def revision_of(template: Manifest) -> str:
    """8 hex digits of everything that makes pods differ."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def set_name(cluster: str, role: Role, revision: str) -> str:
    """At most 52 characters: the controller-revision-hash label adds 11 (63 in all)."""
    return f"{cluster}-{_SET_LETTER[role]}-{revision}"


def router_name(cluster: str) -> str:
    return f"{cluster}-router"


def _pool(cluster: Cluster, pool: Pool, replicas: int, settings: Settings) -> DesiredPool:
    template = podspec.worker_template(cluster, pool, settings)
    revision = revision_of(template)
    name = set_name(cluster.name, pool.role, revision)
    selector = podspec.selector(cluster, pool.role.value) | {REVISION_LABEL: revision}
    template["metadata"]["labels"] |= selector
    stateful_set = _object(
        cluster, "apps/v1", "StatefulSet", name, selector,
        {
            "replicas": replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": selector},
            "template": template,
        },
    )  # fmt: skip
    service = _object(
        cluster, "v1", "Service", name, selector,
        {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": service_ports(podspec.WORKER_PORTS),
        },
    )  # fmt: skip
    return DesiredPool(pool.role, revision, replicas, pool.gpus_each, service, stateful_set)


def _router(cluster: Cluster, settings: Settings) -> list[Manifest]:
    selector = podspec.selector(cluster, podspec.ROUTER)
    name = router_name(cluster.name)
    client = _object(
        cluster, "v1", "Service", name, selector,
        {"selector": selector, "ports": service_ports({"http": HTTP_PORT})},
    )  # fmt: skip
    control = _object(
        cluster, "v1", "Service", podspec.control_name(cluster.name), selector,
        {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": service_ports({"control": CONTROL_PORT, "admin": ADMIN_PORT}),
        },
    )  # fmt: skip
    deployment = _object(
        cluster, "apps/v1", "Deployment", name, selector,
        {
            "replicas": cluster.router.replicas,
            "revisionHistoryLimit": 1,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "selector": {"matchLabels": selector},
            "template": podspec.router_template(cluster, settings),
        },
    )  # fmt: skip
    return [client, control, deployment]


def _object(
    cluster: Cluster, api_version: str, kind: str, name: str, labels: Mapping[str, str], spec: Any
) -> Manifest:
    """An object that the cluster owns, with a hash that shows when it is to be applied again."""
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "labels": dict(labels),
            "ownerReferences": [_owner(cluster)],
        },
        "spec": spec,
    }
    manifest["metadata"]["annotations"] = {APPLIED_ANNOTATION: applied_hash(manifest)}
    return manifest


def applied_hash(manifest: Manifest) -> str:
    """Of all but the replicas, which are written apart.

    Comparing fields alone wouldn't show a field that we no longer write.
    """
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    return revision_of({**manifest, "spec": spec})


def _owner(cluster: Cluster) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
