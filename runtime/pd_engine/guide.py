"""Structured output: keeps what a sequence writes within a grammar, by llguidance.

What may follow depends on the grammar and on the tokens since the client's prompt alone. So
each worker that gets a request finds out by itself where its text stands: for the first token
on a prefill worker, for all later ones on a decode worker, and again after a retry.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pd_core.failures import FailureKind, RequestFailure
from pd_engine.types import Guide

MAX_GRAMMAR_CHARS = 100_000
_STACK_BYTES = 256 << 20
KEPT = 32  # grammars; most clients send the same few again and again
MAX_WAITING = 32  # the largest takes half a second: together less than the deadline
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
        self._known: OrderedDict[str, GrammarGuide] = OrderedDict()  # the last used is last
        self._waiting: dict[str, asyncio.Future[GrammarGuide]] = {}

    def known(self, grammar: str) -> Guide | None:
        """What `make` gives, at once, if this grammar has lately been asked for and is right."""
        guide = self._known.get(grammar)
        if guide is None or guide.problem:
            return None
        self._known.move_to_end(grammar)
        return guide.fork()

    async def make(self, grammar: str) -> Guide:
        """For one sequence, at its beginning; takes a millisecond, and for the largest ones
        half a second, in a thread. RequestFailure says what's wrong with it.
        """
        guide = self._known.get(grammar) or await self._compiled(grammar)
        if guide.problem:
            raise RequestFailure(FailureKind.INVALID_REQUEST, guide.problem)
        return guide.fork()

    async def _compiled(self, grammar: str) -> "GrammarGuide":
        if len(grammar) > MAX_GRAMMAR_CHARS:
            message = f"the grammar: it has more than {MAX_GRAMMAR_CHARS} characters"
            raise RequestFailure(FailureKind.INVALID_REQUEST, message)
        coming = self._waiting.get(grammar)
        if coming is None:
            if len(self._waiting) >= MAX_WAITING:
                message = f"{len(self._waiting)} grammars wait to be compiled on this worker"
                raise RequestFailure(FailureKind.NO_CAPACITY, message)
            loop = asyncio.get_running_loop()
            coming = loop.run_in_executor(self._compiler, self._compile, grammar)
            self._waiting[grammar] = coming
            coming.add_done_callback(lambda done: self._keep(grammar, done))
        try:
            # Shielded: others may wait for the same one.
            return await asyncio.wait_for(asyncio.shield(coming), _COMPILE_S)
        except TimeoutError:
            message = f"the grammar: it wasn't compiled within {_COMPILE_S:g} s"
            raise RequestFailure(FailureKind.NO_CAPACITY, message) from None

    def _keep(self, grammar: str, done: "asyncio.Future[GrammarGuide]") -> None:
        del self._waiting[grammar]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[grammar] = done.result()
        if len(self._known) > KEPT:
            self._known.popitem(last=False)

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
