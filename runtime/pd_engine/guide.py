"""Structured output: keeps what a sequence writes within a grammar, by llguidance.

What may follow depends on the grammar and on the tokens since the client's prompt alone. So
each worker that gets a request finds out by itself where its text stands: for the first token
on a prefill worker, for all later ones on a decode worker, and again after a retry.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pd_core.failures import FailureKind, RequestFailure
from pd_engine.types import Guide

MAX_GRAMMAR_CHARS = 100_000
_STACK_BYTES = 256 << 20
_COMPILE_S = 30.0
_SAID = 300  # characters of llguidance's words that are handed on
_LIMITS = LLParserLimits(max_grammar_size=100_000, verbose_errors=False)


class Guides:
    """Makes the guides of one model's requests."""

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """ValueError where the tokenizer is of a kind that llguidance can't read."""
        self._tokenizer = LLTokenizer(
            tokenizer_json.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        # llguidance goes as deep into its stack as rules refer to rules.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._compiler.submit(int).result()  # its thread is made now, with this stack
        finally:
            threading.stack_size(before)

    def make(self, grammar: str) -> Guide:
        """For one sequence, at its beginning; takes a millisecond, and for the largest ones
        half a second. RequestFailure says what's wrong with it.
        """
        if len(grammar) > MAX_GRAMMAR_CHARS:
            message = f"the grammar: it has more than {MAX_GRAMMAR_CHARS} characters"
            raise RequestFailure(FailureKind.INVALID_REQUEST, message)
        guide = self._compiler.submit(self._compile, grammar).result(_COMPILE_S)
        if guide.problem:
            raise RequestFailure(FailureKind.INVALID_REQUEST, guide.problem)
        return guide

    def _compile(self, grammar: str) -> "GrammarGuide":
        return GrammarGuide(LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS))


class GrammarGuide:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def note(self, token: int) -> None:
        self._matcher.consume_token(token)

    def mask(self, ahead: Sequence[int]) -> bytes | None:
        matcher = self._matcher
        if not ahead:
            return matcher.compute_bitmask()
        taken = matcher.try_consume_tokens(list(ahead))
        found = matcher.compute_bitmask() if taken == len(ahead) else None
        matcher.rollback(taken)
        return found

    def fork(self) -> Guide:
        return GrammarGuide(self._matcher.deep_copy())

    @property
    def problem(self) -> str:
        if not self._matcher.is_error():
            return ""
        return f"the grammar: {' '.join(self._matcher.get_error().split())[:_SAID]}"
