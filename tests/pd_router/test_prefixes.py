"""Which worker holds which prefix: matches, updates, bounds, lazily computed hashes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pd_core.kv import prefix_hashes
from pd_router.fleet import WorkerId
from pd_router.prefixes import PrefixIndex, PromptHashes


class Counting(list[int]):
    """Counts the slices that are taken."""

    slices = 0

    def __getitem__(self, at: Any) -> Any:
        self.slices += 1
        return super().__getitem__(at)


A, B = WorkerId("a", "1"), WorkerId("b", "1")


def hashes(tokens: range, block_tokens: int = 4, salt: bytes = b"") -> list[bytes]:
    return list(prefix_hashes(tokens, block_tokens, salt))


def test_leading_whole_blocks_count() -> None:
    index = PrefixIndex()
    index.update(A, hashes(range(12)))
    assert index.cached_tokens(A, PromptHashes(range(30)), 4) == 12
    assert index.cached_tokens(A, PromptHashes(range(7)), 4) == 4
    assert index.cached_tokens(A, PromptHashes(range(1, 30)), 4) == 0
    assert index.cached_tokens(B, PromptHashes(range(30)), 4) == 0
    assert index.cached_tokens(A, PromptHashes(range(30), b"salt"), 4) == 0
    assert index.cached_tokens(A, PromptHashes(range(30)), 8) == 0


def test_one_token_is_always_computed() -> None:
    index = PrefixIndex()
    index.update(A, hashes(range(12)))
    assert index.cached_tokens(A, PromptHashes(range(12)), 4) == 8
    assert index.cached_tokens(A, PromptHashes(range(13)), 4) == 12


def test_a_gap_ends_the_match() -> None:
    index = PrefixIndex()
    index.update(A, hashes(range(16)))
    index.update(A, [], lost=hashes(range(16))[1:2])
    assert index.cached_tokens(A, PromptHashes(range(30)), 4) == 4


def test_reset_and_forget() -> None:
    index = PrefixIndex()
    index.update(A, hashes(range(16)))
    index.update(A, hashes(range(4)), reset=True)
    assert index.count(A) == 1
    index.forget(A)
    assert index.count(A) == 0
    assert index.cached_tokens(A, PromptHashes(range(30)), 4) == 0


def test_the_oldest_leave_when_there_are_too_many() -> None:
    index = PrefixIndex(limit=3)
    several = hashes(range(20))
    index.update(A, several[:3])
    index.update(A, several[:1])  # gained again: the newest now
    index.update(A, several[3:4])
    assert index.count(A) == 3
    assert index.cached_tokens(A, PromptHashes(range(8)), 4) == 4  # block 1 was the oldest


def test_hashes_are_computed_as_far_as_asked() -> None:
    tokens = Counting(range(4000))
    prompt = PromptHashes(tokens)
    assert prompt.at(4, 1) == hashes(range(8))[1]
    assert tokens.slices == 2
    assert prompt.at(4, 0) is not None
    assert tokens.slices == 2
    assert prompt.at(4, 1000) is None


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 8),
)
def test_equals_the_common_prefix(prompt: list[int], held: list[int], block: int) -> None:
    index = PrefixIndex()
    index.update(A, prefix_hashes(held, block))
    common = 0
    for mine, theirs in zip(prompt, held, strict=False):
        if mine != theirs:
            break
        common += 1
    whole_held = len(held) // block * block
    expected = min(common, whole_held, len(prompt) - 1) // block * block
    assert index.cached_tokens(A, PromptHashes(prompt), block) == expected


@given(st.lists(st.lists(st.integers(0, 50), max_size=20), max_size=20), st.integers(1, 10))
def test_never_more_than_the_limit(batches: list[list[int]], limit: int) -> None:
    index = PrefixIndex(limit)
    for batch in batches:
        index.update(A, (str(number).encode() for number in batch))
        assert index.count(A) <= limit
