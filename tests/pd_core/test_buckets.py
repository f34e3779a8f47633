"""Covers pd_core.buckets: how the counts of two bounds make that of a time between them."""

import pytest

from pd_core.buckets import SECONDS, shares


@pytest.mark.parametrize("bound", SECONDS)
def test_a_bound_is_its_own(bound: float) -> None:
    assert shares(bound) == [(1.0, bound)]


@pytest.mark.parametrize(
    ("seconds", "found"),
    [
        (0.4, [(0.5, 0.3), (0.5, 0.5)]),
        (0.35, [(0.75, 0.3), (0.25, 0.5)]),
        (0.0005, [(0.5, 0.001)]),  # below the first bound: a line from nothing
        (600.0, [(1.0, 120.0)]),
    ],
)
def test_between_two_bounds(seconds: float, found: list[tuple[float, float]]) -> None:
    assert shares(seconds) == found


def test_bounds_rise() -> None:
    assert list(SECONDS) == sorted(set(SECONDS))
