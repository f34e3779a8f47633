"""The block pool: states, ownership, the prefix cache and its eviction, what it tells routers."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_core.kv import prefix_hashes
from pd_engine.blocks import BlockPool, PoolExhausted
from pd_engine.types import PrefixChanges


def hashes(count: int, salt: bytes = b"") -> list[bytes]:
    return list(prefix_hashes(list(range(count)), 1, salt))


def cached_chain(pool: BlockPool, chain: list[bytes]) -> list[int]:
    """Blocks that were computed, cached and let go of."""
    ids = pool.allocate(len(chain))
    for block, key in zip(ids, chain, strict=True):
        pool.register(block, key)
    pool.release(ids)
    return ids


def test_a_new_pool_is_free() -> None:
    counts = BlockPool(5, 16).counts()
    assert (counts.total, counts.free) == (5, 5)
    assert counts.cached == counts.active == counts.granted == counts.quarantined == 0


@pytest.mark.parametrize(("blocks", "tokens"), [(0, 16), (4, 0)])
def test_an_empty_pool_makes_no_sense(blocks: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="a pool of"):
        BlockPool(blocks, tokens)


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(8, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 15, 16, 17)] == [0, 1, 1, 1, 2]
    assert pool.tokens == 128


def test_allocated_blocks_have_one_owner_and_come_back() -> None:
    pool = BlockPool(3, 16)
    ids = pool.allocate(3)
    assert sorted(ids) == [0, 1, 2]
    assert pool.counts().active == 3
    assert not any(pool.is_shared(block) for block in ids)
    pool.release(ids)
    assert pool.counts().free == 3


def test_too_many_blocks_are_refused_as_a_whole() -> None:
    pool = BlockPool(3, 16)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="2 blocks asked for, 1 are there"):
        pool.allocate(2)
    with pytest.raises(PoolExhausted):
        pool.grant(2)
    assert pool.available == 1
    pool.check()


def test_a_shared_block_stays_until_its_last_owner_goes() -> None:
    pool = BlockPool(1, 16)
    ids = pool.allocate(1)
    pool.share(ids)
    assert pool.is_shared(ids[0])
    pool.release(ids)
    assert not pool.is_shared(ids[0])
    assert pool.counts().active == 1
    pool.release(ids)
    assert pool.counts().free == 1


@pytest.mark.parametrize("misuse", ["release", "share", "register"])
def test_a_block_without_an_owner_is_nobodys_to_use(misuse: str) -> None:
    arguments = (0, b"h") if misuse == "register" else ([0],)
    with pytest.raises(AssertionError, match="no owner"):
        getattr(BlockPool(2, 16), misuse)(*arguments)


def test_the_longest_known_prefix_is_taken_over() -> None:
    pool, chain = BlockPool(8, 1), hashes(4)
    ids = cached_chain(pool, chain[:3])
    assert pool.counts().cached == 3
    assert pool.match_prefix(chain) == ids
    assert pool.counts().active == 3
    assert pool.match_prefix(chain[:2]) == ids[:2]
    assert pool.is_shared(ids[0])
    assert pool.match_prefix(hashes(4, b"another tenant")) == []


def test_a_gap_ends_a_prefix() -> None:
    pool, chain = BlockPool(8, 1), hashes(3)
    cached_chain(pool, [chain[0], chain[2]])
    assert len(pool.match_prefix(chain)) == 1


def test_of_two_that_computed_the_same_the_first_stays() -> None:
    pool, chain = BlockPool(4, 1), hashes(1)
    first, second = pool.allocate(2)
    pool.register(first, chain[0])
    pool.register(second, chain[0])
    pool.release([first, second])
    assert (pool.counts().cached, pool.counts().free) == (1, 3)
    assert pool.match_prefix(chain) == [first]


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4, 1)
    kept = cached_chain(pool, hashes(2))
    assert not set(pool.allocate(2)) & set(kept)
    assert pool.counts().cached == 2


def test_the_least_recently_used_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(4, 1)
    old, young = hashes(2, b"old"), hashes(2, b"young")
    cached_chain(pool, old)
    cached_chain(pool, young)
    pool.release(pool.match_prefix(old))  # used again: now `young` is older
    pool.allocate(1)
    assert set(pool.prefixes()) == {*old, young[0]}
    pool.allocate(1)
    assert set(pool.prefixes()) == set(old)


def test_blocks_in_use_are_never_evicted() -> None:
    pool, chain = BlockPool(2, 1), hashes(2)
    cached_chain(pool, chain)
    held = pool.match_prefix(chain[:1])
    assert pool.available == 1
    pool.allocate(1)
    assert pool.prefixes() == (chain[0],)
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    pool.release(held)
    assert pool.available == 1


def test_prefix_changes_are_told_once_and_net() -> None:
    pool, chain = BlockPool(2, 1), hashes(2)
    cached_chain(pool, chain)
    assert pool.take_prefix_changes() == PrefixChanges(gained=tuple(chain))
    assert pool.take_prefix_changes() == PrefixChanges()
    ids = pool.allocate(2)
    assert set(pool.take_prefix_changes().lost) == set(chain)
    pool.release(ids)
    cached_chain(pool, chain)
    pool.allocate(2)  # gained and lost in between: nobody need know
    assert pool.take_prefix_changes() == PrefixChanges()


def test_a_prefix_that_comes_back_was_never_gone() -> None:
    pool, chain = BlockPool(1, 1), hashes(1)
    cached_chain(pool, chain)
    pool.take_prefix_changes()
    ids = pool.allocate(1)
    pool.register(ids[0], chain[0])
    assert pool.take_prefix_changes() == PrefixChanges()
    assert pool.prefixes() == tuple(chain)


def test_granted_blocks_become_active_free_or_quarantined() -> None:
    pool = BlockPool(6, 16)
    ids = pool.grant(6)
    assert pool.counts().granted == 6
    pool.activate(ids[:2])
    pool.revoke(ids[2:4])
    pool.quarantine(ids[4:])
    counts = pool.counts()
    assert (counts.active, counts.free, counts.granted, counts.quarantined) == (2, 2, 0, 2)
    assert pool.available == 2  # nobody gets the quarantined ones
    pool.unquarantine(ids[4:])
    pool.release(ids[:2])
    assert pool.counts().free == 6


@pytest.mark.parametrize("move", ["activate", "revoke", "quarantine", "unquarantine"])
def test_only_granted_blocks_can_be_settled(move: str) -> None:
    pool = BlockPool(2, 16)
    ids = pool.allocate(1)
    with pytest.raises(KeyError):
        getattr(pool, move)(ids)


def test_check_finds_a_lost_block_and_a_wrong_owner() -> None:
    pool = BlockPool(2, 16)
    ids = pool.allocate(1)
    pool.check(ids)
    with pytest.raises(AssertionError, match="owners"):
        pool.check([])
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random use by well-behaved owners: the pool agrees with their own books."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, 1)
        self.chains = [hashes(5, bytes([salt])) for salt in range(3)]
        self.held: list[list[int]] = []
        self.granted: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.known: set[bytes] = set()

    @rule(chain=st.integers(0, 2), length=st.integers(1, 5))
    def compute(self, chain: int, length: int) -> None:
        """A request that takes what is cached, computes the rest and caches it."""
        keys = self.chains[chain][:length]
        ids = self.pool.match_prefix(keys)
        if length - len(ids) > self.pool.available:
            self.pool.release(ids)
            return
        ids += self.pool.allocate(length - len(ids))
        for block, key in zip(ids, keys, strict=True):
            self.pool.register(block, key)
        self.held.append(ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), share=st.booleans())
    def share_or_release(self, data: st.DataObject, share: bool) -> None:
        ids = data.draw(st.sampled_from(self.held))
        if share:
            self.pool.share(ids)
            self.held.append(ids.copy())
        else:
            self.held.remove(ids)
            self.pool.release(ids)

    @rule(count=st.integers(0, 4))
    def grant(self, count: int) -> None:
        if count <= self.pool.available:
            self.granted.append(self.pool.grant(count))

    @precondition(lambda self: self.granted)
    @rule(how=st.sampled_from(["activate", "revoke", "quarantine"]))
    def settle(self, how: str) -> None:
        ids = self.granted.pop()
        getattr(self.pool, how)(ids)
        if how == "activate":
            self.held.append(ids)
        elif how == "quarantine":
            self.quarantined.append(ids)

    @precondition(lambda self: self.quarantined)
    @rule()
    def unquarantine(self) -> None:
        self.pool.unquarantine(self.quarantined.pop())

    @invariant()
    def the_books_agree(self) -> None:
        self.pool.check([block for ids in self.held for block in ids])
        counts = self.pool.counts()
        assert counts.granted == sum(map(len, self.granted))
        assert counts.quarantined == sum(map(len, self.quarantined))
        assert counts.free + counts.cached == self.pool.available
        changes = self.pool.take_prefix_changes()
        self.known = (self.known - set(changes.lost)) | set(changes.gained)
        assert self.known == set(self.pool.prefixes())


TestPool: Any = PoolMachine.TestCase
TestPool.settings = settings(stateful_step_count=20)


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_a_match_is_always_a_prefix_that_was_computed(tokens: list[int], size: int) -> None:
    pool = BlockPool(12, size)
    chain = list(prefix_hashes(tokens, size))
    cached_chain(pool, chain)
    other = [*tokens[: len(tokens) // 2], 9]
    matched = pool.match_prefix(prefix_hashes(other, size))
    assert len(matched) == (len(tokens) // 2) // size
