"""Durations and quantities: what is read, and that a canonical form stays what it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.fields import (
    canonical_quantity,
    format_duration,
    parse_duration,
    quantity_bytes,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("5m", 300), ("1h", 3600), ("1m30s", 90), ("1.5s", 1.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5 s", "5d", "1e3s", "5s5", "infs"])
def test_no_durations(text: str) -> None:
    assert parse_duration(text) is None


@given(st.integers(min_value=1, max_value=10**8))
def test_a_duration_is_written_as_it_is_read(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1024Mi", "1Gi"),
        ("0.5Gi", "512Mi"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        ("0.5", "500m"),
        ("2000", "2k"),
        ("8Gi", "8Gi"),
        ("1.5k", "1500"),
        ("0", "0"),
        ("0Gi", "0"),
        ("100", "100"),
        ("1024", "1024"),
    ],
)
def test_quantities_as_the_api_server_prints_them(text: str, canonical: str) -> None:
    assert canonical_quantity(text) == canonical


@pytest.mark.parametrize("text", ["", "8GB", "-1", "1e3x", "Gi", "1 Gi", "nan"])
def test_no_quantities(text: str) -> None:
    assert canonical_quantity(text) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("", 0), ("0", 0), ("7", 7), ("1500m", 2), ("2k", 2000), ("2Ki", 2048), ("3Gi", 3 << 30)],
)
def test_quantities_as_bytes(text: str, found: int) -> None:
    assert quantity_bytes(text) == found


def test_no_quantity_has_no_bytes() -> None:
    with pytest.raises(ValueError, match="'8GB' is no quantity"):
        quantity_bytes("8GB")


@given(
    st.integers(min_value=0, max_value=10**6),
    st.sampled_from(["", "m", "k", "M", "Ki", "Mi", "Gi"]),
)
def test_canonical_is_stable(number: int, suffix: str) -> None:
    once = canonical_quantity(f"{number}{suffix}")
    assert once is not None
    assert canonical_quantity(once) == once
