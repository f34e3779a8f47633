"""A model whose KV lies in pages: what the runner computes with, and the draft model beside it."""

import logging
import mmap
from collections.abc import Callable, Sequence

import torch

from pd_core.kv import KvLayout
from pd_engine.attention.library import Missing, Native, load
from pd_engine.attention.paged import LayersDone, PagedAttention, PagedStep
from pd_engine.attention.pool import KvPool
from pd_engine.checkpoint import Checkpoint
from pd_engine.compiled import compile_model
from pd_engine.loading import Progress, unheard
from pd_engine.model import LoadedModel, load_model, torch_multiplies_bf16
from pd_engine.types import Row

log = logging.getLogger("pd_engine.pages")


class PagedModel:
    """A loaded model, and once `make_pool` was called, its KV pool."""

    pool: KvPool
    attention: PagedAttention

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        block_tokens: int,
        compiled: bool,
        progress: Progress = unheard,
    ) -> None:
        """Raises ModelError."""
        self.model = load_model(checkpoint, dtype, torch.device(device), progress)
        self._native = _native(self.model) if compiled else None
        geometry = self.model.geometry
        self.layout = KvLayout(
            model_hash=checkpoint.model_hash(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            block_tokens=block_tokens,
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
        )

    def make_pool(self, num_blocks: int, memory: Callable[[int], mmap.mmap] | None = None) -> None:
        """`memory` makes it where it isn't to be private."""
        self.pool = KvPool(self.layout, num_blocks, self.model.device, memory)
        self.attention = PagedAttention(self.pool, self._native)

    def forward(
        self,
        rows: Sequence[Row],
        keep: Sequence[int],
        on_layers: LayersDone | None = None,
        layer_group: int = 1,
    ) -> torch.Tensor:
        """Computes rows, puts their KV into the pool -> logits [len(keep), vocabulary] of these
        tokens, counted through all rows."""
        tokens: list[int] = []
        positions: list[int] = []
        for row in rows:
            tokens.extend(row.token_ids)
            positions.extend(range(row.start, row.start + len(row.token_ids)))
        device = self.model.device
        return self.model.forward(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(keep, dtype=torch.int64, device=device),
            PagedStep(self.attention, rows, on_layers, layer_group),
        )


def _native(model: LoadedModel) -> Native | None:
    """The compiled code, put into the model; without it, the log says why and what to do."""
    if model.device.type != "cpu":
        return None
    found = load()
    if isinstance(found, Missing):
        log.warning("attention=plain: the compiled one is missing, it is %s", found.reason)
        return None
    leave = model.dtype == torch.bfloat16 and torch_multiplies_bf16()
    done = compile_model(model.module, found, linears=not leave)
    log.info(
        "compiled variant=%s linears=%d norms=%d rotaries=%d",
        found.variant,
        done.linears,
        done.norms,
        done.rotaries,
    )
    return found
