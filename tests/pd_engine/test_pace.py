"""How many tokens a step may have: learned from steps, bounded below, steady."""

from pd_engine.pace import StepPace


def test_nothing_is_known_at_first() -> None:
    assert StepPace(0.5, 0.0).budget_tokens() is None


def test_a_prior_counts_until_steps_are_seen() -> None:
    assert StepPace(0.5, 300.0).budget_tokens() == 150


def test_it_follows_the_steps() -> None:
    pace = StepPace(0.5, 1000.0)
    for _ in range(30):
        pace.observe(100, 0.5)  # 200 tokens a second
    assert pace.budget_tokens() == 100
    for _ in range(30):
        pace.observe(100, 0.05)
    assert pace.budget_tokens() in (999, 1000)


def test_one_outlier_does_not_decide() -> None:
    pace = StepPace(0.5, 200.0)
    pace.observe(100, 10.0)
    assert pace.budget_tokens() in range(70, 100)


def test_small_steps_say_nothing() -> None:
    pace = StepPace(0.5, 200.0)
    pace.observe(4, 1.0)
    pace.observe(100, 0.0)
    assert pace.budget_tokens() == 100


def test_a_slow_machine_still_computes() -> None:
    pace = StepPace(0.5, 1.0)
    assert pace.budget_tokens() == 16
