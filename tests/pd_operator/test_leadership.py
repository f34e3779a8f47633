"""Who may write, by the rules of a Lease: one holder at a time in any order of events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.leadership import Leadership, Record, Terms

TERMS = Terms(duration_s=15, deadline_s=10, period_s=2, timeout_s=1.5)


def record(holder: str, version: str = "1", duration_s: float = 15) -> Record:
    return Record(holder, duration_s, 0, version)


def test_terms_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="timeout < period < deadline < duration"):
        Terms(duration_s=10, deadline_s=10)


def test_a_free_lease_is_taken():
    one = Leadership("one", TERMS)
    one.saw(None, 100)
    assert one.may_take(100)
    assert one.next_transitions() == 0
    one.saw(record(""), 100)
    assert one.may_take(100)
    assert one.next_transitions() == 1


def test_a_holder_is_silent_only_after_its_whole_duration_since_we_saw_it():
    two = Leadership("two", TERMS)
    two.saw(record("one", "1"), 100)
    assert not two.may_take(114.9)
    two.saw(record("one", "1"), 114)  # seen again, unchanged
    assert two.may_take(115)
    two.saw(record("one", "2"), 116)  # it did renew
    assert not two.may_take(130)


def test_longer_terms_of_the_holder_are_respected():
    two = Leadership("two", TERMS)
    two.saw(record("one", duration_s=60), 100)
    assert not two.may_take(159)
    assert two.may_take(160)


def test_a_holder_stops_a_deadline_after_the_beginning_of_its_renewal():
    one = Leadership("one", TERMS)
    one.took(record("one"), 100)
    assert one.holds(109.9)
    assert one.left_s(104) == 6
    assert not one.holds(110)
    one.took(record("one", "2"), 109)
    assert one.holds(118)
    one.lost()
    assert not one.holds(109)


@dataclass
class Candidate:
    """A process with a clock of its own; `frozen` until then it runs nothing."""

    leadership: Leadership
    offset: float
    frozen: float = 0.0
    writes: list[float] = field(default_factory=list)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # who
            st.sampled_from(["round", "round", "write", "freeze", "lost answer"]),
            st.floats(0.1, 8.0),  # how long until the next step
        ),
        max_size=80,
    )
)
def test_never_two_writers(steps):
    """Rounds of three candidates with different clocks, pauses, and writes whose answer is
    lost. Whoever thinks that it may write is the one that the server's record names."""
    stored: list[Record] = []
    now = 0.0
    candidates = [Candidate(Leadership(f"c{n}", TERMS), n * 1000.0) for n in range(3)]
    for number, what, pause_s in steps:
        one = candidates[number]
        now += pause_s
        if what == "freeze":
            one.frozen = now + pause_s * 4
        if now < one.frozen:
            continue
        clock = now + one.offset
        if what == "write":
            if one.leadership.holds(clock):
                one.writes.append(now)
                others = [c for c in candidates if c is not one]
                assert not any(c.leadership.holds(now + c.offset) for c in others)
                assert stored[-1].holder == one.leadership.identity
            continue
        if what in ("round", "lost answer"):
            one.leadership.saw(stored[-1] if stored else None, clock)
            if one.leadership.may_take(clock):
                made = Record(one.leadership.identity, 15, 0, str(len(stored) + 1))
                stored.append(made)
                if what == "round":
                    one.leadership.took(made, clock)
