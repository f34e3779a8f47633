"""For every family, greedy tokens in fp32 are transformers' whatever happens on the way: the
prompt in pieces of each size, found in the prefix cache or not, preempted or not, with guesses
or not, within a grammar or not, on one worker or handed over. Each two of these together.
"""

import asyncio
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llguidance import LLMatcher

from pd_engine.bundle import make_bundle
from pd_engine.guide import Guides
from pd_engine.types import Sampling
from tests.pd_engine.families import FAMILIES, greedy, make_model
from tests.pd_engine.worker_rig import PROMPT, Worker, handed_over
from tests.tiny_model import tiny_model_dir

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

EOS = 2
ASKED = [*PROMPT, *range(100, 132)]  # four blocks, the last one not full
NEW = 24
GRAMMAR = LLMatcher.grammar_from_regex("([a-z]+ ){3,}[a-z ]{200}!")
SMALL_POOL = 7  # blocks: each request alone fits, both together don't


class Way(NamedTuple):
    """How a request is served."""

    family: str
    chunk_tokens: int  # 0: the prompt goes whole
    cached: bool
    preempted: bool
    drafts: int
    guided: bool
    handed_over: bool

    def __str__(self) -> str:
        parts = [self.family, f"chunks-{self.chunk_tokens or 'whole'}"]
        names = ("cached", "preempted", "drafts", "guided", "handed_over")
        return "-".join([*parts, *(name for name in names if getattr(self, name))])


CHOICES: tuple[tuple[Any, ...], ...] = (
    tuple(FAMILIES),
    (1, 16, 64, 0),
    (False, True),
    (False, True),
    (0, 4),
    (False, True),
    (False, True),
)


def pairs(way: tuple[Any, ...]) -> set[tuple[tuple[int, Any], ...]]:
    return set(combinations(enumerate(way), 2))


def pairwise() -> list[Way]:
    """Few ways, such that each two choices meet in one of them: greedily, the best one next."""
    every = [(way, pairs(way)) for way in product(*CHOICES)]
    missing = set().union(*(met for _, met in every))
    chosen = []
    while missing:
        way, met = max(every, key=lambda one: len(one[1] & missing))
        chosen.append(Way(*way))
        missing -= met
    return chosen


WAYS = pairwise()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_model(family, root / family)
    return root


@pytest.fixture(scope="module")
def guides() -> Guides:
    bundle = make_bundle(tiny_model_dir())
    return Guides(bundle.tokenizer_json, bundle.vocab_size, bundle.eos_token_ids)


def test_the_ways_are_many_and_not_all_of_them() -> None:
    most = len(FAMILIES) * 4
    assert most <= len(WAYS) < 2 * most


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_are_transformers(way: Way, models: Path, guides: Guides) -> None:
    folder = models / way.family
    guide = asyncio.run(guides.make(GRAMMAR)) if way.guided else None
    expected = greedy(folder, ASKED, NEW, guide, EOS if way.guided else None)

    def worker() -> Worker:
        return Worker(
            way.drafts,
            guides,
            folder=folder,
            prompt=ASKED,
            chunk_tokens=way.chunk_tokens,
            blocks=SMALL_POOL if way.preempted else 64,
        )

    decode = worker()
    prefill = worker() if way.handed_over else decode
    if way.cached:
        prefill.write(Sampling(max_tokens=1))
    if way.preempted:
        # It comes earlier, and takes the room that it grows into from who came later.
        decode.add(Sampling(max_tokens=60), prompt=[*range(300, 330)])
    stop = (EOS,) if way.guided else ()
    asked = Sampling(NEW, grammar=GRAMMAR if way.guided else "", stop_token_ids=stop)
    found = handed_over(prefill, decode, asked) if way.handed_over else decode.write(asked)
    assert found == expected
    assert (prefill.last_cached_tokens > 0) == way.cached
    assert (decode.scheduler.preempted > 0) == way.preempted
