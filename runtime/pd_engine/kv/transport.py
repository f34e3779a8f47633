"""How KV gets from one worker's pool into another's: what all transports have in common.

Each carries the same frames over a stream socket, so leases, checksums, verdicts and the
end of a connection mean the same everywhere. They differ in where a push's payload is: on
the socket (tcp), in memory that both ends see (shm), or in the sender's memory, from where
the receiver reads it (nixl). In any case the receiver writes its own memory: what arrives
after a transfer was given up finds nobody who takes it.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from pd_core.failures import FailureKind, RequestFailure
from pd_core.kv import KvLayout
from pd_engine.transfer import PushHead, Region

AUTO = "auto"
NAMES = ("tcp", "shm", "nixl")
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
    """One way for KV to go. One that has no port of its own shares that of tcp: its hello
    offers a region, and the welcome says whether the target reads pushes from there."""

    @property
    def name(self) -> str: ...

    async def connect(self, address: str, epoch: str) -> socket.socket:
        """A connection to the worker that is (address, epoch). Raises Unreachable where this
        transport has no way there, OSError when it has one and it failed."""
        ...

    def offer(self) -> Region | None:
        """What the hello says of this worker's pool, once connected."""
        return None

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

    async def listen(self, host: str, port: int, epoch: str) -> socket.socket | None:
        """None: it shares the port of tcp."""
        ...

    async def greet(self, sock: socket.socket) -> tuple[socket.socket, Taker]:
        """What an accepted connection begins with; returns the socket to use from now on
        (the one given is then part of it, or closed). Raises FrameError, OSError."""
        ...

    async def admit(self, epoch: str, region: Region) -> Taker:
        """Who takes the pushes of a sender that offers this. Raises Unreachable, FrameError."""
        raise Unreachable(f"{self.name} reads no region of {epoch}'s {region.size} bytes")

    async def close(self) -> None:
        """All connections are over."""
        return


def choose(ours: str, asked: str, auto: tuple[str, ...]) -> tuple[str, ...]:
    """The transports to try, in order. RequestFailure: the two ends don't agree.

    `ours` is this worker's setting, `asked` the target's or the router's wish ("": none).
    Only between two that leave it open is there a second to try: those of `auto`.
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
    return tuple(named) or auto
