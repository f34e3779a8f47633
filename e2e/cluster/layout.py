"""PURE. Where a whole cluster's files lie, and which addresses it has in its own network."""

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.controlplane import ControlPlane

FOLDERS = Path("/var/lib/pdcluster-cluster")
SOCKETS = Path("/run/pdcluster-cluster")  # short: a socket's path has at most 107 characters
DEFAULT_NAME = "default"
NODE = "node"

# All in a network namespace of its own, so these collide with nothing.
NODE_ADDRESS = "10.250.0.1"
API_PORT = 6443
POD_RANGE = "10.244.0.0/24"
SERVICE_RANGE = "10.96.0.0/16"
DNS_ADDRESS = "10.96.0.10"


@dataclass(frozen=True, slots=True)
class Layout:
    """One cluster on this machine."""

    name: str = DEFAULT_NAME

    @property
    def folder(self) -> Path:
        return FOLDERS / self.name

    @property
    def run(self) -> Path:
        return SOCKETS / self.name

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def namespace(self) -> str:
        """The network namespace."""
        return f"pdcluster-{self.name}"

    @property
    def namespace_file(self) -> Path:
        return Path("/run/netns") / self.namespace

    @property
    def cgroup(self) -> str:
        """The parent of all pods' cgroups: who is in it is a process of this cluster."""
        return f"pdcluster-{self.name}"

    @property
    def cni_network(self) -> str:
        return f"pdcluster-{self.name}"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def admin(self) -> Path:
        """The kubeconfig for people and tests: it goes through the proxy on loopback."""
        return self.folder / "kubeconfig.yaml"

    @property
    def pod_logs(self) -> Path:
        return self.folder / "pod-logs"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    @property
    def plane(self) -> ControlPlane:
        return ControlPlane(
            folder=self.folder,
            address=NODE_ADDRESS,
            api_port=API_PORT,
            etcd_port=2379,
            etcd_peer_port=2380,
            manager_port=10257,
            node=NODE,
            service_range=SERVICE_RANGE,
            pod_range=POD_RANGE,
        )
