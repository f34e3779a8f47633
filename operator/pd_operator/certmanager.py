"""PURE. What cert-manager is asked for (`security.tls.mode: CertManager`), and what it says.

An authority of the PDCluster's own: a self-signed certificate, and an Issuer that signs with it.
Its key stays when it is renewed, so that what it signed before goes on being trusted.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pd_core.identity import Identity, Part
from pd_operator import tlsobjects
from pd_operator.api import Cluster, TlsMode
from pd_operator.conflicts import NotIssued
from pd_operator.manifests import owned, selector
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest

GROUP = "cert-manager.io"
KINDS = frozenset({"Certificate", "Issuer"})
_VERSION = f"{GROUP}/v1"
_AUTHORITY = {"duration": "87600h", "renewBefore": "43800h"}
_LEAF = {"duration": "720h", "renewBefore": "240h"}
_KEY = {"algorithm": "ECDSA", "size": 256}


def objects(cluster: Cluster) -> list[Manifest]:
    """None where the mode is another one."""
    if cluster.tls is not TlsMode.CERT_MANAGER:
        return []
    authority, root = tlsobjects.authority_name(cluster), f"{cluster.name}-cert-root"
    return [
        _made(cluster, "Issuer", root, {"selfSigned": {}}),
        _made(
            cluster, "Certificate", authority,
            {
                **_AUTHORITY,
                "isCA": True,
                "commonName": "PDCluster authority",
                "secretName": authority,
                "privateKey": {**_KEY, "rotationPolicy": "Never"},
                "usages": ["digital signature", "cert sign"],
                "issuerRef": _issuer(root),
            },
        ),
        _made(cluster, "Issuer", authority, {"ca": {"secretName": authority}}),
        *(_leaf(cluster, part, authority) for part in Part),
    ]  # fmt: skip


def _leaf(cluster: Cluster, part: Part, authority: str) -> Manifest:
    identity = Identity(cluster.namespace, cluster.name, part)
    name = tlsobjects.secret_name(cluster, part)
    return _made(
        cluster, "Certificate", name,
        {
            **_LEAF,
            "uris": [identity.uri],
            "dnsNames": [identity.dns_name],
            "secretName": name,
            "privateKey": {**_KEY, "rotationPolicy": "Always"},
            "usages": ["digital signature", "server auth", "client auth"],
            "issuerRef": _issuer(authority),
        },
    )  # fmt: skip


def _made(cluster: Cluster, kind: str, name: str, spec: Mapping[str, Any]) -> Manifest:
    labels = selector(cluster) | tlsobjects.labels(cluster)
    return owned(cluster, _VERSION, kind, name, labels, {"spec": dict(spec)})


def _issuer(name: str) -> dict[str, str]:
    return {"group": GROUP, "kind": "Issuer", "name": name}


def not_issued(cluster: Cluster, seen: Mapping[Ref, Manifest]) -> Iterator[NotIssued]:
    """The certificates that cert-manager says aren't there, with its own words."""
    for wanted in objects(cluster):
        ref = Ref(wanted["kind"], wanted["metadata"]["name"])
        status = seen.get(ref, {}).get("status") or {}
        for one in status.get("conditions") or ():
            if (one.get("type"), one.get("status")) == ("Ready", "False"):
                yield NotIssued(ref, str(one.get("message", "")))
