"""A draft model with the real scheduler and runner. It guesses well or badly; tokens,
log-probabilities and ends are those of a worker without one, and it is only computed where it
pays."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_engine.checkpoint import ModelError
from pd_engine.draft import check_draft
from pd_engine.runner import Runner
from pd_engine.speculate import ModelGuesses
from pd_engine.types import Sampling
from tests.pd_engine.worker_rig import PROMPT, Worker, handed_over, write_the_same
from tests.tiny_model import tiny_model_dir

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

OUTPUT = 60
LONG = [(7 * i * i + 3 * i) % 480 + 5 for i in range(300)]
CASES: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.0, "top_k": 20, "seed": 5, "frequency_penalty": 0.5},
    {"min_tokens": 20, "stop_token_ids": (9, 5), "repetition_penalty": 0.6},
]


def itself() -> Path:
    """As a draft model it is always right, where drawing is greedy."""
    return tiny_model_dir()


def another() -> Path:
    """As good as never right."""
    return tiny_model_dir(seed=1, layers=1)


@pytest.fixture(scope="module")
def plain() -> Worker:
    return Worker()


@pytest.fixture(scope="module", params=[itself, another])
def drafting(request: pytest.FixtureRequest) -> Worker:
    return Worker(draft_tokens=5, draft_model=request.param())


@pytest.mark.parametrize("asked", CASES)
def test_a_draft_model_changes_nothing_of_an_answer(
    plain: Worker, drafting: Worker, asked: dict[str, Any]
) -> None:
    before = drafting.drafted
    write_the_same(plain, drafting, Sampling(max_tokens=OUTPUT, **asked))
    assert drafting.drafted > before


def test_among_neighbours_and_for_several_choices(plain: Worker, drafting: Worker) -> None:
    found = []
    for worker in (plain, drafting):
        keys = [worker.add(Sampling(max_tokens=OUTPUT, **asked)) for asked in CASES]
        several = worker.add(Sampling(max_tokens=OUTPUT, **CASES[1]), choices=(0, 1, 2))
        worker.run()
        found.append(
            [worker.tokens(key) for key in keys]
            + [worker.tokens(several, choice) for choice in (0, 1, 2)]
        )
    assert found[0] == found[1]


def test_good_guesses_make_few_steps_and_bad_ones_are_given_up() -> None:
    counts = {}
    for model in (itself, another):
        worker = Worker(draft_tokens=5, draft_model=model(), making=0.2)
        worker.write(Sampling(max_tokens=120))
        counts[model] = (worker.steps, worker.drafted, worker.guessed)
    steps, drafted, guessed = counts[itself]
    assert steps < 40
    assert guessed > 0.9 * drafted
    steps, drafted, guessed = counts[another]
    assert drafted < 60


def test_handed_over_it_computes_the_prompt_itself() -> None:
    """A part a step: it is never the step that a long prompt makes long."""
    sampling = Sampling(max_tokens=OUTPUT)
    whole = Worker(prompt=LONG).write(sampling)
    decode = Worker(prompt=LONG, draft_tokens=5, draft_model=itself())
    draft = decode.runner.draft
    assert draft is not None
    draft._catch_up_tokens = 64
    sizes: list[int] = []
    forward = draft._model.forward

    def seen(rows: Any, keep: Any) -> torch.Tensor:
        sizes.append(sum(len(row.token_ids) for row in rows))
        return forward(rows, keep)

    draft._model.forward = seen
    assert handed_over(Worker(prompt=LONG), decode, sampling) == whole
    assert sizes[:4] == [64] * 4
    assert max(sizes) <= 64
    assert decode.guessed > 30


def test_preempted_and_computed_again() -> None:
    """Blocks that it comes back to are others, or others wrote there."""
    found = []
    for model in (None, itself()):
        worker = Worker(draft_tokens=5 if model else 0, blocks=12, draft_model=model)
        prompts = [[token + n for token in PROMPT] for n in range(4)]
        keys = [worker.add(Sampling(max_tokens=70), prompt=prompt) for prompt in prompts]
        worker.run()
        found.append([worker.tokens(key) for key in keys])
        assert worker.scheduler.preempted
    assert found[0] == found[1]
    assert worker.guessed > 0.7 * worker.drafted > 0


def test_it_ends_where_its_context_does(tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(tiny_model_dir(), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    worker = Worker(draft_tokens=5, draft_model=short)
    assert worker.write(Sampling(max_tokens=OUTPUT)) == Worker().write(Sampling(max_tokens=OUTPUT))
    assert 0 < worker.guessed < 30


def test_another_tokenizer_is_refused_with_both_named(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir(), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[100:102]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"other: its tokenizer is not that of .*tiny.* family"):
        Runner(tiny_model_dir(), kv_cache_tokens=64, draft_model_dir=other)
    check_draft(tiny_model_dir(), tiny_model_dir(seed=1))


def test_its_cache_is_part_of_the_share() -> None:
    alone = Runner(tiny_model_dir(), kv_cache_fraction=0.001)
    both = Runner(tiny_model_dir(), kv_cache_fraction=0.001, draft_model_dir=itself())
    assert both.num_blocks == pytest.approx(alone.num_blocks / 2, rel=0.2)


def test_what_it_costs_is_measured_at_the_start() -> None:
    runner = Runner(tiny_model_dir(), kv_cache_tokens=2048, draft_model_dir=another())
    runner.warmup()
    assert runner.draft is not None
    assert 0.01 <= runner.draft.price < 5
    assert 16 <= runner.draft._catch_up_tokens <= 512


# ---- when it is asked ---------------------------------------------------------------


def told(guesses: ModelGuesses, tokens: list[int], offered: list[int], came: list[int]) -> None:
    guesses.offer(offered)
    for token in came:
        tokens.append(token)
        guesses.note()


def test_it_is_asked_for_more_the_more_often_it_is_right() -> None:
    tokens = [1, 2, 3]
    guesses = ModelGuesses(tokens, making=0.2)
    first = guesses.wants(16, 1, 0.05)
    for start in range(100, 400, 6):
        six = list(range(start, start + 6))
        told(guesses, tokens, six, six)
    assert 0 < first < guesses.wants(16, 1, 0.05)


def test_where_it_is_wrong_it_is_hardly_asked_and_again_once_it_is_right() -> None:
    tokens = [1, 2, 3]
    guesses = ModelGuesses(tokens, making=0.3)
    asked = 0
    for start in range(1000, 1200):
        count = guesses.wants(8, 1, 0.05)
        asked += count
        told(guesses, tokens, [0] * count, [start])
    assert asked < 25
    for start in range(2000, 2400):
        count = guesses.wants(8, 1, 0.05)
        told(guesses, tokens, [start] * count, [start])
    assert guesses.wants(8, 1, 0.05) > 0


def test_a_dear_model_is_not_asked() -> None:
    assert ModelGuesses([1, 2, 3], making=2.0).wants(8, 1, 0.05) == 0


def test_beside_many_sequences_it_is_asked_for_less() -> None:
    """Their tokens come cheaper than guesses."""
    guesses = ModelGuesses([1, 2, 3], making=0.05)
    assert guesses.wants(8, 1, 0.05) > guesses.wants(8, 64, 0.05)


def test_text_that_is_a_copy_needs_no_model() -> None:
    tokens = [*range(20, 60), 20, 21]
    guesses = ModelGuesses(tokens, making=0.01)
    assert guesses.wants(8, 1, 0.05) > 0
    for token in range(22, 28):
        told(guesses, tokens, [], [token])
    assert guesses.wants(8, 1, 0.05) == 0
    assert guesses.draft(4, 1, 0.05) == [28, 29, 30, 31]


def test_guesses_that_were_not_tried_are_held_against_what_came() -> None:
    tokens = [1, 2, 3]
    guesses = ModelGuesses(tokens, making=0.01)
    told(guesses, tokens, [10, 11, 12, 13], [10, 11])
    assert guesses.draft(8, 1, 0.01) == [12, 13]
    told(guesses, tokens, [12, 13], [99])
    assert guesses.draft(8, 1, 0.01) == []
