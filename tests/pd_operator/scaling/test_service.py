"""Covers scaling.service and feedback: the mix of prompts that a pool computes, who of them is
late; what users got corrects the model, and when it says nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.scaling.capacity import PromptCost
from pd_operator.scaling.feedback import Feedback
from pd_operator.scaling.queueing import waiting
from pd_operator.scaling.service import mix
from pd_operator.scaling.types import PromptSums, Target
from tests.pd_operator.scaling.world import sketch

LINEAR = PromptCost()
STEEP = PromptCost(
    PromptSums(
        *(
            sum(n**power * (1 if power <= 3 else 0) for n in (1000.0, 20_000.0))
            for power in (1, 2, 3)
        ),
        seconds=sum(n * (1e-4 + 1e-8 * n) for n in (1000.0, 20_000.0)),
        token_seconds=sum(n * n * (1e-4 + 1e-8 * n) for n in (1000.0, 20_000.0)),
    )
)


def test_the_mean_is_what_workers_measured() -> None:
    found = mix(sketch([1000.0] * 3 + [3000.0]), STEEP, 1500.0, 10_000.0)
    assert found.mean_s == pytest.approx(0.15, rel=0.05)


def test_few_long_prompts_vary_more_than_their_lengths() -> None:
    sizes = sketch([1000.0] * 19 + [20_000.0])
    even, steep = (mix(sizes, cost, 1950.0, 10_000.0) for cost in (LINEAR, STEEP))
    assert steep.variation > even.variation > 1


def test_longer_prompts_at_the_door_take_longer_than_in_proportion() -> None:
    sizes = sketch([1000.0] * 20)
    usual, longer = (mix(sizes, STEEP, tokens, 10_000.0).mean_s for tokens in (1000.0, 10_000.0))
    assert longer > 12 * usual


def test_nothing_known_of_sizes() -> None:
    found = mix({}, LINEAR, 1000.0, 10_000.0)
    assert found.mean_s == pytest.approx(0.1, rel=0.01)
    assert 0.5 < found.variation < 1.5


def test_who_is_late() -> None:
    """Of a hundred one takes 2 s. Within 1 s it is hopeless; the others may wait 0.9 s."""
    found = mix(sketch([1000.0] * 99 + [20_000.0]), LINEAR, 1190.0, 10_000.0)
    assert found.hopeless(1.0) == pytest.approx(0.01)
    assert found.hopeless(3.0) == 0.0
    waits = waiting(2, 1.0, found.mean_s, found.variation)
    assert found.late(1.0, waits) == pytest.approx(0.99 * waits.longer_than(0.9), rel=0.1)


@given(st.lists(st.floats(1, 1e5), min_size=1, max_size=20), st.floats(0.01, 10))
def test_all_together_are_all(sizes: list[float], target_s: float) -> None:
    found = mix(sketch(sizes), LINEAR, sum(sizes) / len(sizes), 10_000.0)
    overloaded = waiting(1, 2.0, found.mean_s, found.variation)
    assert found.hopeless(target_s) + found.late(target_s, overloaded) == pytest.approx(1)


# ---- feedback ------------------------------------------------------------------------------

TARGET = Target(99, 1.0)
GOOD, BAD = sketch([0.5] * 100), sketch([0.5] * 90 + [3.0] * 10)


def after(minutes: int, seen: dict[int, int], start: Feedback | None = None, **said: bool) -> float:
    made = start or Feedback()
    for _ in range(12 * minutes):
        made = made.learn(
            seen, TARGET, said.get("hopeless", 0.0), said.get("settled", True),
            5.0,
        )  # fmt: skip
    return made.factor


def test_late_requests_raise_the_factor_and_not_beyond_a_bound() -> None:
    assert 1.1 < after(1, dict(BAD)) < after(2, dict(BAD)) < after(60, dict(BAD)) == 1.6


def test_it_goes_back_slowly_while_nobody_is_late() -> None:
    high = Feedback(1.3)
    assert after(1, dict(GOOD), high) == pytest.approx(1.296)
    assert after(24 * 60, dict(GOOD), high) == 1.0


@pytest.mark.parametrize("said", [{"settled": False}, {"hopeless": 0.1}])
def test_what_teaches_nothing(said: dict[str, bool]) -> None:
    """A pool that still starts; requests that no number of workers would have helped."""
    assert after(5, dict(BAD), **said) <= 1.0


def test_who_waited_for_this_pool_is_late_as_well() -> None:
    made = Feedback()
    for _ in range(12):
        made = made.learn(GOOD, TARGET, 0.0, True, 5.0, waited=0.1)
    assert made.late == pytest.approx(0.1)
    assert made.factor > 1.1


def test_no_samples_no_word() -> None:
    assert after(60, {}, Feedback(1.2)) == 1.2
    assert Feedback().learn(BAD, None, 0.0, True, 5.0) == Feedback()
