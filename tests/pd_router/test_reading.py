"""Covers pd_router.reading: who reads next to nothing, who is only slow."""

from hypothesis import given
from hypothesis import strategies as st

from pd_router.reading import LEAST_BYTES, Reading

LIMIT_S = 20.0


def test_who_reads_nothing_gives_up() -> None:
    reading = Reading(100_000, 5.0)
    for now in (10.0, 20.0, 24.9):
        assert not reading.look(100_000, now)
        assert not reading.gives_up(now, LIMIT_S)
    assert reading.gives_up(25.0, LIMIT_S)
    assert reading.moved_at == 5.0


def test_a_few_bytes_are_next_to_nothing() -> None:
    reading = Reading(100_000, 0.0)
    for now in range(1, 20):
        assert reading.look(100_000 - now, float(now))
        assert reading.moved_at == now
    assert reading.gives_up(20.0, LIMIT_S)


def test_what_is_written_meanwhile_is_not_read() -> None:
    reading = Reading(100_000, 0.0)
    assert not reading.look(101_000, 1.0)
    assert reading.look(100_500, 2.0)
    assert reading.moved_at == 2.0


@given(
    st.integers(LEAST_BYTES // 16 + 1, 2000),
    st.lists(st.booleans(), min_size=100, max_size=400),
)
def test_a_steady_reader_never_gives_up(bytes_s: int, heard: list[bool]) -> None:
    """Though its system tells of it now and then only: each four seconds at the latest."""
    left = at_last = 10_000_000
    reading = Reading(left, 0.0)
    for second, tells in enumerate(heard, 1):
        left -= bytes_s
        if tells or not second % 4:
            at_last = left
        reading.look(at_last, float(second))
        assert not reading.gives_up(float(second), LIMIT_S)
