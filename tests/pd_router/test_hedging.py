"""When a prefill is hedged: after what time, and how many at once."""

from math import inf

import pytest

from pd_router.hedging import Hedge, Hedging


def test_off_by_default() -> None:
    off = Hedging()
    off.in_flight = 1000
    assert off.after_s(1.0) == inf
    assert not off.room


def test_a_fixed_time_is_that_time() -> None:
    assert Hedging(Hedge(0.7)).after_s(0.01) == Hedging(Hedge(0.7)).after_s(9.0) == 0.7


def test_without_one_it_is_what_one_of_twenty_takes_against_its_prediction() -> None:
    hedging = Hedging(Hedge())
    for number in range(100):
        assert (hedging.after_s(1.0) == inf) == (number < 20), "it has seen too few"
        hedging.took(2.0, 4.0 if number % 50 else 40.0)
    assert hedging.after_s(1.0) == pytest.approx(2.0)
    assert hedging.after_s(0.1) == pytest.approx(0.2), "a short prompt, a short wait"
    for _ in range(20):
        hedging.took(2.0, 20.0)
    assert hedging.after_s(1.0) == pytest.approx(10.0), "all are slow now: that is usual"
    assert hedging.after_s(0.0) == 0.05


@pytest.mark.parametrize(
    ("share", "in_flight", "most"), [(0.05, 1, 1), (0.05, 39, 1), (0.05, 40, 2), (0.1, 1000, 100)]
)
def test_hedges_are_a_share_of_what_is_in_flight(share: float, in_flight: int, most: int) -> None:
    hedging = Hedging(Hedge(1.0, share))
    hedging.in_flight = in_flight
    while hedging.room:
        hedging.running += 1
    assert hedging.running == most


@pytest.mark.parametrize(
    "wrong", [{"after_s": 0.0}, {"after_s": inf}, {"share": 0}, {"share": 0.6}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="hedge"):
        Hedge(**wrong)
