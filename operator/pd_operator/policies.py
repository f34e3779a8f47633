"""PURE. NetworkPolicies: who may speak to whom, and nothing else.

| from | to | port |
|---|---|---|
| clients | router | http |
| workers | router | control |
| router | workers | work |
| workers | workers | kv |
| the operator, Prometheus | router | admin |
| Prometheus | workers | health |
| all of them | anywhere | DNS |
| workers, for a model of the hub | anywhere | 443 |
| router, where it is traced | anywhere | the collector's |

Probes come from the node that a pod runs on, which no policy keeps out.
"""

from collections.abc import Sequence
from typing import Any

from pd_operator.api import Cluster, HuggingFace
from pd_operator.manifests import (
    ROUTER,
    WORKER_LABEL,
    component,
    owned,
    router_name,
    selector,
    workers_name,
)
from pd_operator.podparts import Manifest, Peer, Settings
from pd_operator.podspec import (
    ADMIN_PORT,
    CONTROL_PORT,
    HEALTH_PORT,
    HTTP_PORT,
    KV_PORT,
    WORK_PORT,
)

_DNS = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
_HTTPS_PORT = 443


def network_policies(cluster: Cluster, settings: Settings) -> list[Manifest]:
    if not settings.network_policies:
        return []
    routers = _pods(component(cluster, ROUTER))
    workers = _pods({WORKER_LABEL: cluster.name})
    return [
        owned(
            cluster, "networking.k8s.io/v1", "NetworkPolicy", router_name(cluster.name),
            selector(cluster, ROUTER),
            {
                "spec": {
                    **routers,
                    "policyTypes": ["Ingress", "Egress"],
                    "ingress": _router_ingress(cluster, workers, settings),
                    "egress": _router_egress(cluster, workers),
                }
            },
        ),
        owned(
            cluster, "networking.k8s.io/v1", "NetworkPolicy", workers_name(cluster.name),
            selector(cluster),
            {
                "spec": {
                    **workers,
                    "policyTypes": ["Ingress", "Egress"],
                    "ingress": _worker_ingress(routers, workers, settings),
                    "egress": _worker_egress(cluster, routers, workers),
                }
            },
        ),
    ]  # fmt: skip


def _router_ingress(cluster: Cluster, workers: Manifest, settings: Settings) -> list[Manifest]:
    watchers = [*settings.operators, *settings.monitors_from]
    rules = [
        _from(_peers(settings.clients), HTTP_PORT),
        {"from": [workers], "ports": [_control(cluster)]},
    ]
    if watchers:
        rules.append(_from(_peers(watchers), ADMIN_PORT))
    return rules


def _router_egress(cluster: Cluster, workers: Manifest) -> list[Manifest]:
    rules = [_to([workers], WORK_PORT), {"ports": _DNS}]
    if cluster.router.collector_port:
        rules.append({"ports": [_tcp(cluster.router.collector_port)]})
    return rules


def _worker_ingress(routers: Manifest, workers: Manifest, settings: Settings) -> list[Manifest]:
    rules = [_from([routers], WORK_PORT), _from([workers], KV_PORT)]
    if settings.monitors_from:
        rules.append(_from(_peers(settings.monitors_from), HEALTH_PORT))
    return rules


def _worker_egress(cluster: Cluster, routers: Manifest, workers: Manifest) -> list[Manifest]:
    rules = [
        {"to": [routers], "ports": [_control(cluster)]},
        _to([workers], KV_PORT),
        {"ports": _DNS},
    ]
    if any(isinstance(source, HuggingFace) for _, source in cluster.sources):
        rules.append({"ports": [_tcp(_HTTPS_PORT)]})
    return rules


def _control(cluster: Cluster) -> Manifest:
    """One port for each process of a router."""
    processes = cluster.router.processes
    end = {"endPort": CONTROL_PORT + processes - 1} if processes > 1 else {}
    return {**_tcp(CONTROL_PORT), **end}


def _pods(labels: dict[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": labels}}


def _peers(peers: Sequence[Peer]) -> list[Manifest]:
    """Pods of namespaces, both by their labels; none means all of them."""
    return [
        {
            "namespaceSelector": _matching(peer.namespace_labels),
            "podSelector": _matching(peer.pod_labels),
        }
        for peer in peers
    ]


def _matching(labels: Any) -> Manifest:
    return {"matchLabels": dict(labels)} if labels else {}


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}


def _from(peers: list[Manifest], port: int) -> Manifest:
    """No peers: from anywhere. The API server drops an empty list, so none is written."""
    return {**({"from": peers} if peers else {}), "ports": [_tcp(port)]}


def _to(peers: list[Manifest], port: int) -> Manifest:
    return {"to": peers, "ports": [_tcp(port)]}
