"""What a step's attention is told: where its rows are, and what a layer asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


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


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row's place in the flattened batch and in the pool."""

    begin: int  # its first query in the batch
    tokens: int
    start: int  # position of that query in the sequence
    blocks: Sequence[int]  # those of positions 0 … start + tokens - 1

    @property
    def context(self) -> int:
        """Keys that the last query may see."""
        return self.start + self.tokens
