"""Prompt look-up: what it guesses, when guesses are worth their price, and how a request's
own acceptance decides that, down to none and up again."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.speculate import PromptLookup

CHEAP = 0.05
COPIED = [*range(20, 60)]


def fed(prompt: Sequence[int], written: Sequence[int]) -> PromptLookup:
    tokens = list(prompt)
    drafter = PromptLookup(tokens)
    for token in written:
        tokens.append(token)
        drafter.note()
    return drafter


def noise(count: int, seed: int) -> list[int]:
    """Tokens that stand nowhere else."""
    return [1000 * seed + i for i in range(count)]


def test_what_followed_the_last_time_is_guessed() -> None:
    drafter = fed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 7, 8, 0], [1, 2, 3])
    assert drafter.draft(3, 1, 0.0) == [7, 8, 0]


def test_nothing_known_nothing_guessed() -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5]):
        assert fed(tokens, []).draft(8, 1, 0.0) == []


def test_guesses_go_on_with_guesses_at_the_end() -> None:
    assert fed([5, 6, 5, 6, 5], []).draft(5, 1, 0.0) == [6, 5, 6, 5, 6]
    assert fed([7, 7, 7, 7], []).draft(3, 1, 0.0) == [7, 7, 7]
    assert fed([9, 1, 2, 3, 1, 2, 3], []).draft(7, 1, 0.0) == [1, 2, 3, 1, 2, 3, 1]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=20),
    st.integers(0, 6),
)
def test_it_finds_what_a_plain_search_finds(
    prompt: list[int], written: list[int], most: int
) -> None:
    """Whenever it was wrong, or had nothing, it looks for the last place."""
    tokens, drafter = list(prompt), PromptLookup(at_first := list(prompt))
    expected = search(tokens)
    for token in written:
        tokens.append(token)
        at_first.append(token)
        drafter.note()
        right = expected is not None and tokens[expected] == token
        expected = expected + 1 if right and expected is not None else search(tokens)
    guesses = drafter.draft(most, 1, 0.0)
    if expected is None:
        assert guesses == []
        return
    for guess in guesses:
        assert guess == tokens[expected]
        tokens.append(guess)
        expected += 1
    assert len(guesses) == most


def search(tokens: Sequence[int]) -> int | None:
    for end in range(len(tokens) - 1, 1, -1):
        if tokens[end - 2 : end] == tokens[-2:]:
            return end
    return None


def test_copying_gets_more_guesses_and_chatting_none() -> None:
    prompt = [*COPIED, *noise(20, 1), *COPIED[:3]]
    before = len(fed(prompt, []).draft(8, 1, CHEAP))
    copying = fed(prompt, COPIED[3:30])
    assert before < len(copying.draft(8, 1, CHEAP)) == 8
    # Two tokens that are known, then something else: always wrong.
    chat: list[int] = []
    for i in range(0, 24, 2):
        chat += [*COPIED[i : i + 2], *noise(4, 2 + i)]
    assert fed(prompt, [*chat, *COPIED[30:32]]).draft(8, 1, CHEAP) == []
    # Nothing is computed any more, and yet it's noticed when copying begins.
    again = fed(prompt, [*chat, *COPIED[5:30]])
    assert len(again.draft(8, 1, CHEAP)) == 8


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_the_dearer_a_token_the_fewer_guesses(sequences: int) -> None:
    drafter = fed([*COPIED, *COPIED[:3]], COPIED[3:8])
    counts = [len(drafter.draft(100, sequences, price)) for price in (0.001, 0.01, 0.1, 0.5, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] == 0


def test_a_full_step_has_no_room_for_doubtful_guesses() -> None:
    """Where computing is what costs, a token more takes as long as any other."""
    drafter = fed([*COPIED, *COPIED[:3]], [])
    counts = [len(drafter.draft(8, n, 0.1)) for n in (1, 8, 64)]
    assert counts[0] > 0 == counts[2]
    assert counts == sorted(counts, reverse=True)


def test_a_very_long_text_is_searched_only_so_far_back() -> None:
    long = [*COPIED, *noise(40_000, 9), *COPIED[:3]]
    assert fed(long, []).draft(4, 1, 0.0) == []
    near = [*noise(40_000, 9), *COPIED, *COPIED[:3]]
    assert fed(near, []).draft(4, 1, 0.0) == COPIED[3:7]


def test_any_tokens_at_any_time() -> None:
    chooser = random.Random(4)
    tokens = [chooser.randrange(3) for _ in range(5)]
    drafter = PromptLookup(tokens)
    for _ in range(500):
        assert len(drafter.draft(6, chooser.randrange(1, 9), chooser.random())) <= 6
        tokens.append(chooser.randrange(3))
        drafter.note()
