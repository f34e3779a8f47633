"""How KV gets from one worker's pool into another's: what all transports have in common.

Each carries the same frames over a stream socket, so leases, checksums, verdicts and the
end of a connection mean the same everywhere. They differ in where a push's payload is: on
the socket (tcp), or in memory that both ends see (shm). In any case the receiver writes
its own memory: what arrives after a transfer was given up finds nobody who takes it.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from pd_core.failures import FailureKind, RequestFailure
from pd_core.kv import KvLayout
from pd_engine.transfer import PushHead

AUTO = "auto"
NAMES = ("tcp", "shm")
CHOICES = (AUTO, *NAMES)


class Unreachable(Exception):
    """No target of this transport is there; another transport may find it."""


class Taker(Protocol):
    """The receiving end of one connection."""

    def open(self, sender: KvLayout) -> None:
        """Before anything is taken: how the sender's KV looks. Raises FrameError."""
        ...

    async def take(
        self,
        sock: socket.socket,
        head: PushHead,
        slices: Sequence[memoryview],
        scratch: memoryview,
        progress: Callable[[], None],
    ) -> int:
        """Fill the slices with the push's payload; returns xxh3_64 of what is there now."""
        ...

    def close(self) -> None:
        """The connection is over."""
        ...


class Transport(Protocol):
    """One way for KV to go."""

    @property
    def name(self) -> str: ...

    async def connect(self, address: str, epoch: str) -> socket.socket:
        """A connection to the worker that is (address, epoch). Raises Unreachable where this
        transport has no way there, OSError when it has one and it failed."""
        ...

    async def push(
        self,
        sock: socket.socket,
        head: PushHead,
        block_ids: Sequence[int],
        slices: Sequence[memoryview],
        scratch: memoryview,
    ) -> None:
        """Send one push, head and payload."""
        ...

    async def listen(self, host: str, port: int, epoch: str) -> socket.socket: ...

    async def greet(self, sock: socket.socket) -> tuple[socket.socket, Taker]:
        """What an accepted connection begins with; returns the socket to use from now on
        (the one given is then part of it, or closed). Raises FrameError, OSError."""
        ...


def choose(ours: str, asked: str) -> tuple[str, ...]:
    """The transports to try, in order. RequestFailure: the two ends don't agree.

    `ours` is this worker's setting, `asked` the target's or the router's wish ("": none).
    Only between two that leave it open is there a second to try.
    """
    for name in (ours, asked):
        if name and name not in CHOICES:
            raise RequestFailure(
                FailureKind.TRANSFER_FAILED,
                f"KV transport {name!r} isn't known here; {', '.join(NAMES)} are",
            )
    named = {name for name in (ours, asked) if name and name != AUTO}
    if len(named) > 1:
        raise RequestFailure(
            FailureKind.TRANSFER_FAILED,
            f"this worker sends KV by {ours} alone, and {asked} was asked for",
        )
    return tuple(named) or ("shm", "tcp")
