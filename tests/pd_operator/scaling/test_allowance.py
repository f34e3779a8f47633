"""Covers scaling.allowance: what of the promised lateness is used up, and what follows for
forecasts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.scaling.allowance import Allowance
from pd_operator.scaling.types import Target
from tests.pd_operator.scaling.world import sketch

TARGET = Target(99, 1.0)
USUAL, SURE = 0.95, 0.99


def after(minutes: float, late_in_1000: int, start: Allowance | None = None) -> Allowance:
    """Looks every five seconds, a thousand requests a minute."""
    made, seen = start or Allowance(), sketch([0.5] * (1000 - late_in_1000) + [3.0] * late_in_1000)
    for _ in range(round(12 * minutes)):
        made = made.learn(seen, TARGET, 0.0, 5.0)
    return made


def test_nothing_known_is_half_of_it() -> None:
    assert Allowance().used == 0.5
    assert Allowance().safe == pytest.approx(USUAL)


def test_as_many_late_as_allowed_use_it_up() -> None:
    found = after(600, 10)
    assert 0.9 < found.used < 1.0
    assert found.safe == pytest.approx(SURE, abs=0.005)


def test_nobody_late_leaves_forecasts_as_usual() -> None:
    found = after(600, 0)
    assert found.used < 0.1
    assert found.safe == pytest.approx(USUAL)


def test_two_bad_minutes_are_remembered_and_forgiven() -> None:
    calm = after(180, 0)
    hurt = after(2, 1000, calm)
    assert hurt.used > 1
    assert hurt.safe == pytest.approx(SURE)
    assert after(60, 0, hurt).safe == pytest.approx(SURE)
    assert after(360, 0, hurt).safe == pytest.approx(USUAL)


def test_what_no_worker_could_have_served_is_nobody_s_fault() -> None:
    made, seen = Allowance(), sketch([0.5] * 900 + [3.0] * 100)
    for _ in range(600):
        made = made.learn(seen, TARGET, 0.1, 5.0)
    assert made.used < 0.5


def test_without_samples_or_target_it_only_fades() -> None:
    hurt = after(2, 1000)
    for found in (
        hurt.learn({}, TARGET, 0.0, 3600.0),
        hurt.learn(sketch([9.0]), None, 0.0, 3600.0),
    ):
        assert found.late == pytest.approx(hurt.late / 2)
        assert found.used <= hurt.used


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1e5)), max_size=20))
def test_whatever_comes_it_stays_a_share(looks: list[tuple[int, float]]) -> None:
    made = Allowance()
    for late, elapsed_s in looks:
        seen = sketch([0.5] * (1000 - late) + [3.0] * late)
        made = made.learn(seen, TARGET, 0.0, elapsed_s)
        assert made.used >= 0
        assert USUAL - 1e-9 <= made.safe <= SURE + 1e-9
