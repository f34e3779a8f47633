"""The scheduler with guesses: which tokens a step tries, that only right ones count, and that
they get neither tokens nor blocks which somebody needs."""

from collections import Counter
from typing import Any

import pytest
import torch

from pd_engine.blocks import BlockPool
from pd_engine.sampling import sample
from pd_engine.scheduler import Scheduler
from pd_engine.speculate import Drafter
from pd_engine.types import (
    Batch,
    Finish,
    Mode,
    Prefilled,
    Request,
    Sampled,
    Sampling,
    StepOutput,
    Tokens,
)
from tests.pd_engine.scheduler_cases import add, begin, config, prompt, step_rows, world
from tests.pd_engine.scheduler_world import Client, World


def drafting(**changes: Any) -> World:
    return world(**{"draft_tokens": 4, **changes})


def steps_until_over(w: World, client: Client) -> int:
    before = w.steps
    while not client.over:
        assert w.step()
    return w.steps - before


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.IMPORT])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 40])
def test_the_same_tokens_in_fewer_steps(mode: Mode, max_tokens: int) -> None:
    w = drafting()
    client = add(w, prompt(9), mode=mode, max_tokens=max_tokens)
    w.finish()
    assert client.finish == {0: Finish.LENGTH}
    assert client.indices[0] == max_tokens - 1
    if max_tokens == 40:
        assert w.steps < 25


def test_guesses_stand_behind_the_known_token() -> None:
    w = drafting()
    client = add(w, prompt(9), max_tokens=20, resumed=2)
    step_rows(w)
    batch = begin(w)
    (row,) = batch.rows
    assert row.drafts == 4
    assert row.decodes
    assert row.start == 11
    assert row.token_ids[0] == client.refs[0][11]
    assert [spec.index for spec in row.samples] == [3, 4, 5, 6, 7]
    w.end_step()
    w.finish()


def test_a_guess_is_not_made_beyond_the_last_token() -> None:
    w = drafting()
    client = add(w, prompt(9), max_tokens=4)
    step_rows(w)
    (row,) = begin(w).rows  # token 1 is due, 2 and 3 may be guessed, then it ends
    assert row.drafts == 2
    w.end_step()
    w.finish()
    assert client.failure is None


def test_a_stop_among_the_guesses_ends_it_there() -> None:
    for wanted in range(1, 8):
        w = drafting()
        reference = Client(add(w, prompt(7)).req, 1000)
        stop = reference.expected(0, wanted).token
        first = next(i for i in range(9) if reference.expected(0, i).token == stop)
        client = add(w, prompt(7), max_tokens=30, stop=(stop,))
        w.finish()
        assert client.finish == {0: Finish.STOP}
        assert client.indices[0] == first


def test_guesses_take_half_of_what_the_budget_leaves() -> None:
    w = drafting(max_batch_tokens=15)
    for i in range(3):
        add(w, prompt(4, 1 + i), max_tokens=30)
    step_rows(w)
    assert [row.drafts for row in begin(w).rows] == [4, 2, 0]
    w.end_step()
    w.finish()


def test_guesses_never_keep_a_prompt_out() -> None:
    w = drafting(max_batch_tokens=4, max_running=4)
    add(w, prompt(4), max_tokens=200)
    for _ in range(5):
        step_rows(w)
    late = add(w, prompt(10, 2), max_tokens=1)
    for _ in range(6):
        step_rows(w)
    assert late.over
    w.finish()


def test_a_prompt_gets_what_guesses_leave() -> None:
    w = drafting(max_batch_tokens=16)
    add(w, prompt(4), max_tokens=30)
    step_rows(w)
    add(w, prompt(30, 2))
    assert step_rows(w) == [(0, 4, 5), (1, 0, 11)]
    w.finish()


def test_guesses_preempt_nobody() -> None:
    w = drafting(blocks=6, max_model_tokens=100)
    clients = [add(w, prompt(7, 1 + i), max_tokens=6) for i in range(2)]
    while any(client.first is None for client in clients):
        assert w.step()
    taken = [list(seq.table) for seq in w.scheduler._held.running]
    assert all(len(table) >= 2 for table in taken)
    w.finish()
    assert all(client.failure is None for client in clients)


@pytest.mark.parametrize("draft_tokens", [0, 8])
def test_a_grant_covers_the_guesses(draft_tokens: int) -> None:
    w = world(draft_tokens=draft_tokens, decode_reserve_tokens=8)
    client = add(w, prompt(16), mode=Mode.IMPORT, max_tokens=100)
    w.poll()
    assert client.grant is not None
    assert w.pool.counts().granted == 4 + (8 + draft_tokens) // 4
    w.attach(client)
    w.finish()


def test_choices_guess_each_for_itself() -> None:
    w = drafting()
    client = add(w, prompt(7), choices=(0, 1, 2), max_tokens=25)
    w.finish()
    assert client.indices == {0: 24, 1: 24, 2: 24}


