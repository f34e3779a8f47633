"""PURE. What every pod of ours has: environment, probes, scratch volumes, security."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_operator.api import Template

Manifest = dict[str, Any]

LIVENESS_FAILURES = 6
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
class Settings:
    """What the operator brings to each rendering."""

    engine_image: str = "pdcluster-engine:0.1.0"
    router_image: str = "pdcluster-router:0.1.0"
    engine_command: tuple[str, ...] = ("python", "-m", "pd_engine")
    router_command: tuple[str, ...] = ("python", "-m", "pd_router")
    convert_command: tuple[str, ...] = ("python", "-m", "pd_engine.convert")


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
    return by_field + [{"name": name, "value": value} for name, value in values.items()]


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


def liveness(path: str, port: str) -> Manifest:
    """Finds a process that stands still within about six seconds."""
    found = probe(path, port, period_s=1, timeout_s=1, failures=LIVENESS_FAILURES)
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


def pod(
    labels: Mapping[str, str],
    template: Template,
    containers: Sequence[Manifest],
    init_containers: Sequence[Manifest],
    volumes: Sequence[Manifest],
    grace_s: int,
) -> Manifest:
    """A pod template with the user's overrides merged in."""
    spec: Manifest = {
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
        "volumes": list(volumes),
    }
    optional = {
        "initContainers": list(init_containers),
        "nodeSelector": dict(template.node_selector),
        "tolerations": [_toleration(item) for item in template.tolerations],
        "priorityClassName": template.priority_class,
    }
    spec |= {name: value for name, value in optional.items() if value}
    metadata: Manifest = {"labels": dict(template.labels) | dict(labels)}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    return {"metadata": metadata, "spec": spec}


def _toleration(item: Any) -> Manifest:
    fields = {name: getattr(item, name) for name in ("key", "operator", "value", "effect")}
    return {name: value for name, value in fields.items() if value}
