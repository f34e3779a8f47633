"""Guesses a sequence's next tokens from what stands in it already (prompt look-up). Pure.

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
from typing import Protocol

_NGRAM = 2
_MOST_TOKENS = 32_768  # what stands further back isn't looked at
_RUNS = (1, 4, 16)
"""Guesses that were right in a row, one after the other: the more, the surer the next one."""
_FIRST_RATES = (0.2, 0.5, 0.75, 0.9)  # until a request has shown its own
_FIRST_WEIGHT = 4.0  # these count as so many guesses
_KEPT = 0.95  # of what earlier guesses count, when another one is added


class Drafter(Protocol):
    """Guesses the tokens of one sequence, whose list of tokens it was given."""

    def note(self) -> None:
        """The sequence has a token more."""
        ...

    def draft(self, most: int, sequences: int, price: float, /) -> list[int]:
        """The guesses that are worth computing, at most so many, in a step of so many
        sequences. `price`: what a token more costs, where a step of one token costs 1."""
        ...


class PromptLookup:
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
        self._right = [rate * _FIRST_WEIGHT for rate in _FIRST_RATES]
        self._tried = [_FIRST_WEIGHT] * len(_FIRST_RATES)
        self._look_up()

    def note(self) -> None:
        tokens, last = self._tokens, len(self._tokens) - 1
        right = False
        if self._next is not None:
            right = tokens[self._next] == tokens[last]
            at = bisect_right(_RUNS, self._run)
            self._right[at] = self._right[at] * _KEPT + right
            self._tried[at] = self._tried[at] * _KEPT + 1
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

    def draft(self, most: int, sequences: int, price: float) -> list[int]:
        """One guess more as long as it raises what a second of the step yields."""
        if self._next is None:
            return []
        chance, tokens, seconds = 1.0, float(sequences), 1 + price * (sequences - 1)
        count = 0
        while count < most:
            at = bisect_right(_RUNS, self._run + count)
            chance *= self._right[at] / self._tried[at]
            if chance * seconds <= price * tokens:
                break
            count += 1
            tokens += chance
            seconds += price
        return self._guess(self._next, count)

    def _guess(self, start: int, count: int) -> list[int]:
        """What stands there; at the end of all tokens, guesses follow on guesses."""
        size = len(self._tokens)
        guesses = list(self._tokens[start : start + count])
        while len(guesses) < count:
            guesses.append(guesses[start + len(guesses) - size])
        return guesses
