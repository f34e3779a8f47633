"""The cluster's own network: a namespace without any uplink. Pods, Services and the node's
address collide with nothing on this machine and reach nothing outside of it.
"""

import subprocess

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import NODE_ADDRESS, Layout
from e2e.cluster.process import Command

DEVICE = "node0"
_DEADLINE_S = 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def make(layout: Layout) -> None:
    """The namespace with the node's address, and a route for what has none: without one the
    kernel refuses to send to Services' addresses, before kube-proxy can translate them."""
    _run("ip", "netns", "add", layout.namespace)
    for arguments in (
        ("ip", "link", "set", "lo", "up"),
        # A bridge: not every kernel has the dummy device.
        ("ip", "link", "add", DEVICE, "type", "bridge"),
        ("ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
        ("ip", "route", "add", "default", "dev", DEVICE),
        ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"),
    ):
        _run(*enter(layout), *arguments)


def filter_bridges(layout: Layout) -> None:
    """Pods of one node talk over a bridge; policies apply only if iptables sees that too."""
    setting = "/proc/sys/net/bridge/bridge-nf-call-iptables"
    done = subprocess.run(
        [*enter(layout), "sh", "-c", f"echo 1 > {setting}"],
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(
            "this kernel has no br_netfilter, so NetworkPolicies can't be enforced"
            f" (modprobe br_netfilter?): {done.stderr.strip()}"
        )


def enter(layout: Layout) -> tuple[str, ...]:
    """What goes before a command to run it in the cluster's network. Not `ip netns exec`: that
    mounts another /sys, without the cgroups that the kubelet needs."""
    return ("nsenter", f"--net={layout.namespace_file}", "--")


def inside(layout: Layout, command: Command) -> Command:
    """The same command, in the cluster's network."""
    argv = (*enter(layout), *command.argv)
    return Command(command.name, argv, command.log, command.env)


def exists(layout: Layout) -> bool:
    return layout.namespace_file.exists()


def remove(layout: Layout) -> None:
    if exists(layout):
        _run("ip", "netns", "delete", layout.namespace)


def _run(*arguments: str) -> None:
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(arguments)}: {done.stderr.strip()}")
