"""Guesses with the real scheduler and runner: the tokens, log-probabilities and finishes are those
of a worker that doesn't guess: greedy, sampled, penalized, several choices, handed over.
"""

from typing import Any

import pytest
import torch

from pd_engine.types import Finish, Sampling
from tests.pd_engine.worker_rig import PROMPT, Worker, handed_over, write_the_same

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

OUTPUT = 60
# So random a model says nothing twice: what stands there already is made likely.
REPEATS: dict[str, Any] = {"repetition_penalty": 0.4, "logprobs": True, "top_logprobs": 2}
CASES: list[dict[str, Any]] = [
    REPEATS,
    {**REPEATS, "temperature": 0.7, "seed": 4},
    {**REPEATS, "temperature": 1.0, "top_k": 20, "seed": 5, "frequency_penalty": -0.5},
    {**REPEATS, "min_tokens": 20, "stop_token_ids": (9, 5)},
    {**REPEATS, "stop_token_ids": (140,)},
]


@pytest.fixture(scope="module")
def plain() -> Worker:
    return Worker()


@pytest.fixture(scope="module")
def guessing() -> Worker:
    return Worker(draft_tokens=5)


@pytest.mark.parametrize("asked", CASES)
def test_guesses_change_nothing_of_an_answer(
    plain: Worker, guessing: Worker, asked: dict[str, Any]
) -> None:
    before = guessing.drafted
    written = write_the_same(plain, guessing, Sampling(max_tokens=OUTPUT, **asked))
    assert guessing.drafted > before or written[-1].finish is Finish.STOP
    assert plain.drafted == 0


def test_guesses_turn_out_right(guessing: Worker) -> None:
    before = guessing.guessed
    guessing.write(Sampling(max_tokens=OUTPUT, **REPEATS))
    assert guessing.guessed - before > OUTPUT // 6


def test_among_neighbours_and_for_several_choices(plain: Worker, guessing: Worker) -> None:
    found = []
    for worker in (plain, guessing):
        keys = [worker.add(Sampling(max_tokens=OUTPUT, **asked)) for asked in CASES]
        sampled = Sampling(max_tokens=OUTPUT, **CASES[1])
        several = worker.add(sampled, choices=(0, 1, 2))
        worker.run()
        found.append(
            [worker.tokens(key) for key in keys]
            + [worker.tokens(several, choice) for choice in (0, 1, 2)]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("written", [0, 7])
def test_handed_over_and_resumed(plain: Worker, written: int) -> None:
    sampling = Sampling(max_tokens=OUTPUT, **CASES[1])
    whole = plain.write(sampling)
    decode = Worker(draft_tokens=5)
    assert handed_over(Worker(), decode, sampling, whole[:written]) == whole[written:]
    assert decode.guessed > 0


def test_what_guesses_left_in_the_cache_is_right(plain: Worker, guessing: Worker) -> None:
    """Wrong guesses' KV lies behind the text until it is written over."""
    sampling = Sampling(max_tokens=OUTPUT, **CASES[1])
    whole = guessing.write(sampling)
    assert guessing.write(sampling, whole[:50]) == whole[50:]
    longer = Sampling(max_tokens=90, **REPEATS)
    assert guessing.write(longer, whole[:48]) == plain.write(longer, whole[:48])
    assert len(PROMPT) + 48 > 3 * 16, "more than one block is found"
