"""The model of a world: every token depends on every byte of the KV before it.

A position's KV is a fingerprint of all tokens up to it, in all layers, in K and in V. A
draw reads everything back by the row's block table, so KV that is wrong, missing, torn or
somebody else's gives a wrong token; the reference knows the right ones.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache

from pd_core.kv import KvLayout
from pd_engine.speculate import Drafter
from pd_engine.types import Batch, Row, Sampled, StepOutput

VOCAB = 1 << 20
LAYOUT = KvLayout(
    model_hash="m" * 64,
    dtype="float32",
    block_tokens=4,
    layers=2,
    kv_heads=1,
    head_dim=1,
)
_ROOT = 0x5EED
_WRONG = VOCAB - 1  # what is drawn from torn KV


def fingerprint(before: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), before)


def fingerprints(tokens: Sequence[int]) -> list[int]:
    found, last = [], _ROOT
    for token in tokens:
        last = fingerprint(last, token)
        found.append(last)
    return found


def stored(value: int, plane: int) -> int:
    """How a fingerprint looks in a plane: (layer 0, K), (layer 0, V), (layer 1, K), …"""
    return value ^ (plane * 0x01010101)


def draw(prints: Sequence[int], choice: int) -> int:
    return zlib.crc32(array("I", prints).tobytes(), choice) % (VOCAB - 1)


@lru_cache(maxsize=256)
def reference(prompt: tuple[int, ...], count: int, choice: int) -> tuple[int, ...]:
    """What the model writes after a prompt; choices part ways at their first token."""
    prints = fingerprints(prompt)
    out: list[int] = []
    for index in range(count):
        token = draw(prints, choice if index == 0 else 0)
        out.append(token)
        prints.append(fingerprint(prints[-1], token))
    return tuple(out)


class Guesses(Drafter):
    """A drafter that knows the model, and is wrong in one guess of four."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def note(self) -> None:
        pass

    def draft(self, most: int, _sequences: int, _price: float) -> list[int]:
        prints = fingerprints(self._tokens)
        guesses = []
        for _ in range(most):
            token = draw(prints, 0)
            guess = token if token % 4 else token + 1
            guesses.append(guess)
            prints.append(fingerprint(prints[-1], guess))
        return guesses


class SimRunner:
    """What the engine's core needs of a runner. `check_write` is asked before each write."""

    vocab_size = VOCAB
    prefill_tokens_per_s = 0.0

    def __init__(
        self, num_blocks: int, dirt: int, check_write: Callable[[int], None], layout: KvLayout
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._block_cells = layout.block_bytes // 4
        # What a predecessor left there: never zeros that could pass for something.
        self._cells = array("I", [dirt & 0xFFFFFFFF]) * (num_blocks * self._block_cells)
        self.kv_buffer = memoryview(self._cells).cast("B")
        self.check_write = check_write
        self.fail_next = False

    def step(self, batch: Batch, on_layers: Callable[[int, int], None] | None = None) -> StepOutput:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the step was told to fail")
        for source, target in batch.copies:
            self.check_write(target)
            size = self._block_cells
            a, b = source * size, target * size
            self._cells[b : b + size] = self._cells[a : a + size]
        prints = [self._compute(row) for row in batch.rows]
        for layer in range(LAYOUT.layers):
            for row, found in zip(batch.rows, prints, strict=True):
                self._write(row, found, layer)
            if on_layers is not None:
                on_layers(layer, layer + 1)
        return StepOutput({row.seq_id: self._draw(row) for row in batch.rows if row.samples})

    def read(self, blocks: Sequence[int], count: int, plane: int) -> list[int]:
        """The fingerprints of positions [0, count) as this plane has them."""
        found: list[int] = []
        tokens = self.layout.block_tokens
        for block in blocks[: -(-count // tokens)]:
            start = block * self._block_cells + plane * tokens
            found += self._cells[start : start + tokens]
        mask = plane * 0x01010101
        return [value ^ mask for value in found[:count]]

    def holds(self, blocks: Sequence[int], prints: list[int]) -> bool:
        """Whether all planes of these blocks have exactly that."""
        planes = range(2 * LAYOUT.layers)
        return all(self.read(blocks, len(prints), plane) == prints for plane in planes)

    def _compute(self, row: Row) -> list[int]:
        last = _ROOT
        if row.start:
            block, slot = divmod(row.start - 1, self.layout.block_tokens)
            last = self._cells[row.block_table[block] * self._block_cells + slot]
        found = []
        for token in row.token_ids:
            last = fingerprint(last, token)
            found.append(last)
        return found

    def _write(self, row: Row, prints: list[int], layer: int) -> None:
        for offset, value in enumerate(prints):
            tokens = self.layout.block_tokens
            at, slot = divmod(row.start + offset, tokens)
            block = row.block_table[at]
            if layer == 0:
                self.check_write(block)
            for plane in (2 * layer, 2 * layer + 1):
                cell = block * self._block_cells + plane * tokens + slot
                self._cells[cell] = stored(value, plane)

    def _draw(self, row: Row) -> tuple[Sampled, ...]:
        prints = self.read(row.block_table, row.start + len(row.token_ids), 0)
        whole = self.holds(row.block_table, prints)
        known = len(prints) - row.drafts
        drawn = []
        for number, s in enumerate(row.samples):
            behind = prints[: known + (number if row.drafts else 0)]
            token = draw(behind, s.choice if s.index == 0 else 0) if whole else _WRONG
            drawn.append(Sampled(s.choice, token))
        return tuple(drawn)
