"""PURE. What every pod of ours has: environment, probes, scratch volumes, security."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pd_operator.api import Template

Manifest = dict[str, Any]

HOSTNAME = "kubernetes.io/hostname"
LIVENESS_FAILURES = 6
PATIENT_FAILURES = 20
LIVENESS_GRACE_S = 2
"""A process that doesn't answer can't drain either."""
USER_ID = 65532
HOME = "/home/pdcluster"

SCRATCH_VOLUMES: tuple[Manifest, ...] = (
    {"name": "home", "emptyDir": {}},
    {"name": "tmp", "emptyDir": {}},
)
SCRATCH_MOUNTS: tuple[Manifest, ...] = (
    {"name": "home", "mountPath": HOME},
    {"name": "tmp", "mountPath": "/tmp"},
)


@dataclass(frozen=True, slots=True)
class Peer:
    """Pods of other namespaces, both by labels; without labels, any."""

    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    pod_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator brings to each rendering.

    The defaults are those of one machine. On Kubernetes `host_paths` is False, since
    restricted pods can't mount them, and the peers say whom NetworkPolicies let in:
    `operators` to the routers' admin port, `monitors_from` to all metrics, `clients` (none
    means everybody) to the API. `monitors`: PodMonitor and PrometheusRule are wanted, where
    their kinds are there, and neither is switched off by itself; `runbooks`: the URL of
    docs/runbooks, for alerts. `live_page` False: none, whatever objects say. `certificates`
    False: no right to read Secrets, so no authorities of PDClusters' own, and no token that is
    followed by another. `tokens` False: none at all.
    """

    version: str = "0.1.0"
    engine_image: str = "pdcluster-engine:0.1.0"
    router_image: str = "pdcluster-router:0.1.0"
    engine_command: tuple[str, ...] = ("python", "-m", "pd_engine")
    router_command: tuple[str, ...] = ("python", "-m", "pd_router")
    convert_command: tuple[str, ...] = ("python", "-m", "pd_engine.convert")
    host_paths: bool = True
    transports: tuple[str, ...] = ("auto", "tcp", "shm", "nixl")
    rdma_resource: str = "rdma/ib"
    network_policies: bool = True
    operators: tuple[Peer, ...] = ()
    monitors_from: tuple[Peer, ...] = ()
    clients: tuple[Peer, ...] = ()
    monitors: bool = True
    monitor_labels: Mapping[str, str] = field(default_factory=dict)
    pod_monitor: bool = True
    rules: bool = True
    runbooks: str = ""
    live_page: bool = True
    certificates: bool = True
    tokens: bool = True


def env(own: Mapping[str, str], template: Template) -> list[Manifest]:
    """The environment of a container. What it refers to by $(NAME) comes first."""
    fields = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name"}
    by_field = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    values = {
        # The root file system is read-only: whatever libraries cache goes to scratch volumes.
        "HOME": HOME,
        "USER": "pdcluster",
        "TMPDIR": "/tmp",
        "PYTHONUNBUFFERED": "1",
        **own,
        **{item.name: item.value for item in template.env if item.name not in fields},
    }
    return by_field + [_variable(name, value) for name, value in values.items()]


def _variable(name: str, value: str) -> Manifest:
    """The API server drops an empty value."""
    return {"name": name, "value": value} if value else {"name": name}


def secret_env(name: str, secret: str, key: str) -> Manifest:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def probe(path: str, port: str, *, period_s: int, failures: int, timeout_s: int = 2) -> Manifest:
    """An httpGet probe; `port` is the name of a container port."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def liveness(path: str, port: str, failures: int = LIVENESS_FAILURES) -> Manifest:
    """Finds a process that stands still within about so many seconds."""
    found = probe(path, port, period_s=1, timeout_s=1, failures=failures)
    return found | {"terminationGracePeriodSeconds": LIVENESS_GRACE_S}


def container_ports(ports: Mapping[str, int]) -> list[Manifest]:
    return [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()]


def service_ports(ports: Mapping[str, int]) -> list[Manifest]:
    return [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
        for name, port in ports.items()
    ]


def resources(requests: Mapping[str, str], limits: Mapping[str, str]) -> Manifest:
    """The `resources` of a container, or nothing."""
    found = {"requests": dict(requests), "limits": dict(limits)}
    given = {name: value for name, value in found.items() if value}
    return {"resources": given} if given else {}


def container(name: str, image: str, template: Template, fields: Mapping[str, Any]) -> Manifest:
    """A container under the `restricted` Pod Security Standard."""
    made: Manifest = {
        "name": name,
        "image": image,
        # The last line of a crash shows up in the pod's status, without rights on its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        **fields,
    }
    if template.image_pull_policy:
        made["imagePullPolicy"] = template.image_pull_policy
    return made


def own_mounts(template: Template) -> list[Manifest]:
    """The user's mounts of the user's volumes."""
    return [
        {
            "name": item.name,
            "mountPath": item.path,
            **({"readOnly": True} if item.read_only else {}),
        }
        for item in template.volume_mounts
    ]


def spread(labels: Mapping[str, str]) -> Manifest:
    """Over nodes where there is a choice: one node's end takes as few of them as can be."""
    return {
        "maxSkew": 1,
        "topologyKey": HOSTNAME,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }


def pod(
    account: str,
    labels: Mapping[str, str],
    template: Template,
    containers: Sequence[Manifest],
    init_containers: Sequence[Manifest],
    volumes: Sequence[Manifest],
    grace_s: int,
) -> Manifest:
    """A pod template with the user's overrides merged in."""
    spec: Manifest = {
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": list(containers),
        "volumes": [*volumes, *({"name": one.name, **one.source} for one in template.volumes)],
    }
    optional = {
        "initContainers": list(init_containers),
        "nodeSelector": dict(template.node_selector),
        "tolerations": [_toleration(item) for item in template.tolerations],
        "priorityClassName": template.priority_class,
        "runtimeClassName": template.runtime_class,
        "imagePullSecrets": [{"name": name} for name in template.image_pull_secrets],
    }
    spec |= {name: value for name, value in optional.items() if value}
    metadata: Manifest = {"labels": dict(template.labels) | dict(labels)}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    return {"metadata": metadata, "spec": spec}


def _toleration(item: Any) -> Manifest:
    fields = {name: getattr(item, name) for name in ("key", "operator", "value", "effect")}
    return {name: value for name, value in fields.items() if value}
