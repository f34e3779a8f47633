"""What the API must hold before a cluster is of use: DNS, and a node with (fake) GPUs."""

from collections.abc import Callable

from e2e.cluster import node
from e2e.cluster.api import Api, Manifest, wait_for
from e2e.cluster.layout import DNS_ADDRESS, NODE, POD_RANGE

READY_DEADLINE_S = 120.0

_COREFILE = """\
.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        ttl 1
    }
    cache 1
    reload
}
"""


def install(api: Api, start_kube_router: Callable[[], None]) -> None:
    """Applies everything, and waits until the node takes pods and names resolve."""
    wait_for("kube-system is there", lambda: api.find("v1", "Namespace", "kube-system"))
    for manifest in _dns():
        api.apply(manifest)
    wait_for("the node has registered", lambda: api.find("v1", "Node", NODE), READY_DEADLINE_S)
    annotate = {"metadata": {"annotations": {"kube-router.io/pod-cidr": POD_RANGE}}}
    api.patch("v1", "Node", NODE, annotate)
    start_kube_router()  # it ends at once without that annotation
    wait_for("the node is ready", lambda: _node_ready(api), READY_DEADLINE_S)
    add_gpus(api)
    wait_for("CoreDNS is ready", lambda: _dns_ready(api), READY_DEADLINE_S)


def add_gpus(api: Api, name: str = NODE, count: int = node.GPUS) -> None:
    """The node says it has GPUs. No device plugin contradicts, so it stays, and the
    scheduler counts with it."""
    gpus = {node.GPU: str(count)}
    status = {"status": {"capacity": gpus, "allocatable": gpus}}
    api.patch("v1", "Node", name, status, sub="status")


def _node_ready(api: Api) -> bool:
    conditions = api.get("v1", "Node", NODE)["status"].get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _dns_ready(api: Api) -> bool:
    deployment = api.get("apps/v1", "Deployment", "coredns", "kube-system")
    return bool(deployment.get("status", {}).get("readyReplicas", 0) >= 1)


def _dns() -> list[Manifest]:
    """CoreDNS as a pod, labelled as everywhere: policies name it by that label."""
    labels = {"k8s-app": "kube-dns"}
    named: Manifest = {"name": "coredns", "namespace": "kube-system"}
    cluster_role = {"name": "system:coredns"}
    rbac = "rbac.authorization.k8s.io"
    probe = {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1}
    container = {
        "name": "coredns",
        "image": node.COREDNS_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "ports": [{"containerPort": 53, "protocol": p} for p in ("UDP", "TCP")],
        "readinessProbe": probe,
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        # Policies see the pod's port, not the Service's, and all of them allow 53.
        "securityContext": {
            "runAsUser": 65532,
            "sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}],
        },
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRole",
            "metadata": cluster_role,
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["services", "pods", "namespaces"],
                    "verbs": ["list", "watch"],
                },
                {
                    "apiGroups": ["discovery.k8s.io"],
                    "resources": ["endpointslices"],
                    "verbs": ["list", "watch"],
                },
            ],
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": cluster_role,
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", **cluster_role},
            "subjects": [{"kind": "ServiceAccount", **named}],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": named,
            "data": {"Corefile": _COREFILE},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**named, "labels": labels},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
            "spec": {
                "clusterIP": DNS_ADDRESS,
                "selector": labels,
                "ports": [
                    {"name": f"dns-{p.lower()}", "port": 53, "targetPort": 53, "protocol": p}
                    for p in ("UDP", "TCP")
                ],
            },
        },
    ]
