"""Covers scaling.queueing, capacity and learning: waits against known values, what is learned
from workers, from which it isn't, and how it fades."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.sketch import quantile
from pd_operator.api import Role
from pd_operator.scaling.capacity import HALF_LIFE_S, PromptCost, Speed, StepLine
from pd_operator.scaling.learning import learn
from pd_operator.scaling.queueing import chance_to_wait, waiting
from pd_operator.scaling.sizing import Learned
from pd_operator.scaling.types import PoolSignals, PromptSums, Work
from tests.pd_operator.scaling.world import (
    BASE_S,
    POLL_S,
    SLOPE_S,
    decode,
    known,
    observations,
    prefill,
    sketch,
    steps,
)


@pytest.mark.parametrize(
    ("workers", "load", "expected"),
    [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (3, 2.0, 0.4444), (10, 7.0, 0.2217), (5, 5.0, 1.0)],
)
def test_erlangs_c(workers: int, load: float, expected: float) -> None:
    assert chance_to_wait(workers, load) == pytest.approx(expected, abs=1e-3)


def test_the_wait_of_one_server_with_exponential_service_is_exact() -> None:
    """M/M/1: P(W > t) = load x exp(-(1 - load) t / service)."""
    found = waiting(1, 0.8, 2.0, 1.0)
    for seconds in (0.0, 1.0, 20.0):
        assert found.longer_than(seconds) == pytest.approx(0.8 * math.exp(-0.2 * seconds / 2.0))


def test_waits_at_the_ends() -> None:
    assert waiting(4, 4.0, 1.0, 1.0).longer_than(1e9) == 1.0
    assert waiting(3, 0.0, 1.0, 1.0).longer_than(0.1) == 0.0
    assert waiting(3, 1.0, 1.0, 1.0).longer_than(-0.1) == 1.0
    assert waiting(3, 1.0, 0.0, 0.0).longer_than(0.1) == 0.0


@given(
    st.integers(1, 200), st.floats(0, 150), st.floats(0.001, 10), st.floats(0, 20),
    st.floats(0, 100), st.floats(1, 3),
)  # fmt: skip
def test_more_workers_wait_less_and_more_load_more(
    workers: int, load: float, service_s: float, variation: float, seconds: float, more: float
) -> None:
    here = waiting(workers, load, service_s, variation).longer_than(seconds)
    assert waiting(workers + 1, load, service_s, variation).longer_than(seconds) <= here
    assert waiting(workers, load * more, service_s, variation).longer_than(seconds) >= here - 1e-9


def did(tokens_per_s: float, busy_s: float = POLL_S, warm: bool = True) -> Work:
    return Work("w", 10, busy_s, tokens_per_s * busy_s, warm)


def test_speed_is_tokens_by_busy_time() -> None:
    speed = Speed().learn([did(100, 1), did(200, 3)], 0)
    assert speed.tokens_per_s == pytest.approx(175)
    assert Speed().tokens_per_s is None


def test_cold_workers_teach_nothing_and_outliers_little() -> None:
    speed = Speed().learn([did(100)] * 20, 0)
    assert speed.learn([did(1, warm=False)], 0) == speed
    moved = speed.learn([did(1e9)], 0).tokens_per_s
    assert moved is not None
    assert moved < 120


def test_a_pool_that_changed_is_learned_anew() -> None:
    speed = Speed().learn([did(100)] * 100, 0)
    for _ in range(100):
        speed = speed.learn([did(300)], HALF_LIFE_S / 20)
    assert speed.tokens_per_s == pytest.approx(300, rel=0.1)


def test_the_line_is_found_from_batches_that_vary() -> None:
    line = StepLine().learn([steps(batch) for batch in (1, 8, 20, 40)] * 5, 0)
    fit = line.fit()
    assert fit is not None
    assert fit[0] == pytest.approx(BASE_S, rel=0.05)
    assert fit[1] == pytest.approx(SLOPE_S, rel=0.05)
    assert line.largest_batch(0.03) == pytest.approx(40, rel=0.05)


def test_batches_that_were_all_alike_leave_the_prior() -> None:
    line = StepLine().learn([steps(1)] * 50, 0)
    assert line.step_s(1) == pytest.approx(BASE_S + SLOPE_S)
    assert line.largest_batch(2 * (BASE_S + SLOPE_S)) == pytest.approx(21, rel=0.01)


@pytest.mark.parametrize(
    ("batches", "known"),
    [((), False), ((12, 12, 12), False), ((1, 1), True), ((10, 12, 11), False), ((4, 8, 12), True)],
)
def test_a_lone_sequences_step_is_known_or_guessed(batches: tuple[float, ...], known: bool) -> None:
    assert StepLine().learn([steps(batch) for batch in batches], 0.0).knows_lone is known


def test_nothing_seen_no_line() -> None:
    assert StepLine().fit() is None
    assert StepLine().step_s(4) is None
    assert StepLine().largest_batch(1) == 0


@given(st.lists(st.tuples(st.floats(0.1, 1000), st.floats(0.001, 10)), min_size=1, max_size=30))
def test_whatever_is_seen_the_line_never_falls(points: list[tuple[float, float]]) -> None:
    works = [Work("w", 10, step_s * 10, batch * 10, True) for batch, step_s in points]
    line = StepLine().learn(works, 0)
    fit = line.fit()
    assert fit is not None
    assert fit[0] >= -1e-9
    assert fit[1] >= 0


def test_a_quiet_minute_teaches_nothing_and_forgets_nothing() -> None:
    before = known()
    quiet = PoolSignals(workers=2)
    after = learn(before, decode(), observations(0, 0), quiet, POLL_S)
    assert after.line.fit() == pytest.approx(before.line.fit())
    assert (after.output_tokens, after.kv_each, after.spread) == (
        before.output_tokens,
        before.kv_each,
        before.spread,
    )


def test_what_users_see_corrects_the_model() -> None:
    """The p99 of TPOT is twice the mean step: the batch has to be smaller."""
    seen = observations(0, 5, tpot=sketch([0.045] * 100))
    busy = PoolSignals(workers=1, running=25, work=(steps(25),))
    spec = replace(decode(), role=Role.COLOCATED)
    learned = Learned()
    for _ in range(200):
        learned = learn(learned, spec, seen, busy, POLL_S)
    assert learned.spread == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(("sigma", "low", "high"), [(1.0, 1.0, 1.4), (1.7, 2.2, 3.3)])
def test_how_running_sequences_swing_is_learned(sigma: float, low: float, high: float) -> None:
    """Independent ones swing by the root of their number, those that come in heaps more."""
    chance, learned = random.Random(8), Learned()
    for _ in range(1440):
        running = chance.gauss(100, sigma * 10)
        pool = PoolSignals(workers=4, running=running)
        learned = learn(learned, decode(), observations(0, 5), pool, POLL_S)
    assert learned.running == pytest.approx(100, rel=0.1)
    assert low <= learned.dispersion <= high


def test_kv_of_a_sequence_is_averaged() -> None:
    busy = PoolSignals(workers=1, running=8, waiting_grants=2, kv_used_tokens=5000)
    learned = learn(Learned(), decode(), observations(0, 5), busy, POLL_S)
    assert learned.kv_each == 500


def test_grants_for_prompts_that_prefill_still_computes_make_no_sequence_larger() -> None:
    busy = PoolSignals(workers=1, running=2, kv_used_tokens=100_000)
    seen = observations(0, 5, output_tokens=100.0)
    learned = learn(Learned(), decode(), seen, busy, POLL_S)
    assert learned.kv_each == 1000 + 100 + 256


def test_sizes_are_those_of_half_an_hour_and_not_of_a_lucky_minute() -> None:
    """Of a hundred requests one is large: a minute of 20 mostly holds none."""
    learned = Learned()
    for minute in range(30):
        seen = observations(0, 5, uncached=sketch([100.0] * 19 + [100.0 if minute % 4 else 9000.0]))
        for _ in range(12):
            learned = learn(learned, prefill(), seen, PoolSignals(workers=1), POLL_S)
    assert quantile(learned.sizes, 0.99) == pytest.approx(9000, rel=0.03)
    assert sum(learned.sizes.values()) < 30 * 20 * 1000


def test_prefill_learns_speed_and_not_steps() -> None:
    busy = PoolSignals(workers=1, work=(did(100),))
    learned = learn(Learned(), prefill(), observations(0, 5), busy, POLL_S)
    assert learned.speed.tokens_per_s == 100
    assert learned.line.fit() is None
    assert prefill().role is Role.PREFILL


def sums(prompts: list[tuple[float, float]]) -> PromptSums:
    """Of (tokens, seconds)."""
    return PromptSums(
        sum(n for n, _ in prompts),
        sum(n * n for n, _ in prompts),
        sum(n**3 for n, _ in prompts),
        sum(s for _, s in prompts),
        sum(n * s for n, s in prompts),
    )


def test_long_prompts_cost_more_a_token() -> None:
    """100 us a token, and attention: a prompt of 100,000 tokens takes 30 s, not 10."""
    prompts = [(n, n * (1e-4 + 2e-9 * n)) for n in (100, 1000, 10_000, 50_000, 100_000)]
    cost = PromptCost().learn(sums(prompts * 4), 1.0, 0.0)
    assert cost.seconds(100_000) == pytest.approx(30.0, rel=0.1)
    assert cost.seconds(1000) == pytest.approx(0.102, rel=0.15)


def test_without_measurements_time_grows_as_tokens_do() -> None:
    assert PromptCost().seconds(2000) == 2 * PromptCost().seconds(1000)


def test_prompts_that_were_all_alike_tell_no_slope() -> None:
    cost = PromptCost().learn(sums([(1000, 0.1)] * 50), 1.0, 0.0)
    assert cost.seconds(4000) == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1e-4, 100)), min_size=1, max_size=20))
def test_a_longer_prompt_never_takes_less(prompts: list[tuple[float, float]]) -> None:
    cost = PromptCost().learn(sums(prompts), 1.0, 0.0)
    times = [cost.seconds(tokens) for tokens in (1, 10, 1000, 1e5)]
    assert times == sorted(times)
    assert times[0] >= 0
