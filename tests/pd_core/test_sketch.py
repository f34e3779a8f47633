"""The percentile sketch: its error bound, merging, the sliding window, its JSON."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.sketch import (
    RELATIVE_ERROR,
    WindowSketch,
    from_json,
    mean_and_variation,
    merge,
    quantile,
)

samples = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200)


@given(samples, st.floats(0.0, 1.0))
def test_a_quantile_is_within_the_error_bound(values: list[float], q: float) -> None:
    sketch = WindowSketch()
    for value in values:
        sketch.add(value, 0.0)
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    found = sketch.quantile(q, 0.0)
    assert found is not None
    assert abs(found - exact) <= exact * RELATIVE_ERROR * 1.001


@given(samples, samples)
def test_merging_equals_one_sketch_of_all(a: list[float], b: list[float]) -> None:
    parts = [WindowSketch(), WindowSketch()]
    whole = WindowSketch()
    for sketch, values in zip(parts, (a, b), strict=True):
        for value in values:
            sketch.add(value, 0.0)
            whole.add(value, 0.0)
    assert merge(from_json(s.to_json(0.0)) for s in parts) == whole.counts(0.0)


def test_samples_leave_with_the_window_and_no_data_is_a_value() -> None:
    sketch = WindowSketch(window_s=60.0, slices=6)
    assert sketch.quantile(0.5, 0.0) is None
    sketch.add(1.0, 5.0)
    sketch.add(3.0, 55.0)
    assert quantile(sketch.counts(59.0), 1.0) == pytest.approx(3.0, rel=RELATIVE_ERROR)
    assert sum(sketch.counts(59.0).values()) == 2
    assert sum(sketch.counts(70.0).values()) == 1
    assert sketch.quantile(0.99, 200.0) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        WindowSketch().add(value, 0.0)


@pytest.mark.parametrize("data", [{"a": 1}, {"1": -1}, {"1": "x"}])
def test_broken_json_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|negative"):
        from_json(data)


def test_memory_is_bounded_over_time() -> None:
    sketch = WindowSketch(window_s=6.0, slices=6)
    for second in range(10_000):
        sketch.add(0.5 + second % 7, float(second))
    assert len(sketch._slices) <= 7


def test_mean_and_variation() -> None:
    sketch = WindowSketch()
    assert mean_and_variation(sketch.counts(0.0)) is None
    for value in (10.0, 10.0, 40.0):
        sketch.add(value, 0.0)
    found = mean_and_variation(sketch.counts(0.0))
    assert found == pytest.approx((20.0, 0.5), rel=0.05)
