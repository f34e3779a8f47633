"""What both ends of a KV transfer agree on. Pure.

A transfer moves the KV of one prompt from a prefill worker (exports.py) to a decode
worker (imports.py): pushes, each a rectangle of layers x blocks, then one seal. A
rectangle's blocks are counted in the request, from 0 at the prompt's start.

The two state machines know ids, ranges, leases and coverage. They never see a socket,
a pool or a clock: each method takes the time and returns what its caller must do.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pd_core.estimate import KEY_GROUP_TOKENS, SCALE_BYTES
from pd_core.kv import KvLayout
from pd_engine.types import TokenOut

KIB = 1024
QUANTIZATIONS = ("int8", "int4")

_RECORD = struct.Struct(">IIIIQQ")


@dataclass(frozen=True, slots=True)
class TransferId:
    """One attempt at a request."""

    request: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class KvRange:
    """Layers [layer_start, layer_end) of blocks [block_start, block_end) of a request."""

    layer_start: int
    layer_count: int
    block_start: int
    block_count: int

    @property
    def layer_end(self) -> int:
        return self.layer_start + self.layer_count

    @property
    def block_end(self) -> int:
        return self.block_start + self.block_count

    @property
    def slices(self) -> int:
        """How many (layer, block) cells it holds."""
        return self.layer_count * self.block_count

    def __str__(self) -> str:
        return (
            f"layers {self.layer_start}-{self.layer_end - 1} of "
            f"blocks {self.block_start}-{self.block_end - 1}"
        )


@dataclass(frozen=True, slots=True)
class Region:
    """A sender's pool, for a target that reads it from afar: which agent knows it (as NIXL's
    metadata), and where it is in the sender's memory."""

    agent: bytes
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class PushHead:
    """What precedes a push's payload. `checksum` is xxh3_64 of the payload; `source_blocks`
    say where it is in the sender's pool, if the target reads it there."""

    grant: bytes
    id: TransferId
    range: KvRange
    payload_bytes: int
    checksum: int
    source_blocks: tuple[int, ...] = ()
    quantization: str = ""  # of the payload: "" (none), int8, int4


@dataclass(frozen=True, slots=True)
class SealHead:
    """Ends a transfer: what the target must have by now, and token 0 of each choice."""

    grant: bytes
    id: TransferId
    token_count: int
    payload_bytes: int
    coverage: int
    first: tuple[TokenOut, ...]
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class AbortHead:
    """The sender gives up."""

    grant: bytes
    id: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's last word on a transfer."""

    grant: bytes
    id: TransferId
    committed: bool
    reason: str = ""


class Digest(Protocol):
    """An incremental 64-bit hash (xxh3_64 outside of tests)."""

    def update(self, data: bytes, /) -> None: ...

    def intdigest(self) -> int: ...


DigestFactory = Callable[[], Digest]


def push_bytes(layout: KvLayout, pushed: KvRange, quantization: str) -> int | None:
    """The payload of a push of that range; None: there is no such quantization."""
    if not quantization:
        return pushed.slices * layout.layer_bytes
    if quantization not in QUANTIZATIONS or layout.head_dim % 2:
        return None
    return quantized_bytes(layout, quantization, pushed.layer_count, pushed.block_count)


def quantized_bytes(layout: KvLayout, quantization: str, layers: int, blocks: int) -> int:
    """So many layers of so many blocks in int8 or int4, scales included (see kv.codec)."""
    tokens = blocks * layout.block_tokens
    vectors = layers * tokens * layout.kv_heads
    if quantization == "int8":
        return 2 * vectors * (layout.head_dim + SCALE_BYTES)
    values = vectors * (layout.head_dim // 2 + SCALE_BYTES)
    groups = layers * -(-tokens // KEY_GROUP_TOKENS) * layout.kv_heads
    return values + vectors * layout.head_dim // 2 + groups * layout.head_dim * SCALE_BYTES


def coverage_record(pushed: KvRange, payload_bytes: int, checksum: int) -> bytes:
    """One push as it enters the coverage digest, in the order in which pushes were sent."""
    return _RECORD.pack(
        pushed.layer_start,
        pushed.layer_count,
        pushed.block_start,
        pushed.block_count,
        payload_bytes,
        checksum,
    )


@dataclass(frozen=True, slots=True)
class ImportLimits:
    """How long a decode worker waits, in seconds. The states' deadlines hold even while
    the router renews the lease, so that a stopped sender can't keep a grant for ever."""

    lease_s: float = 30.0  # without renewal or progress
    first_frame_s: float = 120.0  # the request may be queued at the prefill worker
    next_frame_s: float = 60.0  # a chunk is being computed between two frames
    payload_s: float = 10.0  # within a frame, from slice to slice
    seal_s: float = 30.0  # all KV is here, token 0 isn't


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """How long a prefill worker waits, in seconds, and the size of its frames."""

    send_s: float = 10.0  # for the target to take one frame
    verdict_s: float = 30.0  # from the seal to the target's verdict
    frame_bytes: int = 1024 * KIB  # payload; one slice (a layer of a block) is the least
