"""One step's attention: each layer's new KV goes into the pool, then each row attends.

Rows of one token (decode) read their blocks and attend without a mask. Rows of many
tokens (prefill chunks) attend in tiles of queries: a tile needs one small mask, which is a
window into a fixed table, so no masks are built while serving.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from pd_engine.attention.exact import attend_exact
from pd_engine.attention.pool import KvPool
from pd_engine.types import Row

QUERY_TILE = 512
"""Queries of a prefill row that attend in one call."""

LayersDone = Callable[[int, int], None]
"""Called with (first, end): these layers' KV of the whole batch is in the pool."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a model asks of its attention in one layer."""

    scale: float
    window: int | None = None  # a query sees this many keys, itself included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]

    @property
    def exact(self) -> bool:
        """Whether torch's fused attention can't do it."""
        return self.softcap is not None or self.sinks is not None


class CausalMasks:
    """Additive masks for tiles of queries, as views of one table for each window.

    In a table's column `past + j - i`, row i sees the key j tokens after the tile's first
    query: any tile, at any position, is a slice of it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tables: dict[int | None, torch.Tensor] = {}

    def tile(self, queries: int, past: int, window: int | None) -> torch.Tensor:
        """[queries, past + queries]: the keys are `past` earlier ones and the tile's own."""
        table = self._tables.get(window)
        if table is None or table.shape[1] - QUERY_TILE < past:
            table = self._tables[window] = self._build(max(2 * past, QUERY_TILE), window)
        width = table.shape[1] - QUERY_TILE
        return table[:queries, width - past : width + queries]

    def _build(self, past: int, window: int | None) -> torch.Tensor:
        row = torch.arange(QUERY_TILE, device=self._device)[:, None]
        column = torch.arange(-past, QUERY_TILE, device=self._device)[None, :]
        seen = column <= row
        if window is not None:
            seen &= column > row - window
        table = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
        return table.masked_fill_(~seen, float("-inf"))


@dataclass(slots=True)
class RowPlan:
    """A row's place in the flattened batch and in the pool."""

    begin: int  # its first query in the batch
    tokens: int
    start: int  # position of that query in the sequence
    blocks: Sequence[int]  # those of positions 0 … start + tokens - 1
    _indices: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Keys that the last query may see."""
        return self.start + self.tokens

    def index_from(self, block: int, pool: KvPool) -> torch.Tensor:
        """The pool's index of its blocks from the given one on, made once a step."""
        index = self._indices.get(block)
        if index is None:
            index = self._indices[block] = pool.half_index(self.blocks[block:])
        return index


class PagedStep:
    """What the attention of one step needs; the model's layers call `attend` in turn."""

    def __init__(
        self,
        pool: KvPool,
        masks: CausalMasks,
        rows: Sequence[Row],
        on_layers: LayersDone | None = None,
        layer_group: int = 1,
    ) -> None:
        self._pool, self._masks = pool, masks
        self._on_layers, self._group = on_layers, layer_group
        self._block_tokens = pool.layout.block_tokens
        self._plans = self._plan(rows)
        self._write_index = self._place_tokens()

    def _plan(self, rows: Sequence[Row]) -> list[RowPlan]:
        plans, begin = [], 0
        for row in rows:
            tokens = len(row.token_ids)
            used = self._pool.layout.blocks_for(row.start + tokens)
            if not tokens or used > len(row.block_table):
                raise ValueError(
                    f"sequence {row.seq_id}: {tokens} tokens from position {row.start} on "
                    f"do not fit its {len(row.block_table)} blocks"
                )
            plans.append(RowPlan(begin, tokens, row.start, row.block_table[:used]))
            begin += tokens
        return plans

    def _place_tokens(self) -> torch.Tensor:
        size, blocks, offsets = self._block_tokens, [], []
        for plan in self._plans:
            for position in range(plan.start, plan.context):
                blocks.append(plan.blocks[position // size])
                offsets.append(position % size)
        return self._pool.token_index(torch.tensor(blocks), torch.tensor(offsets))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        """query [H, T, D], key and value [kv_heads, T, D], roped -> [T, H, D]."""
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        self._pool.write(layer, self._write_index, key, value)
        self._report(layer)
        kv_heads = key.shape[1]
        query = query.unflatten(0, (kv_heads, -1))
        out = query.new_empty(query.shape[2], kv_heads, query.shape[1], query.shape[3])
        for plan in self._plans:
            end = plan.begin + plan.tokens
            rows = query[:, :, plan.begin : end]
            if plan.tokens == plan.context:  # all of it is at hand
                own, first = (key[plan.begin : end], value[plan.begin : end]), 0
            else:
                own, first = self._read(layer, plan, options.window)
            for offset, part in self._row(plan, rows, own[0], own[1], first, options):
                at = plan.begin + offset
                out[at : at + part.shape[2]] = part.permute(2, 0, 1, 3)
        return out.flatten(1, 2)

    def _report(self, layer: int) -> None:
        end = layer + 1
        if self._on_layers and (end % self._group == 0 or end == self._pool.layout.layers):
            self._on_layers(layer // self._group * self._group, end)

    def _read(
        self, layer: int, plan: RowPlan, window: int | None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        """Keys and values from the first that any query sees, and its position."""
        first = 0 if window is None else max(0, plan.start - window + 1)
        block = first // self._block_tokens
        key, value = self._pool.read(layer, plan.index_from(block, self._pool))
        skip, end = first - block * self._block_tokens, plan.context - block * self._block_tokens
        return (key[skip:end], value[skip:end]), first

    def _row(
        self,
        plan: RowPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: int,
        options: Options,
    ) -> list[tuple[int, torch.Tensor]]:
        """Attention of a row, tile by tile: (offset in the row, [kv_heads, group, T, D])."""
        key, value = key.transpose(0, 1), value.transpose(0, 1)
        window = options.window if options.window and options.window < plan.context else None
        if plan.tokens == 1:
            return [(0, _attend(query, key, value, None, False, options))]
        if plan.start == 0 and window is None and not options.exact:
            return [(0, _attend(query, key, value, None, True, options))]
        parts = []
        for offset in range(0, plan.tokens, QUERY_TILE):
            queries = min(QUERY_TILE, plan.tokens - offset)
            position = plan.start + offset
            seen_from = first if window is None else max(first, position - window + 1)
            keys = slice(seen_from - first, position + queries - first)
            mask = self._masks.tile(queries, position - seen_from, window)
            tile = query[:, :, offset : offset + queries]
            part = _attend(tile, key[:, keys], value[:, keys], mask, False, options)
            parts.append((offset, part))
        return parts


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    options: Options,
) -> torch.Tensor:
    """query [kv_heads, group, T, D], key and value [kv_heads, S, D] -> as query.

    KV heads are never repeated in memory: a single query's group becomes the fused
    attention's query axis, otherwise keys are expanded over the group with stride 0.
    """
    if options.exact:
        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.view(query.shape[:2])
        return attend_exact(
            query, key, value, scale=options.scale, mask=mask, softcap=options.softcap, sinks=sinks
        )
    if query.shape[2] == 1 and mask is None:
        packed = query.squeeze(2).unsqueeze(0)
        out = scaled_dot_product_attention(packed, key[None], value[None], scale=options.scale)
        return out[0].unsqueeze(2)
    shape = (*query.shape[:2], key.shape[1], key.shape[2])
    return scaled_dot_product_attention(
        query,
        key.unsqueeze(1).expand(shape),
        value.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=causal,
        scale=options.scale,
    )
