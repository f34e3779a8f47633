"""Covers pd_engine.sampling: draws depend on (seed, choice, index) and their own logits only,
follow the filtered distribution, respect bans; log-probabilities are the model's.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.sampling import draw, sample, uniform
from pd_engine.types import SampleSpec, Sampling

GOLDEN = ["0x1.ae0ca3ba3cb94p-3", "0x1.ebfd36a5ea0a3p-1", "0x1.d568adba574b6p-2"]

torch.set_num_threads(1)


def spec(index: int = 0, choice: int = 0, **options: Any) -> SampleSpec:
    return SampleSpec(choice, index, Sampling(max_tokens=99, **options))


def logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def drawn(row: torch.Tensor, count: int = 400, **options: Any) -> set[int]:
    return {draw(row, spec(i, seed=5, temperature=1.0, **options)) for i in range(count)}


def test_greedy_takes_the_best() -> None:
    rows = logits(5, 40)
    out = sample(rows, [spec() for _ in range(5)])
    assert [s.token for s in out] == rows.argmax(-1).tolist()
    assert all(s.logprob is None and s.top == () for s in out)
    assert sample(rows[:0], []) == []


def test_uniform_is_uniform_and_differs_by_each_argument() -> None:
    values = [uniform(1, 2, i) for i in range(4000)]
    assert all(0 <= v < 1 for v in values)
    assert len(set(values)) == len(values)
    counts = [sum(int(v * 10) == d for v in values) for d in range(10)]
    assert all(abs(c - 400) < 100 for c in counts)
    assert len({uniform(1, 2, 3), uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)}) == 4
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_uniform_is_the_same_in_every_process_and_release() -> None:
    values = [uniform(7, 1, 9), uniform(0, 0, 0), uniform(2**63, 3, 10_000)]
    assert [v.hex() for v in values] == GOLDEN


@given(rows=st.permutations(range(6)), size=st.integers(1, 6))
def test_a_draw_does_not_depend_on_the_batch(rows: list[int], size: int) -> None:
    everything = logits(6, 50)
    specs = [spec(i, i % 2, seed=3, temperature=0.8, top_p=0.9) for i in range(6)]
    alone = [sample(everything[i : i + 1], [specs[i]])[0].token for i in range(6)]
    some = rows[:size]
    together = sample(everything[some], [specs[i] for i in some])
    assert [s.token for s in together] == [alone[i] for i in some]


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    for temperature in (0.5, 1.0, 2.0):
        count = 4000
        tokens = [draw(row, spec(i, temperature=temperature, seed=11)) for i in range(count)]
        expected = torch.softmax(row.double() / temperature, 0).tolist()
        for token, share in enumerate(expected):
            error = 4 * math.sqrt(share * (1 - share) / count)
            assert abs(tokens.count(token) / count - share) <= error + 1e-12


def test_top_k() -> None:
    row = logits(1, 100)[0]
    assert drawn(row, top_k=3) <= set(row.topk(3).indices.tolist())
    assert drawn(row, top_k=1) == {int(row.argmax())}
    tied = torch.zeros(10)
    assert drawn(tied, top_k=4) == {0, 1, 2, 3}


@pytest.mark.parametrize("vocab", [30, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95])
def test_top_p_keeps_the_smallest_set_with_that_share(
    vocab: int, spread: float, top_p: float
) -> None:
    row = spread * logits(1, vocab)[0]
    weights, order = torch.softmax(row.double(), 0).sort(descending=True, stable=True)
    kept, share = set(), 0.0
    for weight, token in zip(weights.tolist(), order.tolist(), strict=True):
        kept.add(token)
        share += weight
        if share >= top_p:
            break
    tokens = drawn(row, top_p=top_p)
    assert tokens <= kept
    assert len(tokens) >= min(len(kept), 400) // 4


def test_top_p_counts_what_top_k_left() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # top-k leaves 0.4, 0.3: shares 0.57, 0.43; half is reached by the first
    assert drawn(row, top_k=2, top_p=0.5) == {0}
    assert drawn(row, top_k=2, top_p=0.6) == {0, 1}


def test_min_p() -> None:
    row = torch.tensor([0.5, 0.3, 0.14, 0.06]).log()
    assert drawn(row, min_p=0.2) == {0, 1, 2}
    assert drawn(row, min_p=0.5, top_p=0.99) == {0, 1}
    assert drawn(row, min_p=1.0) == {0}


def test_banned_tokens_are_not_drawn_until_min_tokens() -> None:
    rows = torch.zeros(1, 6)
    rows[0, 2] = 9.0
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {
            "temperature": temperature,
            "stop_token_ids": (2, 77),
            "min_tokens": 3,
        }
        early = {
            sample(rows, [spec(i, seed=s, **options)])[0].token for i in range(3) for s in (1, 2)
        }
        assert 2 not in early
        assert sample(rows, [spec(3, **options)])[0].token == 2


def test_logprobs_are_the_models_own() -> None:
    rows = logits(3, 60)
    expected = torch.log_softmax(rows, -1)
    specs = [
        spec(temperature=0.3, top_k=5, seed=1, logprobs=True, top_logprobs=4),
        spec(),
        spec(logprobs=True, stop_token_ids=(int(rows[2].argmax()),), min_tokens=2),
    ]
    out = sample(rows, specs)
    assert out[0].logprob == pytest.approx(float(expected[0, out[0].token]))
    values, ids = expected[0].topk(4)
    assert [i for i, _ in out[0].top] == ids.tolist()
    assert [v for _, v in out[0].top] == pytest.approx(values.tolist())
    assert out[1].logprob is None
    assert out[2].logprob == pytest.approx(float(expected[2, out[2].token]))
    assert out[2].top == ()


_seen = st.dictionaries(st.integers(0, 19), st.integers(0, 4), max_size=20)
_bias = st.dictionaries(st.integers(0, 19), st.floats(-100, 100, width=16), max_size=5)


@given(
    seen=_seen,
    bias=_bias,
    repetition=st.floats(0.25, 4, width=16),
    presence=st.floats(-2, 2, width=16),
    frequency=st.floats(-2, 2, width=16),
)
def test_logits_are_changed_by_the_formulas(
    seen: dict[int, int],
    bias: dict[int, float],
    repetition: float,
    presence: float,
    frequency: float,
) -> None:
    row = logits(1, 20, seed=len(seen))
    expected = [x + bias.get(token, 0.0) for token, x in enumerate(row[0].tolist())]
    for token, times in seen.items():
        x = expected[token]
        x = x * repetition if x < 0 else x / repetition
        expected[token] = x - frequency * times - (presence if times else 0)
    asked = Sampling(
        max_tokens=9,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias.items()),
    )
    (found,) = sample(row, [SampleSpec(0, 0, asked, seen)])
    assert expected[found.token] == pytest.approx(max(expected), abs=1e-4)
    hot = replace(asked, temperature=1.0, seed=3)
    changed = torch.tensor([expected])
    for index in range(20):
        (found,) = sample(row, [SampleSpec(0, index, hot, seen)])
        share = torch.softmax(changed.double(), -1)[0].cumsum(0)
        target = uniform(3, 0, index)
        assert share[found.token] >= target - 1e-5
        assert found.token == 0 or share[found.token - 1] <= target + 1e-5


def test_penalties_come_after_bias_and_before_bans() -> None:
    rows = torch.tensor([[1.0, 0.5, 0.0]])
    asked = Sampling(
        max_tokens=9,
        repetition_penalty=2.0,
        logit_bias=((0, -2.0), (1, -1.5)),  # then -1, -1, 0
        stop_token_ids=(2,),
        min_tokens=1,
        logprobs=True,
    )
    (found,) = sample(rows, [SampleSpec(0, 0, asked, {0: 0})])  # then -2, -1, banned
    assert found.token == 1
    assert found.logprob == pytest.approx(float(torch.log_softmax(rows, -1)[0, 1]))
    assert rows.tolist() == [[1.0, 0.5, 0.0]]


def test_reduced_precision_logits() -> None:
    rows = logits(2, 50).bfloat16()
    out = sample(rows, [spec(logprobs=True), spec(temperature=1.0, top_p=0.5, seed=2)])
    assert out[0].token == int(rows[0].argmax())
    assert out[0].logprob == pytest.approx(float(torch.log_softmax(rows[0].float(), -1).max()))
