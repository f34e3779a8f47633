"""PURE. What of each object is kept in memory, and to which PDCluster it belongs.

With a thousand PDClusters there are a dozen times as many objects: what nobody reads isn't
kept, and a change of it is no change.
"""

from collections.abc import Mapping
from typing import Any

from pd_operator.api import KIND
from pd_operator.keys import Key
from pd_operator.podparts import Manifest
from pd_operator.podspec import CLUSTER_LABEL

_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_STATUS_KEPT = frozenset({KIND, "Certificate", "PDPool", "Pod"})
_POD_METADATA = (
    "name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences",
    "creationTimestamp", "deletionTimestamp",
)  # fmt: skip
_POD_STATUS = (
    "phase", "conditions", "podIP", "containerStatuses", "initContainerStatuses", "reason",
    "message",
)  # fmt: skip
_CONDITION_TIMES = ("lastProbeTime", "lastTransitionTime", "observedGeneration")


def owner_of(item: Manifest) -> Key | None:
    """The PDCluster that an object belongs to by its label; None: it's none of ours."""
    metadata = item["metadata"]
    namespace = metadata.get("namespace", "")
    if item.get("kind") == KIND:
        return Key(namespace, metadata["name"])
    name = (metadata.get("labels") or {}).get(CLUSTER_LABEL)
    return Key(namespace, name) if name else None


def slim(kind: str, api_version: str, item: Manifest) -> Manifest:
    """What is kept. Objects of a list come without their kind."""
    if kind == "Pod":
        return _slim_pod(kind, api_version, item)
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    annotations = metadata.get("annotations")
    if annotations and _LAST_APPLIED in annotations:
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    made = {"apiVersion": api_version, "kind": kind, **item, "metadata": metadata}
    if kind not in _STATUS_KEPT:
        made.pop("status", None)
    return made


def _slim_pod(kind: str, api_version: str, item: Manifest) -> Manifest:
    status = _only(_POD_STATUS, item.get("status") or {})
    if "conditions" in status:
        status["conditions"] = [
            {key: value for key, value in one.items() if key not in _CONDITION_TIMES}
            for one in status["conditions"]
        ]
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": _only(_POD_METADATA, item["metadata"]),
        "spec": _only(("nodeName",), item.get("spec") or {}),
        "status": status,
    }


def _only(keys: tuple[str, ...], item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item[key] for key in keys if key in item}
