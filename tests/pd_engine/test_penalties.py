"""Penalties and biases from request to token, with the real scheduler and the real runner:
against transformers and plain formulas; the same on two workers, resumed, and in any batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pd_engine.types import Sampling
from tests.pd_engine.worker_rig import PROMPT, Worker, handed_over
from tests.tiny_model import tiny_model_dir

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

OUTPUT = 24
ASKED: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "presence_penalty": 3.0,
    "frequency_penalty": 2.0,
    "logit_bias": ((9, 9.0), (12, -100.0), (300, 12.5)),
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 12, **ASKED}


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker()


Logits = Callable[[Sequence[int]], list[float]]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir(), dtype=torch.float32)


def sampling(**options: Any) -> Sampling:
    return Sampling(max_tokens=OUTPUT, **options)


@pytest.mark.parametrize("penalty", [0.75, 1.25, 2.5])
def test_repetition_is_that_of_transformers(worker: Worker, model: Any, penalty: float) -> None:
    out = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=OUTPUT,
        do_sample=False,
        repetition_penalty=penalty,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = out[0, len(PROMPT) :].tolist()
    assert worker.write(sampling(repetition_penalty=penalty)) == expected
    assert worker.write(sampling()) != expected


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 9.0},
        {"frequency_penalty": 6.0},
        {"frequency_penalty": -9.0},
        {"logit_bias": ((3, 12.0), (9, 15.0), (480, -30.0))},
        ASKED,
    ],
)
def test_greedy_follows_the_formulas(worker: Worker, model: Any, asked: dict[str, Any]) -> None:
    wanted = sampling(**asked)
    written: list[int] = []
    for _ in range(OUTPUT):
        with torch.inference_mode():
            values = model(torch.tensor([[*PROMPT, *written]])).logits[0, -1].tolist()
        for token, bias in wanted.logit_bias:
            values[token] += bias
        for token in {*PROMPT, *written}:
            positive = values[token] > 0
            values[token] *= wanted.repetition_penalty ** (-1 if positive else 1)
        for token in set(written):
            values[token] -= wanted.presence_penalty
            values[token] -= wanted.frequency_penalty * written.count(token)
        written.append(max(range(len(values)), key=values.__getitem__))
    assert worker.write(wanted) == written
    assert worker.write(sampling()) != written


@pytest.mark.parametrize("written", [1, 2, 11, OUTPUT - 1])
@pytest.mark.parametrize("asked", [ASKED, SAMPLED])
def test_a_resumed_request_goes_on_as_it_would_have(
    worker: Worker, asked: dict[str, Any], written: int
) -> None:
    whole = worker.write(sampling(**asked))
    assert len(whole) == OUTPUT
    assert worker.write(sampling(**asked), whole[:written]) == whole[written:]


@pytest.mark.parametrize("asked", [ASKED, SAMPLED])
@pytest.mark.parametrize("written", [0, 3])
def test_two_workers_write_what_one_does(
    worker: Worker, asked: dict[str, Any], written: int
) -> None:
    """The prefill worker draws the first token, the decode worker all others."""
    whole = worker.write(sampling(**asked))
    prefill, decode = Worker(), Worker()
    assert handed_over(prefill, decode, sampling(**asked), whole[:written]) == whole[written:]


def test_neighbours_and_other_choices_change_nothing(worker: Worker) -> None:
    alone = worker.write(sampling(**SAMPLED))
    neighbours = [
        worker.add(sampling(temperature=1.0, seed=1)),
        worker.add(sampling(**{**SAMPLED, "seed": 5})),
    ]
    again = worker.add(sampling(**SAMPLED))
    several = worker.add(sampling(**SAMPLED), choices=(0, 1, 2))
    worker.run()
    assert worker.tokens(again) == alone
    assert worker.tokens(several, choice=0) == alone
    others = [worker.tokens(several, choice=c) for c in (1, 2)]
    others += [worker.tokens(key) for key in neighbours]
    assert all(len(tokens) == OUTPUT for tokens in others)
    assert alone not in others
