"""Guesses a sequence's next tokens: from what stands in it already (prompt look-up), or as a
draft model says. Pure.

Where the last tokens have been written before, what followed then may follow now. A step
computes such guesses beside the token that is due, draws behind each, and a draw counts as
long as all guesses before it were drawn too. Draws are those of a step without guesses (they
depend on seed, choice, index and what precedes), so guessing changes when a token comes and
never which: greedy or not, tokens and their distribution stay what they were.

Whether guesses pay is learned without trying: each token that comes is held against the one
that would have been guessed, also while none are computed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_NGRAM = 2
_MOST_TOKENS = 32_768  # what stands further back isn't looked at
_RUNS = (1, 4, 16)
"""Guesses that were right in a row, one after the other: the more, the surer the next one."""
_FIRST_RATES = (0.2, 0.5, 0.75, 0.9)  # until a request has shown its own
_FIRST_WEIGHT = 4.0  # these count as so many guesses
_KEPT = 0.95  # of what earlier guesses count, when another one is added
_MODEL_RATES = (0.6, 0.75, 0.85, 0.9)  # as _FIRST_RATES, of a draft model
_SURE_RUN = 4  # copied so many right ones: the text goes on being copied
_PROBE_TOKENS = 32  # where a draft model doesn't pay, it is asked for a guess so often


@dataclass(frozen=True, slots=True)
class Try:
    """Of one sequence: guesses to compute now, and how many a draft model is to make."""

    guesses: tuple[int, ...] = ()
    proposals: int = 0


NOTHING = Try()


class Drafter(Protocol):
    """Guesses the tokens of one sequence, whose list of tokens it was given. As it is here, it
    has no draft model.

    `price`: what a token more costs, where a step of one token costs 1.
    """

    def note(self) -> None:
        """The sequence has a token more."""
        ...

    def draft(self, most: int, sequences: int, price: float, /) -> list[int]:
        """The guesses that are worth computing, at most so many, in a step of so many
        sequences."""
        ...

    def wants(self, _most: int, _sequences: int, _price: float, /) -> int:
        """How many guesses a draft model should make behind this step, at most so many."""
        return 0

    def offer(self, _guesses: Sequence[int], /) -> None:
        """What it guessed behind the tokens that there are now."""
        raise AssertionError("guesses that nobody asked for")


class _Rates:
    """How often guesses were right, by how many before them were, one after the other."""

    def __init__(self, first: Sequence[float]) -> None:
        self._right = [rate * _FIRST_WEIGHT for rate in first]
        self._tried = [_FIRST_WEIGHT] * len(first)

    def learn(self, run: int, right: bool) -> None:
        at = bisect_right(_RUNS, run)
        self._right[at] = self._right[at] * _KEPT + right
        self._tried[at] = self._tried[at] * _KEPT + 1

    def paying(self, run: int, most: int, sequences: int, price: float, making: float = 0.0) -> int:
        """One guess more as long as it raises what a second of the step yields. `making`: what
        each guess costs beside its price."""
        chance, tokens, seconds = 1.0, float(sequences), 1 + price * (sequences - 1)
        count, cost = 0, price + making
        while count < most:
            at = bisect_right(_RUNS, run + count)
            chance *= self._right[at] / self._tried[at]
            if chance * seconds <= cost * tokens:
                break
            count += 1
            tokens += chance
            seconds += cost
        return count


class PromptLookup(Drafter):
    """Goes by the last place where the sequence's last two tokens stand."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        first = max(0, len(tokens) - _MOST_TOKENS)
        known = tokens[first:]
        grams = zip(*(known[i:] for i in range(_NGRAM)), strict=False)
        # Where what followed each of them stands; the last one has no follower yet.
        self._followers = dict(zip(grams, range(first + _NGRAM, len(tokens)), strict=False))
        self._next: int | None = None  # where the next token stands, if the guess is right
        self._run = 0
        self._rates = _Rates(_FIRST_RATES)
        self._look_up()

    def note(self) -> None:
        tokens, last = self._tokens, len(self._tokens) - 1
        right = False
        if self._next is not None:
            right = tokens[self._next] == tokens[last]
            self._rates.learn(self._run, right)
        if last >= _NGRAM:
            self._followers[self._gram(last)] = last
        if right and self._next is not None:
            self._next += 1
            self._run += 1
        else:
            self._look_up()

    def _look_up(self) -> None:
        self._run = 0
        self._next = self._followers.get(self._gram(len(self._tokens)))

    def _gram(self, end: int) -> tuple[int, ...]:
        return tuple(self._tokens[max(0, end - _NGRAM) : end])

    @property
    def sure(self) -> bool:
        """The text has been a copy of what stands there for a while."""
        return self._run >= _SURE_RUN

    def draft(self, most: int, sequences: int, price: float) -> list[int]:
        if self._next is None:
            return []
        return self._guess(self._next, self._rates.paying(self._run, most, sequences, price))

    def _guess(self, start: int, count: int) -> list[int]:
        """What stands there; at the end of all tokens, guesses follow on guesses."""
        size = len(self._tokens)
        guesses = list(self._tokens[start : start + count])
        while len(guesses) < count:
            guesses.append(guesses[start + len(guesses) - size])
        return guesses


class ModelGuesses(Drafter):
    """Goes by a draft model, but for text that is plainly a copy of what stands there."""

    def __init__(self, tokens: Sequence[int], making: float) -> None:
        """`making`: what the draft model takes for a guess, as a price."""
        self._tokens, self._making = tokens, making
        self._lookup = PromptLookup(tokens)
        self._rates = _Rates(_MODEL_RATES)
        self._guesses: list[int] = []  # for the tokens that come next
        self._run = 0
        self._unasked = 0  # tokens since the draft model was asked

    def note(self) -> None:
        self._lookup.note()
        self._unasked += 1
        if not self._guesses:
            return
        right = self._guesses.pop(0) == self._tokens[-1]
        self._rates.learn(self._run, right)
        self._run = self._run + 1 if right else 0
        if not right:
            self._guesses = []

    def draft(self, most: int, sequences: int, price: float) -> list[int]:
        copied = self._lookup.draft(most, sequences, price)
        if self._lookup.sure or not self._guesses:
            return copied
        most = min(most, len(self._guesses))
        return self._guesses[: self._rates.paying(self._run, most, sequences, price)]

    def wants(self, most: int, sequences: int, price: float) -> int:
        if self._lookup.sure or most < 1:
            return 0
        # One pass of the draft model guesses for all sequences.
        making = self._making * (1 + price * (sequences - 1)) / sequences
        count = self._rates.paying(self._run, most, sequences, price, making)
        if count == 0 and self._unasked >= _PROBE_TOKENS:
            count = 1
        if count:
            self._unasked = 0
        return count

    def offer(self, guesses: Sequence[int]) -> None:
        self._guesses = list(guesses)
