"""KV geometry: how large a block is, how it is laid out, and what one side can take of another.

A block is `[layer, K|V, token, kv_head, head_dim]`, contiguous; a pool is
`[block, …]`. So a block travels in one piece, and a range of its layers is one
contiguous slice.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, Self

PROTOCOL_VERSION = 1
PREFIX_HASH_BYTES = 16
MOST_CONVERTED_TOKENS = 4096
"""A block: whoever converts holds a frame beside its pool, and a block is the least of one."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvMessage(Protocol):
    """KV as it is told on the wire (pd_proto's KvFormat)."""

    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def protocol_version(self) -> int: ...


@dataclass(frozen=True, slots=True)
class KvForm:
    """How a worker says that its KV looks. Nothing is checked: it may be a stranger's."""

    model_hash: str
    dtype: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    quantization: str = "none"
    protocol_version: int = PROTOCOL_VERSION

    @classmethod
    def told(cls, model_hash: str, message: KvMessage) -> Self:
        """As a peer announces it."""
        return cls(
            model_hash,
            message.dtype,
            message.block_tokens,
            message.layers,
            message.kv_heads,
            message.head_dim,
            message.quantization,
            message.protocol_version,
        )

    @property
    def layout_hash(self) -> str:
        text = "|".join(str(getattr(self, f.name)) for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """For messages that name both sides of a mismatch."""
        return (
            f"model {self.model_hash[:12]}, {self.dtype}, quantization {self.quantization}, "
            f"{self.block_tokens} tokens a block, {self.layers} layers x {self.kv_heads} "
            f"KV heads x {self.head_dim}, protocol {self.protocol_version}"
        )


@dataclass(frozen=True, slots=True)
class KvLayout(KvForm):
    """KV of a form that is known here: the sizes of its parts."""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r}: use one of {sorted(_DTYPE_BYTES)}")
        for name in ("block_tokens", "layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")

    @classmethod
    def of(cls, form: KvForm) -> "KvLayout":
        """ValueError: such KV isn't known here."""
        return cls(*(getattr(form, f.name) for f in fields(form)))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block (K and V)."""
        per_token = 2 * self.kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]
        return per_token * self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.layer_bytes * self.layers

    @property
    def token_bytes(self) -> int:
        """KV bytes a token: 2 x layers x kv_heads x head_dim x bytes an element."""
        return self.block_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def first_block(self, prefix_tokens: int, tokens: int) -> int:
        """The first block that travels of a prompt of `tokens`, of which the receiver has
        `prefix_tokens`: one that it has in part travels whole. None is left: the last + 1."""
        if prefix_tokens >= tokens:
            return self.blocks_for(tokens)
        return prefix_tokens // self.block_tokens

    def same_bytes(self, other: KvForm) -> bool:
        """Whether blocks of a convertible form are blocks here as they are."""
        return self.dtype == other.dtype and self.block_tokens == other.block_tokens


_MUST_AGREE = (
    ("protocol_version", "protocol versions"),
    ("model_hash", "models or tokenizers"),
    ("layers", "numbers of layers"),
    ("kv_heads", "numbers of KV heads"),
    ("head_dim", "head sizes"),
    ("quantization", "quantizations of the KV cache"),
)


def convertible(sender: KvForm, receiver: KvForm) -> str | None:
    """Why the receiver can't take the sender's KV; None: it can, as it is or converted.

    Precision and block size are converted. The rest says what the values mean: the same
    numbers under another model, or cut into heads in another way, would be wrong answers.
    Routers pair by this, and receivers refuse by it.
    """
    if sender is receiver:
        return None
    for name, what in _MUST_AGREE:
        ours, theirs = getattr(receiver, name), getattr(sender, name)
        if ours != theirs:
            values = "" if name == "model_hash" else f": {theirs} and {ours}"
            return f"{what} differ{values}"
    for side in (sender, receiver):
        if sender.dtype != receiver.dtype and side.dtype not in _DTYPE_BYTES:
            return f"{side.dtype or 'an unnamed dtype'} can't be converted"
        if sender.block_tokens != receiver.block_tokens and not (
            1 <= side.block_tokens <= MOST_CONVERTED_TOKENS
        ):
            return (
                f"blocks of {side.block_tokens} tokens can't be converted, "
                f"those of 1 to {MOST_CONVERTED_TOKENS} can"
            )
    return None


def prefix_root(salt: bytes = b"") -> bytes:
    """Where a chain of prefix hashes begins. `salt` separates tenants."""
    return hashlib.blake2b(b"pd-prefix" + salt, digest_size=PREFIX_HASH_BYTES).digest()


def next_prefix_hash(parent: bytes, block: Sequence[int]) -> bytes:
    """The hash of one whole block of tokens behind `parent`, the chain so far."""
    body = struct.pack(f"<{len(block)}I", *block)
    return hashlib.blake2b(parent + body, digest_size=PREFIX_HASH_BYTES).digest()


def prefix_hashes(
    token_ids: Sequence[int], block_tokens: int, salt: bytes = b""
) -> Iterator[bytes]:
    """Chained hashes of the whole blocks of a prompt, 16 bytes each, stable across processes.

    Block i's hash covers blocks 0..i, so equal hashes mean equal prefixes. `salt`
    separates tenants.
    """
    parent = prefix_root(salt)
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        parent = next_prefix_hash(parent, token_ids[start : start + block_tokens])
        yield parent
