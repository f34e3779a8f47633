"""Covers scaling.forecast and starting: level, slope and jumps of demand against what chance
does, what past forecasts missed; how long workers take to start."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.scaling.forecast import Ahead, Chance, Course
from pd_operator.scaling.starting import UNKNOWN_S, Starts

MANY = Chance(1000.0)
FEW = Chance(1.0, variation=2.0)
HORIZON_S = 240.0
SAFE = 0.95


def follow(
    demand: Callable[[float], float], minutes: int, chance: Chance = MANY
) -> tuple[Course, Ahead]:
    """Looks every ten seconds."""
    course, found = Course(), Ahead()
    for look in range(6 * minutes):
        at = 10.0 * look
        course = course.add(at, demand(at), chance, HORIZON_S)
        found = course.ahead(at, demand(at), chance, HORIZON_S, SAFE)
    return course, found


def test_what_stays_is_forecast_to_stay() -> None:
    _, found = follow(lambda _: 50.0, 120)
    assert found.level == pytest.approx(50)
    assert found.growth == 1.0
    assert 1.0 <= found.margin < 1.03


def test_the_first_minutes_are_taken_with_care() -> None:
    _, found = follow(lambda _: 50.0, 2)
    assert found.margin == pytest.approx(math.exp(0.25))


def test_a_ramp_is_carried_on_until_the_horizon() -> None:
    _, found = follow(lambda at: 100.0 + at / 10, 60)
    end = 100 + (3590 + HORIZON_S) / 10
    assert found.level * found.growth == pytest.approx(end, rel=0.02)
    assert found.margin < 1.06


def test_a_fall_is_not_carried_on() -> None:
    _, found = follow(lambda at: 1000.0 - at / 10, 60)
    assert found.level == pytest.approx(1000 - 359, rel=0.03)
    assert found.growth == 1.0


def test_chance_is_no_slope_and_no_margin() -> None:
    """A request a second of very different sizes: minutes differ by a fifth."""
    seed = random.Random(8)
    values = [50 * math.exp(seed.gauss(0, math.sqrt(FEW.variance))) for _ in range(200)]
    course = Course()
    demands = []
    for minute, value in enumerate(values):
        course = course.add(60.0 * minute, value, FEW, HORIZON_S)
        demands.append(course.ahead(60.0 * minute, value, FEW, HORIZON_S, SAFE).demand)
    late = sorted(demands[60:])
    assert late[len(late) // 2] == pytest.approx(55, rel=0.15)
    assert late[int(len(late) * 0.95)] < 95


def test_a_jump_is_a_new_level_at_once() -> None:
    course, _ = follow(lambda _: 50.0, 60)
    found = course.ahead(3600.0, 150.0, MANY, HORIZON_S, SAFE)
    assert (found.level, found.growth) == (150.0, 1.0)


def test_demand_that_often_doubles_is_learned() -> None:
    """Ten minutes high, ten minutes low: what comes within four minutes is often twice as
    much."""
    _, calm = follow(lambda _: 50.0, 120)
    _, found = follow(lambda at: 100.0 if at // 600 % 2 else 50.0, 119)
    assert found.margin > 1.5 > calm.margin


def test_one_jump_in_two_hours_is_no_habit() -> None:
    _, found = follow(lambda at: 200.0 if at > 4000 else 50.0, 120)
    assert found.margin < 1.05


def test_no_burst_however_large_keeps_more_than_twice_the_workers() -> None:
    _, found = follow(lambda at: 1000.0 if at // 600 % 2 else 50.0, 119)
    assert 1.5 < found.margin <= 2.0


def test_after_a_time_without_data_it_begins_anew() -> None:
    course, _ = follow(lambda _: 50.0, 30)
    course = course.add(9000.0, 5.0, MANY, HORIZON_S)
    assert course.points == ((9000.0, 5.0),)


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.floats(0, 1e6)), min_size=1, max_size=60),
    st.floats(0, 1000), st.floats(0, 50), st.floats(5, 900),
)  # fmt: skip
def test_whatever_comes_it_is_finite_and_bounded(
    looks: list[tuple[float, float]], requests: float, variation: float, horizon_s: float
) -> None:
    course, at = Course(), 0.0
    chance = Chance(requests, variation)
    for after_s, demand in looks:
        at += after_s
        course = course.add(at, demand, chance, horizon_s)
        found = course.ahead(at, demand, chance, horizon_s, SAFE)
        assert math.isfinite(found.demand)
        assert found.demand >= 0
        assert found.growth >= 1
        assert found.margin >= 1
    assert len(course.points) <= 24


# ---- starts -------------------------------------------------------------------------------


def test_a_start_is_measured() -> None:
    starts = Starts()
    assert starts.start_s == UNKNOWN_S
    starts = starts.ask(100.0, 3, serving=1)
    starts = starts.look(200.0, 3, serving=2)
    assert starts.measured_s is None
    starts = starts.look(310.0, 3, serving=3)
    assert starts.start_s == 210.0
    starts = starts.ask(400.0, 4, 3).look(510.0, 4, 4)
    assert starts.start_s == 160.0
    assert starts.asked == ()


def test_what_was_withdrawn_and_who_still_drains_tell_nothing() -> None:
    asked = Starts().ask(100.0, 5, serving=2)
    assert asked.look(500.0, 2, serving=5).measured_s is None
    assert Starts().ask(100.0, 3, serving=4) == Starts()


def test_pods_that_never_start_are_bounded() -> None:
    starts = Starts()
    for number in range(100):
        starts = starts.ask(float(number), 5, serving=0).look(float(number), 5, serving=0)
    assert len(starts.asked) <= 8
