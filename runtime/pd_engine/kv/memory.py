"""Views into the block pool's memory: which bytes are a block's layers."""

from collections.abc import Sequence

from pd_core.kv import KvLayout


class KvMemory:
    """The pool as bytes, `[block, layer, K|V, token, kv_head, head_dim]`, contiguous.

    A range of a block's layers is one slice. Whole blocks that lie side by side are
    one slice too, so a run of neighbours moves in one piece.
    """

    def __init__(self, buffer: memoryview, layout: KvLayout, *, readonly: bool = False) -> None:
        view = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        if view.readonly and not readonly:
            raise ValueError("the KV pool's buffer is read-only")
        self.blocks, rest = divmod(view.nbytes, layout.block_bytes)
        if rest or not self.blocks:
            raise ValueError(
                f"a KV pool of {view.nbytes} bytes isn't whole blocks of {layout.block_bytes}"
            )
        self.layout = layout
        self.view = view

    def slices(
        self, block_ids: Sequence[int], layer_start: int, layer_count: int
    ) -> list[memoryview]:
        """The bytes of these layers of these blocks, in this order."""
        found = spans(self.layout, self.blocks, block_ids, layer_start, layer_count)
        return [self.view[start:end] for start, end in found]


def spans(
    layout: KvLayout, blocks: int, block_ids: Sequence[int], layer_start: int, layer_count: int
) -> list[tuple[int, int]]:
    """Where these layers of these blocks begin and end in a pool of so many blocks."""
    if layer_start < 0 or layer_count < 1 or layer_start + layer_count > layout.layers:
        raise IndexError(f"no {layer_count} layers from {layer_start} of {layout.layers}")
    whole = layer_count == layout.layers
    offset, size = layer_start * layout.layer_bytes, layer_count * layout.layer_bytes
    found: list[tuple[int, int]] = []
    for block in block_ids:
        if not 0 <= block < blocks:
            raise IndexError(f"block {block} of a pool of {blocks}")
        start = block * layout.block_bytes + offset
        if whole and found and found[-1][1] == start:
            found[-1] = (found[-1][0], start + size)
        else:
            found.append((start, start + size))
    return found
