"""A draft model: a small one that guesses what the large one will say.

Its KV lies in a pool of its own under the block numbers of the large one's, so block tables,
copies and shared prefixes hold for both. It computes what it has not seen (a prompt that
was handed over, say) a part a step, and guesses once it has caught up.

Nothing that it does can change a token: what it guesses is only tried.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pd_engine.bundle import read_tokenizer
from pd_engine.checkpoint import ModelError, open_checkpoint
from pd_engine.pages import PagedModel
from pd_engine.types import Row, Sampled

_MOST_KNOWN = 4096
"""Sequences whose state is kept: as many as a worker may run."""
_LEAST_CATCH_UP, _MOST_CATCH_UP = 16, 512
_AT_ONCE = 16
"""Missing tokens that are computed whatever else is: a sequence that has kept up has fewer."""
_MEASURED_TOKENS = 128
_ROUNDS = 3
_LEAST_PRICE = 0.01


@dataclass(slots=True)
class _Known:
    """Of a sequence: its KV stands in the pool below `end`, as long as it has this table.

    A sequence that lost its blocks gets another table, even when the blocks are the same.
    """

    table: Sequence[int]
    end: int = 0


@dataclass(frozen=True, slots=True)
class _Ask:
    """A sequence that ends at `end`, and how many tokens are to be guessed behind."""

    row: Row
    known: _Known
    end: int
    written: list[int]
    count: int

    @property
    def missing(self) -> int:
        """Tokens that the draft model has not seen."""
        return self.end - self.known.end


class DraftModel:
    """Guesses for the rows of a step, by the most likely token each time."""

    def __init__(self, model: PagedModel, vocab_size: int) -> None:
        """`vocab_size`: the large model's."""
        self._model = model
        self._vocab_size = vocab_size
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._catch_up_tokens = _LEAST_CATCH_UP
        self.price = 1.0  # of a guess, where a step of one token of the large model costs 1

    def measure(self, step_s: float, blocks: tuple[int, ...]) -> None:
        """What a guess costs beside steps that take `step_s`. Uses these blocks."""
        room = len(blocks) * self._model.layout.block_tokens
        tokens = max(1, min(_MEASURED_TOKENS, room, self._positions))

        def seconds(count: int) -> float:
            row = Row(0, [0] * count, 0, blocks)
            began = time.perf_counter()
            self._model.forward((row,), [count - 1])
            return time.perf_counter() - began

        for count in (1, tokens):
            seconds(count)
        self.price = max(_LEAST_PRICE, min(seconds(1) for _ in range(_ROUNDS)) / step_s)
        each_s = min(seconds(tokens) for _ in range(_ROUNDS)) / tokens
        self._catch_up_tokens = min(max(int(step_s / each_s), _LEAST_CATCH_UP), _MOST_CATCH_UP)

    @property
    def _positions(self) -> int:
        return self._model.model.max_positions or 1 << 62

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._model.pool.copy_blocks(copies)

    def propose(
        self, rows: Sequence[Row], samples: Mapping[int, Sequence[Sampled]]
    ) -> dict[int, tuple[int, ...]]:
        """By sequence, guesses of what comes behind that which a step has drawn."""
        asks = [self._ask(row, samples.get(row.seq_id, ())) for row in rows if row.proposals]
        ready: list[_Ask] = []
        parts: list[Row] = []
        keep: list[int] = []
        left, tokens = self._catch_up_tokens, 0
        for ask in sorted(filter(None, asks), key=lambda ask: ask.missing):
            if ask.missing > _AT_ONCE and left <= 0:
                break
            part = self._part(ask, max(left, _AT_ONCE))
            parts.append(part)
            tokens += len(part.token_ids)
            if ask.missing > _AT_ONCE:
                left -= len(part.token_ids)
            ask.known.end = part.start + len(part.token_ids)
            if not ask.missing:
                ready.append(ask)
                keep.append(tokens - 1)
        if not parts:
            return {}
        logits = self._model.forward(parts, keep or [tokens - 1])
        return self._guess(ready, logits) if ready else {}

    def _ask(self, row: Row, drawn: Sequence[Sampled]) -> _Ask | None:
        """None where there is no room for guesses, here or in the model."""
        written = _written(row, drawn)
        end = row.start + len(row.token_ids) - row.drafts + len(written)
        room = min(len(row.block_table) * self._model.layout.block_tokens, self._positions)
        # A guess is computed to make the next one, the last one isn't.
        count = min(row.proposals, room - end + 1)
        if count < 1 or not written:
            return None
        known = self._known.get(row.seq_id)
        if known is None or known.table is not row.block_table:
            known = self._known[row.seq_id] = _Known(row.block_table)
        self._known.move_to_end(row.seq_id)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return _Ask(row, known, end, written, count)

    def _part(self, ask: _Ask, most: int) -> Row:
        """What it has not seen of a sequence, or the first `most` of that."""
        start, text = ask.known.end, ask.row.text
        tokens = [*text[start : start + most], *ask.written]
        return Row(ask.row.seq_id, tokens[:most], start, ask.row.block_table)

    def _guess(self, asks: list[_Ask], logits: torch.Tensor) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {ask.row.seq_id: [] for ask in asks}
        while True:
            best = logits[:, : self._vocab_size].argmax(-1).tolist()
            for ask, token in zip(asks, best, strict=True):
                found[ask.row.seq_id].append(token)
            asks = [ask for ask in asks if len(found[ask.row.seq_id]) < ask.count]
            if not asks:
                return {seq_id: tuple(tokens) for seq_id, tokens in found.items()}
            rows = [
                Row(
                    ask.row.seq_id,
                    found[ask.row.seq_id][-1:],
                    ask.end + len(found[ask.row.seq_id]) - 1,
                    ask.row.block_table,
                )
                for ask in asks
            ]
            logits = self._model.forward(rows, range(len(rows)))


def _written(row: Row, drawn: Sequence[Sampled]) -> list[int]:
    """What a step has added to a sequence: a draw counts as long as all guesses before it were
    right."""
    written: list[int] = []
    guesses = row.token_ids[len(row.token_ids) - row.drafts :]
    for sampled, guess in zip(drawn, (*guesses, None), strict=False):
        written.append(sampled.token)
        if sampled.token != guess:
            break
    return written


def check_draft(model: str | Path, draft: str | Path) -> None:
    """Raises ModelError unless tokens mean the same to both."""
    ours, theirs = (read_tokenizer(open_checkpoint(folder).folder) for folder in (model, draft))
    if ours.get_vocab() != theirs.get_vocab():
        raise ModelError(
            f"draft model {draft}: its tokenizer is not that of {model}; take a smaller model of "
            f"the same family"
        )
