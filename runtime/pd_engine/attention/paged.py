"""One step's attention: each layer's new KV goes into the pool, then each row attends.

Two ways, with equal results up to rounding: the compiled one (`native`), which reads the
pool's pages where they are, and plain torch (`plain`), where that isn't built or the pool
isn't in the CPU's memory.
"""

from collections.abc import Callable, Sequence

import torch

from pd_engine.attention.library import Native
from pd_engine.attention.native import NativeStep
from pd_engine.attention.plain import CausalMasks, PlainStep
from pd_engine.attention.pool import KvPool
from pd_engine.attention.rows import Options, RowPlan
from pd_engine.types import Row

LayersDone = Callable[[int, int], None]
"""Called with (first, end): these layers' KV of the whole batch is in the pool."""


class PagedAttention:
    """Attention over one pool, in the faster way that there is for it."""

    def __init__(self, pool: KvPool, native: Native | None) -> None:
        """`native` None: plain torch."""
        self.pool = pool
        self._native = native if pool.device.type == "cpu" else None
        self._masks = CausalMasks(pool.tensor.dtype, pool.device)

    @property
    def way(self) -> str:
        """For people: how it is computed."""
        return "plain torch" if self._native is None else f"compiled ({self._native.variant})"

    def step(self, plans: Sequence[RowPlan]) -> NativeStep | PlainStep:
        """Prepares the attention of one step's rows for all layers."""
        if self._native is None:
            return PlainStep(self.pool, self._masks, plans)
        return NativeStep(self._native, self.pool, plans)


class PagedStep:
    """What the attention of one step needs; the model's layers call `attend` in turn."""

    def __init__(
        self,
        attention: PagedAttention,
        rows: Sequence[Row],
        on_layers: LayersDone | None = None,
        layer_group: int = 1,
    ) -> None:
        self._on_layers, self._group = on_layers, layer_group
        self._layout = attention.pool.layout
        self._step = attention.step(self._plan(rows))

    def _plan(self, rows: Sequence[Row]) -> list[RowPlan]:
        plans, begin = [], 0
        for row in rows:
            tokens = len(row.token_ids)
            used = self._layout.blocks_for(row.start + tokens)
            if not tokens or used > len(row.block_table):
                raise ValueError(
                    f"sequence {row.seq_id}: {tokens} tokens from position {row.start} on "
                    f"do not fit its {len(row.block_table)} blocks"
                )
            plans.append(RowPlan(begin, tokens, row.start, row.block_table[:used]))
            begin += tokens
        return plans

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
    ) -> torch.Tensor:
        """query [H, T, D], key and value [kv_heads, T, D], roped -> [T, H, D]."""
        self._step.write(layer, key, value)
        self._report(layer)
        return self._step.attend(layer, query, key, value, options)

    def _report(self, layer: int) -> None:
        end = layer + 1
        if self._on_layers and (end % self._group == 0 or end == self._layout.layers):
            self._on_layers(layer // self._group * self._group, end)
