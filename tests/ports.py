"""Ports that nobody takes between the moment a test finds them and the moment it listens.

The kernel gives ephemeral ports to every connection made on the machine, a test's own polls
among them, so a port found by binding to 0 may be a client's by the time a server wants it.
Those below the ephemeral range are only taken by who asks for them by number.
"""

import os
import random
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_chosen: set[int] = set()
_random = random.Random(os.getpid() ^ int.from_bytes(os.urandom(8)))


def _below_ephemeral() -> int:
    return int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """`count` ports in a row, each free on 127.0.0.1 and told to nobody else in this process."""
    for _ in range(1000):
        first = _random.randrange(_LOWEST, _below_ephemeral() - count)
        ports = list(range(first, first + count))
        if _chosen.isdisjoint(ports) and all(_is_free(port) for port in ports):
            _chosen.update(ports)
            return ports
    raise RuntimeError("no free ports; is something listening on all of them?")


def free_port() -> int:
    return free_ports(1)[0]
