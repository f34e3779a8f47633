"""Free ports of this machine."""

import random
import socket
from contextlib import ExitStack

from e2e.cluster.errors import ClusterError

# Below the range that the kernel takes for outgoing connections: those never take ours.
FIRST, LAST = 20000, 32000
TRIES = 1000


def free(count: int, address: str = "127.0.0.1") -> list[int]:
    """Different ports that nobody listens on now."""
    ports: list[int] = []
    with ExitStack() as held:
        for port in random.sample(range(FIRST, LAST), TRIES):
            listener = held.enter_context(socket.socket())
            try:
                listener.bind((address, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise ClusterError(f"no {count} free ports between {FIRST} and {LAST} at {address}")
