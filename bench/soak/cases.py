"""What is asked, and what the answer has to be.

Prompts come from a bounded set, greedy and in fp32, so transformers' `generate` says once
what each answer is.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.soak.client import Answer
from tests.reference import Reference

PATH = "/v1/completions"
_WORDS = (
    "river", "mill", "sea", "morning", "boats", "evening", "fish", "salt", "stories", "capital",
    "France", "Paris", "sum", "42", "robot", "paint", "learns", "short", "helpful", "assistant",
    "hello", "world", "Bäume", "señor", "你好", "🙂", "def", "add", "return",
)  # fmt: skip
_SHORT, _PREFIX, _LONG = 256, 128, 12
_LONG_TOKENS = 200
_STEMS = 16
_STEM_WORDS = 100


class Wrong(Exception):
    """The answer isn't the model's."""


class Failed(Exception):
    """An error instead of an answer, or another error than the one that is due."""


@dataclass(frozen=True, slots=True)
class Case:
    """A request with the tokens of each choice, or with the status that refuses it."""

    request: bytes
    tokens: tuple[int, ...] = ()
    choices: int = 1
    streamed: bool = False
    refused: int = 0

    def judge(self, answer: Answer) -> None:
        """Raises Wrong or Failed."""
        if self.refused:
            self._judge_refusal(answer)
            return
        if answer.status != 200:
            raise Failed(f"{answer.status}: {answer.body[:300]!r}")
        found = _streamed(answer.body) if self.streamed else _whole(answer.body)
        for choice in range(self.choices):
            if tuple(found.get(choice, ())) != self.tokens:
                raise Wrong(
                    f"choice {choice}: {found.get(choice)}, not {self.tokens}; {self.request!r}"
                )

    def _judge_refusal(self, answer: Answer) -> None:
        if answer.status != self.refused:
            raise Failed(f"{answer.status}, not {self.refused}: {self.request[:300]!r}")
        try:
            message = json.loads(answer.body)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = ""
        if not message:
            raise Failed(f"{answer.status} without an error's body: {answer.body[:300]!r}")


class _Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] = []


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Reply).decode


def _whole(body: bytes) -> dict[int, list[int]]:
    return {choice.index: choice.token_ids for choice in _decode(body).choices}


def _streamed(body: bytes) -> dict[int, list[int]]:
    events = [part[6:] for part in body.split(b"\n\n") if part.startswith(b"data: ")]
    found: dict[int, list[int]] = {}
    for event in events:
        if event == b"[DONE]":
            return found
        reply = _decode(event)
        if reply.error is not None:
            raise Failed(f"in the stream: {reply.error}")
        for choice in reply.choices:
            found.setdefault(choice.index, []).extend(choice.token_ids)
    raise Failed("a stream without an end")


def http(body: bytes, method: str = "POST", path: str = PATH) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _ask(prompt: str, max_tokens: int, **more: object) -> bytes:
    content = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }
    return http(json.dumps(content).encode())


# ---- kinds of requests ---------------------------------------------------------------


def short(reference: Reference, count: int = _SHORT) -> list[Case]:
    """Some words in, one to six tokens out; every fourth is streamed, every 16th has two
    choices."""
    made = []
    for number in range(count):
        chance = random.Random(number)
        prompt = f"{number} {_words(chance, chance.randint(2, 14))}"
        tokens = 1 + number % 6
        streamed, choices = number % 4 == 3, 2 if number % 16 == 5 else 1
        request = _ask(prompt, tokens, stream=streamed, n=choices)
        wanted = tuple(reference.generate(prompt, tokens, ignore_eos=True))
        made.append(Case(request, wanted, choices, streamed))
    return made


def prefixed(reference: Reference, count: int = _PREFIX) -> list[Case]:
    """Few long beginnings, many ends: most of a prompt lies in the prefix cache."""
    stems = [f"stem {s}: {_words(random.Random(-1 - s), _STEM_WORDS)}" for s in range(_STEMS)]
    made = []
    for number in range(count):
        prompt = f"{stems[number % _STEMS]} {_words(random.Random(10_000 + number), 4)}"
        wanted = tuple(reference.generate(prompt, 4, ignore_eos=True))
        made.append(Case(_ask(prompt, 4), wanted))
    return made


def long(reference: Reference, count: int = _LONG) -> list[Case]:
    """Long streamed answers."""
    made = []
    for number in range(count):
        prompt = f"{number} {_words(random.Random(20_000 + number), 8)}"
        wanted = tuple(reference.generate(prompt, _LONG_TOKENS, ignore_eos=True))
        made.append(Case(_ask(prompt, _LONG_TOKENS, stream=True), wanted, streamed=True))
    return made


def bad() -> list[Case]:
    """What has to be refused, with the status that is due."""
    contents: Sequence[tuple[int, Mapping[str, object]]] = (
        (404, {"model": "another", "prompt": "hello"}),
        (400, {"model": "tiny"}),
        (400, {"model": "tiny", "prompt": ""}),
        (400, {"model": "tiny", "prompt": "hello", "max_tokens": -1}),
        (400, {"model": "tiny", "prompt": "hello", "temperature": 3}),
        (400, {"model": "tiny", "prompt": "hello", "temprature": 1}),
        (400, {"model": "tiny", "prompt": [1, 2, 100_000]}),
        (400, {"model": "tiny", "prompt": "hello", "n": 0}),
        (400, {"model": "tiny", "prompt": "boats " * 4000}),
        (400, {"model": "tiny", "prompt": "x", "response_format": {"type": "json_schema"}}),
    )
    made = [Case(http(json.dumps(body).encode()), refused=status) for status, body in contents]
    for status, request in (
        (400, http(b"")),
        (400, http(b'{"model": "tiny", "prompt": "hel')),
        (400, http(b"[" * 5000)),
        (400, http(b"\xff\xfe\x00")),
        (404, http(b"{}", path="/v1/nothing")),
        (405, http(b"", method="GET")),
    ):
        made.append(Case(request, refused=status))
    return made


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(_WORDS, k=count))


KINDS = {"short": short, "prefixed": prefixed, "long": long}


def make(kinds: Iterable[str], reference: Reference, few: bool) -> dict[str, list[Case]]:
    """The cases of these kinds. `few`: enough to see that all of it works."""
    made = {}
    for kind in kinds:
        if kind == "bad":
            made[kind] = bad()
        else:
            build = KINDS[kind]
            made[kind] = build(reference, 8) if few else build(reference)
    return made
