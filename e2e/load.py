"""Streams that never stop while a test does something to the cluster, each answer checked.

Strict clients: a connection of its own for each request, no retry of any kind, every token
compared with transformers'.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from e2e import network
from e2e.truth import Seen
from tests.client import Streamed, follow
from tests.reference import Reference

COMPLETIONS = "/v1/completions"
REQUEST_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request's body and the text that transformers gives."""

    body: dict[str, Any]
    text: str


def questions(model: Path, count: int = 12, answer_tokens: int = 120) -> list[Question]:
    """Prompts of many lengths, with what transformers says to them."""
    reference = Reference(model, threads=2)
    found = []
    for number in range(count):
        words = "".join(f"{number * 100 + i} boats go out to the sea, " for i in range(400))
        body = {
            "model": "tiny",
            "prompt": words[: 150 + 170 * number],
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        new = reference.generate(str(body["prompt"]), answer_tokens, ignore_eos=True)
        found.append(Question(body, reference.decode(new)))
    return found


@dataclass(slots=True)
class Outcome:
    """What all streams together brought."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)


class Load:
    """`streams` at a time until the block ends; then what runs is let end."""

    def __init__(
        self,
        namespace_file: Path | None,
        address: tuple[str, int],
        questions: Sequence[Question],
        streams: int = 8,
    ) -> None:
        self.outcome = Outcome()
        self._namespace_file = namespace_file
        self._host, self._port = address
        self._questions = questions
        self._streams = streams
        self._stop = threading.Event()
        self._ended = threading.Condition()

    def __enter__(self) -> "Load":
        self._future = network.start(self._namespace_file, self._run)
        self.until_more(self._streams)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._future.result(REQUEST_DEADLINE_S + 10)

    def until_more(self, answers: int, deadline_s: float = REQUEST_DEADLINE_S) -> None:
        """Waits until so many more requests have ended, well or not."""
        ends = time.monotonic() + deadline_s
        with self._ended:
            goal = self._count() + answers
            while self._count() < goal:
                if self._future.done():
                    self._future.result()
                if not self._ended.wait(max(0.0, ends - time.monotonic())):
                    raise TimeoutError(f"no {answers} answers in {deadline_s:g} s: {self.outcome}")

    def assert_flawless(self) -> None:
        outcome = self.outcome
        assert not outcome.failed, "\n".join(outcome.failed)
        assert not outcome.wrong, "\n".join(outcome.wrong)
        assert outcome.right > 0

    def _count(self) -> int:
        outcome = self.outcome
        return outcome.right + len(outcome.wrong) + len(outcome.failed)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._streams):
                group.create_task(self._stream(number))

    async def _stream(self, number: int) -> None:
        while not self._stop.is_set():
            question = self._questions[number % len(self._questions)]
            result = Streamed()
            problem = await self._ask(question, result)
            with self._ended:
                self.outcome.seen.append(_seen(result, problem))
                if problem:
                    since = time.perf_counter() - result.sent
                    self.outcome.failed.append(
                        f"stream {number} after {since:.1f} s and {len(result.text)} characters: "
                        f"{problem}"
                    )
                elif result.text != question.text:
                    self.outcome.wrong.append(f"{result.text!r} instead of {question.text!r}")
                else:
                    self.outcome.right += 1
                self._ended.notify_all()
            if problem:
                await asyncio.sleep(0.2)  # a cluster that is down isn't asked in a tight loop
            number += self._streams

    async def _ask(self, question: Question, result: Streamed) -> str:
        """What went wrong; "" when nothing did."""
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                async for _ in follow(self._host, self._port, COMPLETIONS, question.body, result):
                    pass
        except TimeoutError:
            return f"no end within {REQUEST_DEADLINE_S:g} s"
        except (OSError, asyncio.IncompleteReadError) as error:
            return f"the connection broke: {error!r}"
        if result.error is not None:
            return f"{result.status} {result.error}"
        return "" if result.done else "the stream ended without [DONE]"


def _seen(result: Streamed, problem: str) -> Seen:
    """For alerts: an error is one that a router has answered, a 5xx."""
    times = result.times
    ttft_s = result.ttft_s if times else None
    tpot_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    return Seen(time.monotonic(), ttft_s, tpot_s, bool(problem) and result.status >= 500)
