"""KV geometry: how large a block is, how it is laid out, and whether two sides agree.

A block is `[layer, K|V, token, kv_head, head_dim]`, contiguous; a pool is
`[block, …]`. So a block travels in one piece, and a range of its layers is one
contiguous slice.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PROTOCOL_VERSION = 1
PREFIX_HASH_BYTES = 16

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The shape of one worker's KV blocks. Two workers may exchange blocks when equal."""

    model_hash: str
    dtype: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    quantization: str = "none"
    protocol_version: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r}: use one of {sorted(_DTYPE_BYTES)}")
        for name in ("block_tokens", "layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")

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

    @property
    def layout_hash(self) -> str:
        text = "|".join(str(getattr(self, f)) for f in self.__dataclass_fields__)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """For messages that name both sides of a mismatch."""
        return (
            f"model {self.model_hash[:12]}, {self.dtype}, quantization {self.quantization}, "
            f"{self.block_tokens} tokens a block, {self.layers} layers x {self.kv_heads} "
            f"KV heads x {self.head_dim}, protocol {self.protocol_version}"
        )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)


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
