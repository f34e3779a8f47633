"""Addresses of this machine: a loopback subnet for pods, a port for clients.

Claims are abstract Unix sockets: they belong to the network namespace like the addresses
themselves, and the kernel drops them when their owner dies, however it dies.
"""

import errno
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FIRST, _SUBNETS = 64, 32 * 256
_HOSTS = range(1, 255)


class AddressTaken(Exception):
    """Somebody else has it; the message says what to do."""


def _claim(name: str) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0pdcluster-{name}")
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim


class Subnet:
    """256 loopback addresses that are ours alone until `close`."""

    def __init__(self) -> None:
        start = os.getpid()
        for attempt in range(_SUBNETS):
            number = (start + attempt) % _SUBNETS
            self.prefix = f"127.{_FIRST + number // 256}.{number % 256}"
            claim = _claim(f"subnet-{self.prefix}")
            if claim is not None:
                self._claim = claim
                break
        else:
            raise AddressTaken("every loopback subnet is taken; stop a running cluster first")
        self._used: set[int] = set()
        self._last = 0

    def allocate(self) -> str:
        """An address that was free for as long as possible: a new pod is somebody else."""
        for step in range(len(_HOSTS)):
            host = _HOSTS[(self._last + step) % len(_HOSTS)]
            if host not in self._used:
                self._used.add(host)
                self._last = host
                return f"{self.prefix}.{host}"
        raise AddressTaken(f"all {len(_HOSTS)} pod addresses are in use; lower the replicas")

    def release(self, address: str) -> None:
        self._used.discard(int(address.rpartition(".")[2]))

    def close(self) -> None:
        self._claim.close()


class ClientPort:
    """A port on 127.0.0.1 that our routers share; 0 picks a free one.

    Routers listen with SO_REUSEPORT, so that an old and a new one overlap. The kernel
    would let two clusters share a port just as well: hence the claim.
    """

    def __init__(self, port: int) -> None:
        self.port = port or _free_port()
        claim = _claim(f"port-{self.port}")
        if claim is None:
            raise AddressTaken(f"port {self.port} is used by another PDCluster; {_OTHER_PORT}")
        self._claim = claim
        try:
            _check_unused(self.port)
        except BaseException:
            claim.close()
            raise

    def close(self) -> None:
        self._claim.close()


_OTHER_PORT = "choose another with --port"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_unused(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressTaken(
                    f"port {port} on 127.0.0.1 is used by another program; {_OTHER_PORT}"
                ) from None
            reason = error.strerror or str(error)
            raise AddressTaken(f"can't listen on port {port}: {reason}; {_OTHER_PORT}") from error


def listens(pid: int, address: tuple[str, int]) -> bool:
    """Whether that very process, or one of the group that it leads, listens there: on a shared
    port anybody's answer comes."""
    try:
        inodes = _listening_inodes(address)
    except OSError:
        return False
    return bool(inodes) and any(_has_one(one, inodes) for one in _group(pid))


def _group(leader: int) -> Iterator[int]:
    """A router of several processes has its listeners in those that it starts."""
    yield leader
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != leader:
            with suppress(ProcessLookupError, PermissionError):
                if os.getpgid(int(entry)) == leader:
                    yield int(entry)


def _has_one(pid: int, inodes: set[str]) -> bool:
    try:
        descriptors = os.scandir(f"/proc/{pid}/fd")
    except OSError:
        return False
    with descriptors:
        for entry in descriptors:
            try:
                target = os.readlink(entry.path)
            except OSError:  # closed meanwhile
                continue
            if target in inodes:
                return True
    return False


def _listening_inodes(address: tuple[str, int]) -> set[str]:
    """Sockets as /proc/PID/fd names them. /proc/net/tcp writes addresses as this machine's
    words in hexadecimal, and state 0A for one that listens."""
    packed = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    local = f"{packed:08X}:{address[1]:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {f"socket:[{row[9]}]" for row in rows if row[1] == local and row[3] == "0A"}
