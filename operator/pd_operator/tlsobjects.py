"""PURE. What TLS adds to a PDCluster's objects: Secrets, volumes, flags.

Pods and objects of a mode carry its name as a label: as long as a pod has it, the Secrets that
it mounts stay.
"""

import base64
from collections.abc import Iterable, Mapping

from pd_core.identity import Part
from pd_operator.api import GROUP, Cluster, TlsMode
from pd_operator.manifests import owned, selector
from pd_operator.podparts import Manifest

TLS_LABEL = f"{GROUP}/tls"
SINCE_ANNOTATION = f"{GROUP}/trusted-since"
TLS_PATH = "/etc/pdcluster/tls"
TLS_VOLUME = "peer-tls"
BUNDLE, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_PLURAL = {Part.ROUTER: "router", Part.WORKER: "workers"}
_ONLY_ITS_USER = 0o440
"""Files are root's and the group's, which is the pod's own (fsGroup)."""
_MIDDLE = {TlsMode.AUTO: "tls", TlsMode.CERT_MANAGER: "cert"}


def authority_name(cluster: Cluster) -> str:
    """Of the Secret with the authorities' keys. No pod mounts it."""
    return f"{cluster.name}-{_MIDDLE[cluster.tls]}-ca"


def secret_name(cluster: Cluster, part: Part) -> str:
    """Of the Secret with a part's certificate."""
    return f"{cluster.name}-{_MIDDLE[cluster.tls]}-{_PLURAL[part]}"


def flags(cluster: Cluster) -> list[str]:
    """Of routers and workers."""
    if cluster.tls is TlsMode.DISABLED:
        return []
    return [f"--tls-dir={TLS_PATH}", f"--tls-cluster={cluster.namespace}/{cluster.name}"]


def labels(cluster: Cluster) -> dict[str, str]:
    """Of pods and of what they need for it."""
    return {} if cluster.tls is TlsMode.DISABLED else {TLS_LABEL: cluster.tls.value}


def volume(cluster: Cluster, part: Part) -> tuple[list[Manifest], list[Manifest]]:
    """The volume and its mount. Without the Secret no pod starts: it has to have its
    certificate before anything else."""
    if cluster.tls is TlsMode.DISABLED:
        return [], []
    source = {"secretName": secret_name(cluster, part), "defaultMode": _ONLY_ITS_USER}
    mount = {"name": TLS_VOLUME, "mountPath": TLS_PATH, "readOnly": True}
    return [{"name": TLS_VOLUME, "secret": source}], [mount]


def authority_secret(cluster: Cluster, files: Mapping[str, bytes]) -> Manifest:
    return owned(
        cluster, "v1", "Secret", authority_name(cluster), selector(cluster) | labels(cluster),
        {"type": "Opaque", "data": encoded(files)},
    )  # fmt: skip


def leaf_secret(cluster: Cluster, part: Part, files: Mapping[str, bytes], since: str) -> Manifest:
    """`since`: from when on the bundle in it is what it is."""
    made = owned(
        cluster, "v1", "Secret", secret_name(cluster, part), selector(cluster) | labels(cluster),
        {"type": "kubernetes.io/tls", "data": encoded(files)},
    )  # fmt: skip
    metadata = made["metadata"]
    annotations = {**metadata["annotations"], SINCE_ANNOTATION: since}
    return {**made, "metadata": {**metadata, "annotations": annotations}}


def encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    """As a Secret's `data`."""
    return {name: base64.b64encode(text).decode() for name, text in sorted(files.items())}


def decoded(secret: Manifest) -> dict[str, bytes]:
    """The files of a Secret; what is no base64 isn't there."""
    found = {}
    for name, text in (secret.get("data") or {}).items():
        try:
            found[name] = base64.b64decode(text, validate=True)
        except (TypeError, ValueError):
            continue
    return found


def in_use(objects: Iterable[Manifest]) -> set[str]:
    """The modes of pods that exist, or are to exist."""
    found = set()
    for item in objects:
        owner = item if item["kind"] == "Pod" else (item.get("spec") or {}).get("template") or {}
        marks = (owner.get("metadata") or {}).get("labels") or {}
        found.add(marks.get(TLS_LABEL, ""))
    return found - {""}