def test_right_guesses_are_counted() -> None:
    w = drafting()
    client = add(w, prompt(9), max_tokens=30)
    step_rows(w)
    guessed = came = steps = 0
    while not client.over:
        batch = begin(w)
        output = w._compute(batch)
        events = w.scheduler.absorb(batch, output, w.now)
        w.batch = w.output = None
        w.see(events)
        for event in events:
            if isinstance(event, Tokens):
                guessed, came, steps = guessed + event.guessed, came + len(event.tokens), steps + 1
    assert came == 29
    assert guessed == came - steps > 5


def test_without_drafts_nobody_guesses() -> None:
    w = world()
    add(w, prompt(9), max_tokens=20)
    step_rows(w)
    assert step_rows(w) == [(0, 9, 1)]
    w.finish()


def test_a_guess_costs_more_behind_a_long_context() -> None:
    """Attention over all of it is computed for each guess."""
    seen: list[tuple[int, float]] = []

    class Priced(Drafter):
        def __init__(self, tokens: list[int]) -> None:
            self._tokens = tokens

        def note(self) -> None:
            pass

        def draft(self, _most: int, _sequences: int, price: float) -> list[int]:
            seen.append((len(self._tokens), price))
            return []

    priced = config(draft_tokens=3, draft_price=0.25, draft_price_per_token=0.01)
    scheduler = Scheduler(priced, BlockPool(50, 4), Priced)
    for number, length in enumerate((10, 60)):
        request = Request(
            (0, number), "r", 1, (1,) * length, length, (0,), Sampling(3), Mode.LOCAL, 1e9, 1e9
        )
        scheduler.add(request, 0.0)
    table = _Table(torch.zeros(_VOCAB, _VOCAB))
    while (batch := scheduler.schedule(0.0)) is not None:
        scheduler.absorb(batch, table.step(batch), 0.0)
    assert {length for length, _ in seen} == {11, 12, 61, 62}
    assert all(price == pytest.approx(0.25 + 0.01 * length) for length, price in seen)


# ---- the distribution --------------------------------------------------------------

_VOCAB = 5


class _Always(Drafter):
    """Guesses the same tokens, whatever comes."""

    def __init__(self, _tokens: list[int]) -> None:
        pass

    def note(self) -> None:
        pass

    def draft(self, most: int, _sequences: int, _price: float) -> list[int]:
        return [2, 0, 3][:most]


def _write(logits: torch.Tensor, seed: int, drafts: int) -> tuple[int, ...]:
    """Four tokens of a model that looks at the last token alone."""
    scheduler = Scheduler(config(draft_tokens=drafts), BlockPool(10, 4), _Always)
    sampling = Sampling(max_tokens=4, temperature=0.9, seed=seed)
    scheduler.add(Request((0, 0), "r", 1, (1,), 1, (0,), sampling, Mode.LOCAL, 1e9, 1e9), 0.0)
    out: list[int] = []
    while (batch := scheduler.schedule(0.0)) is not None:
        for event in scheduler.absorb(batch, _Table(logits).step(batch), 0.0):
            if isinstance(event, Prefilled):
                out += [token.token for token in event.first]
            elif isinstance(event, Tokens):
                out += [token.token for token in event.tokens]
    return tuple(out)


class _Table:
    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def step(self, batch: Batch) -> StepOutput:
        samples: dict[int, tuple[Sampled, ...]] = {}
        for row in batch.rows:
            behind = list(row.token_ids)[len(row.token_ids) - 1 - row.drafts :]
            samples[row.seq_id] = tuple(sample(self._logits[behind], row.samples))
        return StepOutput(samples)


@pytest.mark.slow
def test_guessing_changes_neither_a_seeds_tokens_nor_their_distribution() -> None:
    """Chi-squared over the four tokens' joint distribution, guesses tried at each of them."""
    logits = 1.2 * torch.randn(_VOCAB, _VOCAB, generator=torch.Generator().manual_seed(5))
    rates = torch.softmax(logits.double() / 0.9, -1)
    count = 3000
    found = Counter(_write(logits, seed, drafts=3) for seed in range(count))
    assert all(
        _write(logits, seed, drafts=3) == _write(logits, seed, drafts=0) for seed in range(200)
    )
    total, cells, rest_expected, rest_found = 0.0, 0, 0.0, 0
    for a in range(_VOCAB):
        for b in range(_VOCAB):
            for c in range(_VOCAB):
                for d in range(_VOCAB):
                    share = rates[1, a] * rates[a, b] * rates[b, c] * rates[c, d]
                    expected = count * float(share)
                    if expected < 5:
                        rest_expected += expected
                        rest_found += found[a, b, c, d]
                        continue
                    total += (found[a, b, c, d] - expected) ** 2 / expected
                    cells += 1
    total += (rest_found - rest_expected) ** 2 / rest_expected
    # Cells are cells + 1 with the rest, so that is the degrees of freedom: beyond mean
    # and five deviations it would be no chance.
    assert total < cells + 5 * (2 * cells) ** 0.5
