"""Users of an API server: kubeconfigs of ServiceAccounts with exactly the rights they are given."""

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.api import Api, Manifest, kubeconfig

TOKEN_S = 24 * 3600
_RBAC = "rbac.authorization.k8s.io"


def service_account(
    api: Api,
    folder: Path,
    namespace: str,
    name: str,
    *,
    rules: Sequence[Manifest] = (),
    cluster_rules: Sequence[Manifest] = (),
    token_s: int = TOKEN_S,
) -> Path:
    """Makes a ServiceAccount with these RBAC rules (in its namespace, in the whole cluster);
    the path of a kubeconfig for it."""
    metadata = {"name": name, "namespace": namespace}
    api.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    if rules:
        _grant(api, "Role", metadata, rules, subject)
    if cluster_rules:
        _grant(api, "ClusterRole", {"name": f"{namespace}-{name}"}, cluster_rules, subject)
    return kubeconfig_for(api, folder, namespace, name, token_s=token_s)


def kubeconfig_for(
    api: Api, folder: Path, namespace: str, name: str, *, token_s: int = TOKEN_S
) -> Path:
    """A kubeconfig for a ServiceAccount that is there."""
    path = api.path("v1", "ServiceAccount", name, namespace, "token")
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": token_s},
    }
    token = api.call("POST", path, request)["status"]["token"]
    url, authority = _server(api.kubeconfig)
    file = folder / f"{namespace}-{name}.yaml"
    with tempfile.NamedTemporaryFile(suffix=".crt") as certificate:
        certificate.write(authority)
        certificate.flush()
        file.write_text(kubeconfig(url, Path(certificate.name), token, namespace))
    file.chmod(0o600)
    return file


def _grant(
    api: Api, kind: str, metadata: Manifest, rules: Sequence[Manifest], subject: Manifest
) -> None:
    version = f"{_RBAC}/v1"
    api.apply({"apiVersion": version, "kind": kind, "metadata": metadata, "rules": list(rules)})
    api.apply(
        {
            "apiVersion": version,
            "kind": f"{kind}Binding",
            "metadata": metadata,
            "roleRef": {"apiGroup": _RBAC, "kind": kind, "name": metadata["name"]},
            "subjects": [subject],
        }
    )


def _server(file: Path) -> tuple[str, bytes]:
    """(url, certificate authority) of the current context."""
    document: dict[str, Any] = yaml.safe_load(file.read_text())
    context = next(
        c["context"] for c in document["contexts"] if c["name"] == document["current-context"]
    )
    cluster = next(c["cluster"] for c in document["clusters"] if c["name"] == context["cluster"])
    if data := cluster.get("certificate-authority-data"):
        return cluster["server"], base64.b64decode(data)
    return cluster["server"], Path(cluster["certificate-authority"]).read_bytes()
