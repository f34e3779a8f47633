"""One step's attention in plain torch: the fallback, and what runs on other devices.

Rows of one token (decode) read their blocks and attend without a mask. Rows of many
tokens (prefill chunks) attend in tiles of queries: a tile needs one small mask, which is a
window into a fixed table, so no masks are built while serving.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from pd_engine.attention.exact import attend_exact
from pd_engine.attention.pool import KvPool
from pd_engine.attention.rows import Options, RowPlan

QUERY_TILE = 512
"""Queries of a prefill row that attend in one call."""


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


class PlainStep:
    """One step's rows, for all layers."""

    def __init__(self, pool: KvPool, masks: CausalMasks, plans: Sequence[RowPlan]) -> None:
        self._pool, self._masks, self._plans = pool, masks, plans
        self._block_tokens = pool.layout.block_tokens
        self._write_index = self._place_tokens()
        # By (row, first block): made once a step, the same in every layer.
        self._read_index: dict[tuple[int, int], torch.Tensor] = {}

    def _place_tokens(self) -> torch.Tensor:
        size, blocks, offsets = self._block_tokens, [], []
        for plan in self._plans:
            for position in range(plan.start, plan.context):
                blocks.append(plan.blocks[position // size])
                offsets.append(position % size)
        return self._pool.token_index(torch.tensor(blocks), torch.tensor(offsets))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [kv_heads, T, D] in the rows' blocks."""
        self._pool.write(layer, self._write_index, key.transpose(0, 1), value.transpose(0, 1))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        """query [H, T, D]; key and value as written -> [T, H, D]."""
        key, value = key.transpose(0, 1), value.transpose(0, 1)
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

    def _read(
        self, layer: int, plan: RowPlan, window: int | None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        """Keys and values from the first that any query sees, and its position."""
        first = 0 if window is None else max(0, plan.start - window + 1)
        block = first // self._block_tokens
        index = self._read_index.get((plan.begin, block))
        if index is None:
            index = self._pool.half_index(plan.blocks[block:])
            self._read_index[(plan.begin, block)] = index
        key, value = self._pool.read(layer, index)
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
