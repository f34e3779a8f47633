"""PURE. Requests over time, and the two public formats in which people publish them.

Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) knows lengths alone; Mooncake's JSON
lines also say which 512-token blocks of prompts are the same (`hash_ids`).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain

MOONCAKE_BLOCK_TOKENS = 512
_COPY_SHIFT_S = 11.0
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class BadTrace(ValueError):
    """Not one of the formats; the message names the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """`at_s` is from the trace's begin; `blocks` are chained hashes of the prompt's blocks."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """In order of arrival."""

    requests: tuple[Request, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def seconds(self) -> float:
        return self.requests[-1].at_s if self.requests else 0.0

    def head(self, count: int) -> "Trace":
        return replace(self, requests=self.requests[:count])


def read(lines: Iterable[str]) -> Trace:
    """A trace in either format, told by its first line."""
    rest = iter(lines)
    first = next(rest, "").strip().lstrip("\ufeff")
    if first.startswith("{"):
        return _trace(_mooncake(chain([first], rest)))
    if first.startswith("TIMESTAMP"):
        return _trace(_azure(first, rest))
    raise BadTrace("line 1: neither Azure's CSV header nor a JSON object of Mooncake's")


def faster(trace: Trace, times: int) -> Trace:
    """So many times the load: the trace so many times over itself, each copy some seconds
    later than the one before. Copies share no prefix with each other."""
    made = [
        Request(
            one.at_s + copy * _COPY_SHIFT_S,
            one.prompt_tokens,
            one.output_tokens,
            tuple(block + bytes([copy]) for block in one.blocks) if copy else one.blocks,
        )
        for copy in range(times)
        for one in trace.requests
    ]
    return replace(trace, requests=tuple(sorted(made, key=lambda r: r.at_s)))


def _trace(requests: Iterable[Request]) -> Trace:
    found = sorted(requests, key=lambda r: r.at_s)
    if not found:
        raise BadTrace("the trace holds no request")
    begin_s = found[0].at_s
    return Trace(tuple(replace(one, at_s=one.at_s - begin_s) for one in found))


def _azure(head: str, lines: Iterable[str]) -> Iterator[Request]:
    names = head.split(",")
    if any(name not in names for name in _AZURE_FIELDS):
        raise BadTrace(f"line 1: columns {', '.join(_AZURE_FIELDS)} are needed")
    at, prompt, output = (names.index(name) for name in _AZURE_FIELDS)
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        cells = line.strip().split(",")
        try:
            yield _request(_seconds(cells[at]), cells[prompt], cells[output], ())
        except (ValueError, IndexError) as error:
            raise BadTrace(f"line {number}: {error}") from None


def _mooncake(lines: Iterable[str]) -> Iterator[Request]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            blocks = tuple(int(one).to_bytes(8) for one in data.get("hash_ids", ()))
            yield _request(
                data["timestamp"] / 1000, data["input_length"], data["output_length"], blocks
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise BadTrace(f"line {number}: {error}") from None


def _request(at_s: float, prompt: object, output: object, blocks: Sequence[bytes]) -> Request:
    """A prompt of nothing, or an answer of nothing, is served as one token."""
    return Request(at_s, max(int(str(prompt)), 1), max(int(str(output)), 1), tuple(blocks))


def _seconds(stamp: str) -> float:
    """Azure writes seven digits of a second, and no time zone."""
    whole, _, fraction = stamp.partition(".")
    day = datetime.fromisoformat(whole).replace(tzinfo=UTC)
    return day.timestamp() + float(f"0.{fraction.rstrip('Z') or 0}")
