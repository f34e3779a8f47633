"""Covers scaling.answers: answers' lengths by prompts' lengths, when the mix changes, when all
of them grow, and for prompts that nobody has seen answered."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.scaling.answers import Answers
from pd_operator.scaling.sizing import Learned
from pd_operator.scaling.types import Answered, Flow

SHORT, LONG = 6, 14  # prompts of less than 64 and of less than 16,384 tokens
CHATS = {SHORT: Answered(60, 60 * 400.0)}
BOTH = {**CHATS, LONG: Answered(20, 20 * 2.0)}


def test_who_arrives_counts_and_not_who_ended() -> None:
    known = Answers().learn(BOTH, 1.0).learn(CHATS, 0.1)
    assert known.tokens({SHORT: 2.0}) == pytest.approx(800)
    assert known.tokens({LONG: 2.0}) == pytest.approx(4)
    assert known.tokens({SHORT: 1.0, LONG: 50.0}) == pytest.approx(500)


def test_a_length_that_nobody_has_seen_answered_promises_nothing() -> None:
    known = Answers().learn(CHATS, 1.0)
    assert known.tokens({LONG: 100.0}) == 0.0
    assert known.tokens({SHORT + 1: 1.0}) == known.tokens({SHORT - 1: 1.0}) == pytest.approx(400)


def test_between_two_lengths_the_longer_answer_counts() -> None:
    known = Answers().learn({5: Answered(10, 100), 7: Answered(10, 300)}, 1.0)
    assert known.mean(6) == 30


def test_answers_that_become_longer_count_at_once_for_all() -> None:
    """A minute in which chats are twice as long; half an hour knows them as they were."""
    known = Answers().learn(BOTH, 1.0)
    for _ in range(360):
        known = known.learn(BOTH, 1 / 12)
    found = known.learn({SHORT: Answered(60, 60 * 800.0)}, 1 / 12)
    assert found.lately == pytest.approx(2, rel=0.05)
    assert found.tokens({SHORT: 1.0}) == pytest.approx(800, rel=1e-6)
    assert found.tokens({LONG: 1.0}) == pytest.approx(4, rel=0.05)


def test_silence_teaches_nothing() -> None:
    known = Answers().learn(BOTH, 1.0)
    assert known.learn({}, 1.0) == known


def test_what_is_older_fades() -> None:
    known = Answers().learn(CHATS, 1.0)
    for _ in range(600):
        known = known.learn({SHORT: Answered(60, 60 * 40.0)}, 1 / 12)
    assert known.mean(SHORT) == pytest.approx(40, rel=0.01)
    assert known.known[SHORT].sequences < 400


def test_routers_that_tell_no_lengths_go_by_the_last_minutes_mean() -> None:
    learned = Learned(output_tokens=100.0, answers=Answers().learn(BOTH, 1.0))
    assert learned.outputs(Flow(3, 3, 300)) == 300
    assert learned.outputs(Flow(3, 3, 300, {SHORT: 1.0})) == pytest.approx(400 + 200)
    assert learned.outputs(Flow(1, 1, 10_000, {LONG: 1.0})) == pytest.approx(2)


counts = st.floats(1e-6, 1e6)
ended = st.dictionaries(
    st.integers(0, 20), st.builds(Answered, counts, st.floats(0, 1e9)), max_size=6
)
lengths = st.dictionaries(st.integers(0, 20), st.floats(0, 1e4), max_size=6)


@given(st.lists(st.tuples(ended, st.floats(0, 1)), max_size=8), lengths, st.floats(1, 100))
def test_more_arrivals_never_put_out_less(
    minutes: list[tuple[dict[int, Answered], float]], came: dict[int, float], factor: float
) -> None:
    known = Answers()
    for found, share in minutes:
        known = known.learn(found, share)
    tokens = known.tokens(came)
    assert math.isfinite(tokens)
    assert (
        0
        <= tokens
        <= known.tokens({one: count * factor for one, count in came.items()}) * (1 + 1e-9)
    )
