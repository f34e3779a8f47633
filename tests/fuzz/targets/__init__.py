"""What is fuzzed: a module a target.

`one(data)` takes one input and returns, whatever it is; what it raises is a finding.
`PACKAGES` are those whose branches the fuzzer watches, `WORDS` what it likes to put in,
`seeds()` the inputs that it starts from, beside the files in the corpus.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol, cast

NAMES = (
    "engine", "forms", "gguf", "http", "kvplane", "modelfiles", "openai", "pdcluster",
    "templates", "workers",
)  # fmt: skip


class Target(Protocol):
    """A target's module."""

    PACKAGES: Sequence[str]
    WORDS: Sequence[bytes]
    one: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def load(name: str) -> Target:
    return cast(Target, importlib.import_module(f"tests.fuzz.targets.{name}"))
