"""A runner without a model: each drawn token depends on every KV byte it should depend on.

The KV of a position is its token id, written into all layers of the paged pool. A draw
reads all positions back from the pool by the row's block table, so wrong, missing or
foreign KV gives a wrong token.
"""

import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from pd_core.kv import KvLayout
from pd_engine.types import Batch, Row, Sampled, StepOutput

VOCAB = 50_000
LAYOUT = KvLayout(
    model_hash="fake", dtype="float32", block_tokens=4, layers=3, kv_heads=1, head_dim=2
)


def next_token(tokens: Sequence[int], choice: int = 0) -> int:
    """The fake model: a hash of everything before, and of the choice."""
    return zlib.crc32(repr((list(tokens), choice)).encode()) % VOCAB


def reference(prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
    """What the fake model writes after a prompt. Choices part ways at their first token."""
    tokens = list(prompt)
    for index in range(count):
        tokens.append(next_token(tokens, choice if index == 0 else 0))
    return tokens[len(prompt) :]


class FakeRunner:
    """Steps are instant unless `gate` is set: then each waits for `gate.release()`."""

    vocab_size = VOCAB
    prefill_tokens_per_s = 1000.0

    def __init__(self, num_blocks: int, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.max_model_tokens = 4096
        self._pool = np.zeros(
            (num_blocks, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim),
            dtype=np.float32,
        )
        self.kv_buffer = self._pool.data.cast("B")
        self.gate: threading.Semaphore | None = None
        self.started = threading.Event()
        self.fail_next: Exception | None = None
        self.steps = 0
        self.layers_written = 0  # by steps that were not abandoned before

    def step(self, batch: Batch, on_layers: Callable[[int, int], None] | None = None) -> StepOutput:
        self.steps += 1
        self.started.set()
        if self.gate is not None and not self.gate.acquire(timeout=30):
            raise AssertionError("the test forgot a step at the gate")
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        for source, destination in batch.copies:
            self._pool[destination] = self._pool[source]
        for layer in range(self.layout.layers):
            for row in batch.rows:
                self._write(row, layer)
            if on_layers is not None:
                on_layers(layer, layer + 1)
            self.layers_written += 1
        return StepOutput({row.seq_id: self._draw(row) for row in batch.rows if row.samples})

    def _write(self, row: Row, layer: int) -> None:
        for offset, token in enumerate(row.token_ids):
            block, slot = divmod(row.start + offset, self.layout.block_tokens)
            self._pool[row.block_table[block], layer, :, slot] = token

    def _draw(self, row: Row) -> tuple[Sampled, ...]:
        tokens = []
        for position in range(row.start + len(row.token_ids)):
            block, slot = divmod(position, self.layout.block_tokens)
            values = np.unique(self._pool[row.block_table[block], :, :, slot])
            # Layers that disagree are KV torn in the transfer: no token can come of it.
            tokens.append(int(values[0]) if len(values) == 1 else -1)
        known = len(tokens) - row.drafts
        drawn = []
        for number, spec in enumerate(row.samples):
            behind = tokens[: known + (number if row.drafts else 0)]
            token = next_token(behind, spec.choice if spec.index == 0 else 0)
            drawn.append(Sampled(spec.choice, token, -0.5))
        return tuple(drawn)
