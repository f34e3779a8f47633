"""Situations of which people ask whether to disaggregate: two in which it pays, four in which
it doesn't; and that each answer's key number is what a simulation gives.
"""

from dataclasses import replace
from typing import Any

import pytest

from pd_core.estimate import LINKS, link
from pd_core.known_models import KNOWN_MODELS
from pd_sim import perf
from pd_sim.advice import ATTAINMENT, Advice, Question, advise, made_up, split_plan, together_plan
from pd_sim.scalers import Fixed, Goal
from pd_sim.simulation import run
from pd_sim.trace import Trace

PERF = perf.from_data_sheet(KNOWN_MODELS["llama-3-8b"], perf.GPUS["h100"], 1)
FAST = LINKS["rdma-400g"]


def question(trace: Trace, workers: int = 8, tpot_s: float = 0.018, **fields: Any) -> Question:
    made: dict[str, Any] = {"link": FAST, "goal": Goal(2.0, tpot_s)}
    return Question(trace, PERF, workers=workers, **made | fields)


YES = {
    "wide spread of prompt lengths": question(
        made_up((100, 16_000), (150, 250), 16, 500), 16, tpot_s=0.0125
    ),
    "prefill-heavy": question(made_up((4000, 12_000), (40, 80), 12, 400), 16, tpot_s=0.0125),
}
SHORT = made_up((60, 200), (200, 400), 10, 400)
WIDE = made_up((100, 16_000), (150, 250), 2, 200)
NO = {
    "two or three GPUs": question(WIDE, workers=3),
    "all prompts short": question(SHORT, tpot_s=0.03),
    "a slow link between sites": question(
        made_up((4000, 12_000), (40, 80), 12, 400), 16, 0.0125, link=link("1Gbit/s")
    ),
    "little engineering capacity": question(SHORT, tpot_s=0.02, small_team=True),
}
_KEY = {
    "two or three GPUs": "too few workers",
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


@pytest.mark.slow
def test_a_counter_example_turns_the_answer() -> None:
    """The same requests over the slow link and over the fast one."""
    slow = NO["a slow link between sites"]
    assert advise(replace(slow, link=FAST)).answer == "yes"


def test_made_up_lengths_keep_their_bounds() -> None:
    made = made_up((100, 200), (5, 5), 2.0, 300)
    assert all(100 <= one.prompt_tokens <= 200 for one in made.requests)
    assert {one.output_tokens for one in made.requests} == {5}
    assert made.seconds == pytest.approx(150, rel=0.2)
