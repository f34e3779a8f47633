"""The KV pool as torch sees it: one buffer, written by token, read by block.

The layout is that of `pd_core.kv`: [block, layer, K|V, token, kv_head, head_dim].
"""

import contextlib
import mmap
from collections.abc import Callable, Iterable, Sequence

import torch

from pd_core.kv import KvLayout


class KvPool:
    """Memory for `num_blocks` blocks, and the views through which a step uses it.

    On the CPU it is an anonymous private mapping, or what `memory` makes: pages cost
    memory once they are written, start as zeros (never NaN), and `buffer` gives them to
    the KV plane.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: torch.device,
        memory: Callable[[int], mmap.mmap] | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        dtype = getattr(torch, layout.dtype)
        size = num_blocks * layout.block_bytes
        self._mapping: mmap.mmap | None = None
        if device.type == "cpu":
            self._mapping = memory(size) if memory is not None else _private(size)
            flat = torch.frombuffer(self._mapping, dtype=dtype)
        else:
            flat = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        heads, dim, tokens = layout.kv_heads, layout.head_dim, layout.block_tokens
        self.tensor = flat.view(num_blocks, layout.layers, 2, tokens, heads, dim)
        self._scratch = torch.empty(0, dtype=dtype, device=device)
        # Views that start at a layer: one index, made for layer 0, then serves all layers.
        halves = flat.view(-1, tokens * heads * dim)
        token_rows = flat.view(-1, heads * dim)
        self._halves = [halves[2 * i :] for i in range(layout.layers)]
        self._tokens = [token_rows[2 * i * tokens :] for i in range(layout.layers)]

    @property
    def buffer(self) -> memoryview | None:
        """The whole pool as writable bytes; None when it is not in CPU memory."""
        return None if self._mapping is None else memoryview(self._mapping)

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in the given order."""
        for source, destination in copies:
            self.tensor[destination].copy_(self.tensor[source])

    def half_index(self, blocks: Sequence[int]) -> torch.Tensor:
        """Where K of each block, then V of each block, lie in layer 0: [2 * blocks]."""
        first = torch.tensor(blocks, dtype=torch.int64) * (2 * self.layout.layers)
        return torch.cat([first, first + 1]).to(self.device)

    def token_index(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Where K of tokens at (block, offset) lies in layer 0: [tokens]; V is block_tokens on."""
        tokens = self.layout.block_tokens
        return (blocks * (2 * self.layout.layers * tokens) + offsets).to(self.device)

    def write(
        self, layer: int, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store key and value [tokens, kv_heads, head_dim] at `token_index`'s places."""
        rows = self._tokens[layer]
        rows.index_copy_(0, index, key.reshape(key.shape[0], -1))
        rows = rows[self.layout.block_tokens :]
        rows.index_copy_(0, index, value.reshape(value.shape[0], -1))

    def read(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [tokens, kv_heads, head_dim] of the blocks of a `half_index`.

        They lie in scratch memory that the next read overwrites: kept small and reused,
        it stays in the CPU's cache (twice as fast as gathering all sequences at once).
        """
        halves = self._halves[layer]
        size = index.shape[0] * halves.shape[1]
        if self._scratch.shape[0] < size:
            self._scratch = self._scratch.new_empty(2 * size)
        out = self._scratch[:size].view(index.shape[0], halves.shape[1])
        torch.index_select(halves, 0, index, out=out)
        both = out.view(2, -1, self.layout.kv_heads, self.layout.head_dim)
        return both[0], both[1]


def _private(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Decoding reads all over the pool: with small pages, address translation costs much.
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(advice)
    return mapping
