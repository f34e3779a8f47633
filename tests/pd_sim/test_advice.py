"""Situations of which people ask whether to disaggregate: five in which it pays, four in which
it doesn't, and the same with one thing changed; each answer's key number is what a simulation
of its own gives.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_core.estimate import LINKS, link
from pd_core.gpus import GPUS
from pd_core.known_models import KNOWN_MODELS
from pd_sim import perf
from pd_sim.advice import (
    ATTAINMENT,
    Advice,
    Bursts,
    Question,
    advise,
    made_up,
    split_plan,
    together_plan,
)
from pd_sim.scalers import Fixed, Goal
from pd_sim.simulation import run
from pd_sim.trace import Trace, read

PERF = perf.from_data_sheet(KNOWN_MODELS["llama-3-8b"], GPUS["h100"], 1)
FAST = LINKS["rdma-400g"]


def question(trace: Trace, workers: int = 8, tpot_s: float = 0.018, **fields: Any) -> Question:
    made: dict[str, Any] = {"link": FAST, "goal": Goal(2.0, tpot_s)}
    return Question(trace, PERF, workers=workers, **made | fields)


RAG = made_up((4000, 12_000), (40, 80), 12, 400)
CHAT = made_up((500, 4000), (150, 250), 16, 400)
MANY_CHATS = made_up((500, 4000), (150, 250), 32, 300)
BURSTS = Bursts(12, (12_000, 24_000), 15.0)
QUIET = ((200, 800), (150, 250), 8, 300)
YES = {
    "wide spread of prompt lengths": question(
        made_up((100, 16_000), (150, 250), 16, 500), 16, tpot_s=0.0125
    ),
    "strict TPOT": question(CHAT, 16, tpot_s=0.0125),
    "prefill-heavy": question(RAG, 16, tpot_s=0.0125),
    "bursts of long prompts": question(made_up(*QUIET, BURSTS), 8, goal=Goal(5.0, 0.016)),
    "many GPUs": question(made_up((1000, 8000), (100, 300), 40, 300), 32, tpot_s=0.015),
}
SHORT = made_up((60, 200), (200, 400), 10, 400)
WIDE = made_up((100, 16_000), (150, 250), 4, 200)
NO = {
    "two or three GPUs": question(WIDE, workers=3),
    "all prompts short": question(SHORT, tpot_s=0.03),
    "a slow link between sites": question(RAG, 16, 0.0125, link=link("1Gbit/s")),
    "little engineering capacity": question(MANY_CHATS, 16, 0.014, small_team=True),
}
_KEY = {
    "two or three GPUs": "too few workers",
    "little engineering capacity": "not with a small team",
    "strict TPOT": "costs less",
    "all prompts short": "prompts are all short",
    "a slow link between sites": "the link is too slow",
    "prefill-heavy": "prefill-heavy",
    "wide spread of prompt lengths": "prompts differ widely",
}


def check(asked: Question, made: Advice) -> None:
    """The key numbers again, by simulations of their own."""
    apart, chunks, _ = made.ways
    for way in (apart, chunks):
        if way.needs is None:
            continue
        if way is apart:
            prefill, decode = map(int, way.setting.split(":"))
            plan = split_plan(asked, prefill, decode)
        else:
            plan = together_plan(asked, way.needs, int(way.setting.rpartition(" ")[2]))
        assert run(plan, asked.trace, Fixed()).attainment >= ATTAINMENT


@pytest.mark.slow
@pytest.mark.parametrize("name", YES)
def test_it_pays(name: str) -> None:
    made = advise(YES[name])
    assert made.answer == "yes", made.reasons
    assert any(_KEY.get(name, "costs less") in reason for reason in made.reasons)
    check(YES[name], made)


@pytest.mark.slow
@pytest.mark.parametrize("name", NO)
def test_it_does_not_pay(name: str) -> None:
    made = advise(NO[name])
    assert made.answer != "yes", made.reasons
    assert any(_KEY.get(name, "") in reason for reason in made.reasons)
    check(NO[name], made)


COUNTER = {
    "the same over a fast link": (replace(NO["a slow link between sites"], link=FAST), True),
    "with people to look after it": (
        replace(NO["little engineering capacity"], small_team=False), True,
    ),
    "time for each token": (question(CHAT, 16, tpot_s=0.05), False),
    "short prompts for short answers": (
        replace(YES["prefill-heavy"], trace=made_up((400, 1200), (40, 80), 12, 400)), False,
    ),
    "prompts alike and short": (
        replace(
            YES["wide spread of prompt lengths"], trace=made_up((60, 120), (150, 250), 16, 500)
        ),
        False,
    ),
    "few GPUs": (replace(YES["many GPUs"], workers=3), False),
    "more GPUs and strict TPOT": (question(WIDE, workers=8, tpot_s=0.0125), True),
    "long prompts and strict TPOT": (
        question(made_up((60, 12_000), (200, 400), 10, 400), 16, tpot_s=0.0125), True,
    ),
    "no bursts": (question(made_up(*QUIET), 8, goal=Goal(5.0, 0.016)), False),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTER)
def test_a_counter_example_turns_the_answer(name: str) -> None:
    """One thing about a situation is another, and so is the answer."""
    asked, pays = COUNTER[name]
    made = advise(asked)
    assert (made.answer == "yes") is pays, made.reasons
    check(asked, made)


@pytest.mark.slow
def test_with_three_workers_a_failure_hurts_more_apart() -> None:
    """One of the pool that suffers more is gone for two minutes."""
    apart, together = advise(NO["two or three GPUs"]).failure_attainment
    assert apart < together - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("file", ["azure_excerpt.csv", "mooncake_excerpt.jsonl"])
def test_published_traces_get_an_answer_that_simulations_bear_out(file: str) -> None:
    lines = (Path(__file__).parent / "data" / file).read_text().splitlines()
    asked = question(read(lines), 8, goal=Goal(30.0, 0.05))
    made = advise(asked)
    assert made.reasons
    check(asked, made)
    needs = {way.name: way.needs for way in made.ways}
    fewer = (needs["apart"] or 99) < min(needs["chunks"] or 99, needs["whole"] or 99)
    assert (made.answer == "yes") is fewer


def test_made_up_lengths_keep_their_bounds() -> None:
    made = made_up((100, 200), (5, 5), 2.0, 300)
    assert all(100 <= one.prompt_tokens <= 200 for one in made.requests)
    assert {one.output_tokens for one in made.requests} == {5}
    assert made.seconds == pytest.approx(150, rel=0.2)
