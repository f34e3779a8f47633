"""What the control plane's programs are started with. The same for the API server alone
(`tests/envtest`) and for the whole cluster (`python -m e2e.cluster up`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from e2e.cluster import api, build, certificates
from e2e.cluster.process import Command

ETCD = "/usr/bin/etcd"
ADMIN = "admin"
NODE_USER_PREFIX = "system:node:"
MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
PROXY = "system:kube-proxy"
MASTERS = "system:masters"

# Every request and who made it, without bodies: tests count writes with it.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where it lives and listens. All files are below `folder`."""

    folder: Path
    address: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    manager_port: int
    scheduler_port: int = 10259
    node: str = "node"
    service_range: str = "10.96.0.0/16"
    pod_range: str = "10.244.0.0/24"
    names: Sequence[str] = ()  # further names and addresses for the certificate
    addresses: Sequence[str] = field(default=())
    audit: bool = True
    garbage_percent: int = 100
    """GOGC of the API server: by how much its memory may grow before garbage is collected."""

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def certificates(self) -> Path:
        return self.folder / "pki"

    @property
    def authority(self) -> Path:
        return self.certificates / "ca.crt"

    @property
    def audit_log(self) -> Path:
        return self.folder / "logs" / "audit.jsonl"

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def kubeconfig(self, user: str) -> Path:
        return self.folder / "kubeconfigs" / f"{user.replace(':', '-')}.yaml"

    @property
    def admin(self) -> Path:
        return self.kubeconfig(ADMIN)


def prepare(plane: ControlPlane) -> None:
    """Certificates, tokens, kubeconfigs and the audit policy."""
    for name in ("logs", "kubeconfigs", "etcd"):
        (plane.folder / name).mkdir(parents=True, exist_ok=True)
    (plane.folder / "etcd").chmod(0o700)
    service_address = plane.service_range.rsplit(".", 1)[0] + ".1"
    certificates.make_all(
        plane.certificates,
        ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", *plane.names],
        dict.fromkeys(["127.0.0.1", service_address, plane.address, *plane.addresses]),
    )
    users = {
        ADMIN: MASTERS,
        MANAGER: "",
        SCHEDULER: "",
        PROXY: "system:node-proxier",
        NODE_USER_PREFIX + plane.node: "system:nodes",
        "kube-router": MASTERS,
    }
    lines = []
    for number, (user, group) in enumerate(users.items()):
        token = certificates.token()
        lines.append(f"{token},{user},u{number}" + (f',"{group}"' if group else ""))
        file = plane.kubeconfig(user)
        file.write_text(api.kubeconfig(plane.url, plane.authority, token))
        file.chmod(0o600)
    tokens = plane.folder / "tokens.csv"
    tokens.write_text("\n".join(lines) + "\n")
    tokens.chmod(0o600)
    (plane.folder / "audit.yaml").write_text(yaml.safe_dump(_AUDIT_POLICY))


def etcd(plane: ControlPlane) -> Command:
    client = f"http://{plane.address}:{plane.etcd_port}"
    peer = f"http://{plane.address}:{plane.etcd_peer_port}"
    return Command(
        "etcd",
        (
            ETCD,
            f"--data-dir={plane.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--quota-backend-bytes=1073741824",
            "--log-level=warn",
        ),
        plane.log("etcd"),
    )


def apiserver(plane: ControlPlane) -> Command:
    pki = plane.certificates
    flags = {
        "advertise-address": plane.address,
        "bind-address": plane.address,
        "secure-port": plane.api_port,
        "etcd-servers": f"http://{plane.address}:{plane.etcd_port}",
        "service-cluster-ip-range": plane.service_range,
        "authorization-mode": "Node,RBAC",
        "token-auth-file": plane.folder / "tokens.csv",
        "client-ca-file": plane.authority,
        "tls-cert-file": pki / "apiserver.crt",
        "tls-private-key-file": pki / "apiserver.key",
        "cert-dir": pki,
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": pki / "sa.key",
        "service-account-signing-key-file": pki / "sa.key",
        # Whoever is listed there can be reached by an extension API server (metrics, KEDA).
        "requestheader-client-ca-file": plane.authority,
        "requestheader-allowed-names": "front-proxy",
        "requestheader-extra-headers-prefix": "X-Remote-Extra-",
        "requestheader-group-headers": "X-Remote-Group",
        "requestheader-username-headers": "X-Remote-User",
        "proxy-client-cert-file": pki / "front-proxy.crt",
        "proxy-client-key-file": pki / "front-proxy.key",
        "enable-aggregator-routing": "true",
        "kubelet-preferred-address-types": "InternalIP",
        "allow-privileged": "true",
        "profiling": "false",
        "shutdown-delay-duration": "0s",
        "event-ttl": "1h",
    }
    if plane.audit:
        flags |= {
            "audit-policy-file": plane.folder / "audit.yaml",
            "audit-log-path": plane.audit_log,
            "audit-log-mode": "blocking",  # what was answered has been logged
            "audit-log-maxsize": 1024,
        }
    env = {**os.environ, "GOGC": str(plane.garbage_percent)}
    return replace(_kube(plane, "kube-apiserver", flags), env=env)


def manager(plane: ControlPlane, controllers: Sequence[str] = ("*",)) -> Command:
    """The controller manager; `controllers` as for its own flag."""
    flags = {
        "kubeconfig": plane.kubeconfig(MANAGER),
        "authentication-kubeconfig": plane.kubeconfig(MANAGER),
        "authorization-kubeconfig": plane.kubeconfig(MANAGER),
        "bind-address": plane.address,
        "secure-port": plane.manager_port,
        "tls-cert-file": plane.certificates / "apiserver.crt",
        "tls-private-key-file": plane.certificates / "apiserver.key",
        "root-ca-file": plane.authority,
        "service-account-private-key-file": plane.certificates / "sa.key",
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        "allocate-node-cidrs": "false",
        "controllers": ",".join(controllers),
        "flex-volume-plugin-dir": plane.folder / "volume-plugins",
        "profiling": "false",
        # A node that is gone is noticed within seconds, and so is what was deleted.
        "node-monitor-grace-period": "20s",
    }
    return _kube(plane, "kube-controller-manager", flags)


def scheduler(plane: ControlPlane) -> Command:
    flags = {
        "kubeconfig": plane.kubeconfig(SCHEDULER),
        "authentication-kubeconfig": plane.kubeconfig(SCHEDULER),
        "authorization-kubeconfig": plane.kubeconfig(SCHEDULER),
        "bind-address": plane.address,
        "secure-port": plane.scheduler_port,
        "tls-cert-file": plane.certificates / "apiserver.crt",
        "tls-private-key-file": plane.certificates / "apiserver.key",
        "leader-elect": "false",
        "profiling": "false",
    }
    return _kube(plane, "kube-scheduler", flags)


def _kube(plane: ControlPlane, name: str, flags: dict[str, object]) -> Command:
    program = build.built("kube") / name
    arguments = (f"--{flag}={value}" for flag, value in flags.items())
    return Command(name, (str(program), *arguments), plane.log(name))
