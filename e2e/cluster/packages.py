"""The machine's own programs that a cluster needs: found, or installed from Debian."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.errors import ClusterError

# A file that shows that a package is there -> the package.
CONTROL_PLANE = {"/usr/bin/etcd": "etcd-server", "/usr/bin/openssl": "openssl"}
NODE = {
    "/usr/bin/containerd": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/sbin/conntrack": "conntrack",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/ipset": "ipset",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/ip": "iproute2",
    "/usr/bin/nsenter": "util-linux",
}
IMAGES = {"/usr/bin/buildah": "buildah", "/usr/sbin/debootstrap": "debootstrap"}
ALL = {**CONTROL_PLANE, **NODE, **IMAGES}

APT_DEADLINE_S = 900
_POLICY = Path("/usr/sbin/policy-rc.d")


def missing(wanted: dict[str, str]) -> list[str]:
    """The packages of `wanted` whose files aren't there."""
    return sorted({package for file, package in wanted.items() if not Path(file).exists()})


def need(wanted: dict[str, str]) -> None:
    """Installs what is missing of `wanted`; says what to do where it can't."""
    packages = missing(wanted)
    if not packages:
        return
    names = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(
            f"these Debian packages are missing: {names}\n"
            f"  install them as root (apt-get install --no-install-recommends {names}),\n"
            "  or use a cluster that you have: KUBECONFIG=… PDCLUSTER_TEST_EXISTING=1"
        )
    print(f"installing {names}", flush=True)
    with _no_services():
        install = ["install", "--yes", "--no-install-recommends", *packages]
        if _apt(install).returncode != 0:
            _apt(["update"])  # a fresh machine has no lists, an old one has stale lists
            done = _apt(install)
            if done.returncode != 0:
                raise ClusterError(f"apt-get install {names} failed:\n{done.stdout[-2000:]}")


def _apt(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "-qq", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=APT_DEADLINE_S,
        check=False,
    )


@contextmanager
def _no_services() -> Iterator[None]:
    """Debian starts a package's service with it; nobody wants its etcd or containerd."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
