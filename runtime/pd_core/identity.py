"""Who a process is to its peers where they speak TLS: a PDCluster's router or its worker.

Certificates name it twice. The URI is the identity. The DNS name says the same, for clients
that can only compare names (gRPC's): it is no address, nobody looks it up.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_CLUSTER = re.compile(rf"({_LABEL})/({_LABEL}(?:\.{_LABEL})*)", re.ASCII)


class Part(StrEnum):
    """What a process is in its PDCluster."""

    ROUTER = "router"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Identity:
    """One part of one PDCluster."""

    namespace: str
    name: str
    role: Part

    @property
    def uri(self) -> str:
        return f"spiffe://pdcluster/{self.namespace}/{self.name}/{self.role}"

    @property
    def dns_name(self) -> str:
        return f"{self.role}.{self.name}.{self.namespace}.pdcluster"

    def peer(self, role: Part) -> "Identity":
        """The other part of the same PDCluster."""
        return Identity(self.namespace, self.name, role)


def parse_cluster(text: str, role: Part) -> Identity:
    """Of `NAMESPACE/NAME`. ValueError says what is wrong."""
    found = _CLUSTER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r}: give NAMESPACE/NAME of the PDCluster")
    return Identity(found[1], found[2], role)


def stranger(uris: Collection[str], wanted: Identity) -> str:
    """Why who presents these URIs isn't `wanted`; empty when it is."""
    if wanted.uri in uris:
        return ""
    shown = ", ".join(sorted(uris)) or "no identity"
    return f"it is {shown}, and only {wanted.uri} may"
