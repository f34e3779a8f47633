"""How many prompt tokens a step may have: learned from steps, bounded below, steady, and less
where others decode that were promised their tokens in time."""

import pytest

from pd_engine.pace import StepPace


def alone(pace: StepPace) -> int | None:
    return pace.prompt_tokens(decodes=False, gap_s=None)


def test_nothing_is_known_at_first() -> None:
    assert alone(StepPace(0.5, 0.0)) is None


def test_a_prior_counts_until_steps_are_seen() -> None:
    assert alone(StepPace(0.5, 300.0)) == 150


def test_it_follows_the_steps() -> None:
    pace = StepPace(0.5, 1000.0)
    for _ in range(30):
        pace.observe(100, 0, 0.5)  # 200 tokens a second
    assert alone(pace) == 100
    for _ in range(30):
        pace.observe(100, 0, 0.05)
    assert alone(pace) in (999, 1000)


def test_one_outlier_does_not_decide() -> None:
    pace = StepPace(0.5, 200.0)
    pace.observe(100, 0, 10.0)
    assert alone(pace) in range(70, 100)


def test_small_steps_say_nothing() -> None:
    pace = StepPace(0.5, 200.0)
    pace.observe(4, 0, 1.0)
    pace.observe(100, 0, 0.0)
    assert alone(pace) == 100


def test_a_slow_machine_still_computes() -> None:
    assert alone(StepPace(0.5, 1.0)) == 16


@pytest.mark.parametrize("promised_s", [0.05, 0.1, 0.2])
def test_a_step_with_decoding_ends_in_the_time_that_was_promised(promised_s: float) -> None:
    """Steps take 20 ms to decode, and prompts get slower as they grow."""
    pace = StepPace(0.5, 2000.0)
    for _ in range(20):
        pace.observe(0, 8, 0.02)
    speed = 2000.0
    for _ in range(50):
        tokens = pace.prompt_tokens(decodes=True, gap_s=promised_s)
        assert tokens is not None
        step_s = 0.02 + tokens / speed
        assert step_s <= promised_s * 1.02
        assert step_s > promised_s * 0.9, "and no shorter than need be"
        pace.observe(tokens, 8, step_s)
        speed *= 0.995


def test_a_promise_that_decoding_alone_breaks_stops_no_prompt() -> None:
    pace = StepPace(0.5, 2000.0)
    pace.observe(0, 8, 0.2)
    assert pace.prompt_tokens(decodes=True, gap_s=0.1) == 16


@pytest.mark.parametrize(("decodes", "gap_s"), [(False, 0.1), (True, None), (True, 9.0)])
def test_nobody_waits_for_tokens_or_nothing_was_promised(decodes: bool, gap_s: float | None):
    assert StepPace(0.5, 1000.0).prompt_tokens(decodes, gap_s) == 500


def test_decoding_is_not_taken_for_a_slow_prompt() -> None:
    pace = StepPace(0.5, 1000.0)
    for _ in range(30):
        pace.observe(0, 8, 0.1)
        pace.observe(100, 8, 0.2)
    assert alone(pace) in (499, 500)
    for _ in range(30):
        pace.observe(100, 8, 0.1)  # what decodes got faster, unseen
    assert alone(pace) in (1999, 2000)  # a quarter of the step is taken for the prompt's
