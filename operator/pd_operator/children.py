"""PURE. The objects of the routers and what a pool has once: accounts, Services, budgets."""

from pd_operator import podspec
from pd_operator.api import API_VERSION, Cluster, Pool, Role
from pd_operator.manifests import (
    REVISION_LABEL,
    ROUTER,
    component,
    control_name,
    owned,
    pool_name,
    router_name,
    selector,
    workers_name,
)
from pd_operator.podparts import Manifest, Settings, service_ports
from pd_operator.podspec import ADMIN_PORT, CONTROL_PORT, HTTP_PORT


def router(cluster: Cluster, settings: Settings) -> list[Manifest]:
    """The routers, the Service for clients, and one where workers announce themselves."""
    labels = selector(cluster, ROUTER)
    name = router_name(cluster.name)
    client = owned(
        cluster, "v1", "Service", name, labels,
        {
            "spec": {
                # Said, so that it is ours: another one would be set back, not stay unnoticed.
                "type": "ClusterIP",
                "selector": labels,
                "ports": service_ports({"http": HTTP_PORT}),
            }
        },
    )  # fmt: skip
    control = owned(
        cluster, "v1", "Service", control_name(cluster.name), labels,
        {
            "spec": {
                "type": "ClusterIP",
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": labels,
                "ports": service_ports({"control": CONTROL_PORT, "admin": ADMIN_PORT}),
            }
        },
    )  # fmt: skip
    deployment = owned(
        cluster, "apps/v1", "Deployment", name, labels,
        {
            "spec": {
                "replicas": cluster.router.replicas,
                "revisionHistoryLimit": 1,
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
                },
                "selector": {"matchLabels": labels},
                "template": podspec.router_template(cluster, settings),
            }
        },
    )  # fmt: skip
    return [client, control, deployment]


def accounts(cluster: Cluster) -> list[Manifest]:
    """Pods never speak to the API server; accounts of their own have no rights by chance."""
    names = {router_name(cluster.name): ROUTER, workers_name(cluster.name): ""}
    return [
        owned(
            cluster, "v1", "ServiceAccount", name, selector(cluster, role),
            {"automountServiceAccountToken": False},
        )
        for name, role in names.items()
    ]  # fmt: skip


def pool_service(cluster: Cluster, role: Role, name: str, revision: str) -> Manifest:
    """What gives the pods of one revision of a pool their names in DNS."""
    labels = selector(cluster, role.value) | {REVISION_LABEL: revision}
    return owned(
        cluster, "v1", "Service", name, labels,
        {
            "spec": {
                "type": "ClusterIP",
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": labels,
                "ports": service_ports(podspec.WORKER_PORTS),
            }
        },
    )  # fmt: skip


def pool_handle(cluster: Cluster, pool: Pool) -> Manifest:
    """The PDPool. Its replicas aren't said here: they are everybody's who may scale it."""
    name = pool_name(cluster.name, pool.role)
    return owned(cluster, API_VERSION, "PDPool", name, selector(cluster, pool.role), {})


def disruption_budgets(cluster: Cluster) -> list[Manifest]:
    """One a component, for all its revisions: two on one pod make every eviction fail.

    One pod may go at a time, also the only one there is, or no node could ever be drained;
    one that isn't ready may always go.
    """
    names = [ROUTER, *(pool.role.value for pool in cluster.pools)]
    return [
        owned(
            cluster, "policy/v1", "PodDisruptionBudget", f"{cluster.name}-{name}",
            selector(cluster, name),
            {
                "spec": {
                    "maxUnavailable": 1,
                    "unhealthyPodEvictionPolicy": "AlwaysAllow",
                    "selector": {"matchLabels": component(cluster, name)},
                }
            },
        )
        for name in names
    ]  # fmt: skip
