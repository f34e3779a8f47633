"""The books of prefixes that go from pool to pool: reserve, attach, give up, pin."""

import random

import pytest

from pd_core.kv import prefix_hashes
from pd_engine.blocks import BlockPool
from pd_engine.copies import Copies
from pd_engine.holdings import Holdings
from pd_engine.types import RequestKey

BLOCK_TOKENS = 4
KEY = (1, 1)
TOKENS = tuple(range(40))
HASHES = tuple(prefix_hashes(TOKENS, BLOCK_TOKENS))


def books(blocks: int = 12, most: int = 8) -> tuple[Copies, Holdings]:
    held = Holdings(BlockPool(blocks, BLOCK_TOKENS))
    return Copies(held, most), held


def fill(held: Holdings, hashes: tuple[bytes, ...]) -> None:
    """As if somebody had computed them."""
    blocks = held.pool.allocate(len(hashes))
    for block, key in zip(blocks, hashes, strict=True):
        held.pool.register(block, key)
    held.pool.release(blocks)


def test_what_is_reserved_is_a_prefix_only_when_it_has_come() -> None:
    copies, held = books()
    fill(held, HASHES[:2])
    reserved = copies.reserve(KEY, HASHES[:6])
    assert reserved is not None
    assert (len(reserved.block_ids), reserved.prefix_blocks, reserved.complete) == (6, 2, False)
    assert held.pool.counts().granted == 4
    assert held.pool.match_prefix(HASHES[2:3]) == []
    held.check()
    copies.attach(KEY)
    held.check()
    assert held.pool.counts().cached == 6
    assert tuple(held.pool.match_prefix(HASHES[:6])) == reserved.block_ids


def test_a_prefix_that_is_there_is_complete() -> None:
    copies, held = books()
    fill(held, HASHES[:3])
    reserved = copies.reserve(KEY, HASHES[:3])
    assert reserved is not None
    assert reserved.complete
    copies.attach(KEY)
    held.check()
    assert not held.busy


def test_nothing_is_evicted_where_there_is_no_room() -> None:
    copies, held = books(blocks=5)
    fill(held, HASHES[:2])
    assert copies.reserve(KEY, HASHES[:6]) is None
    assert held.pool.counts().cached == 2
    held.check()


def test_its_own_beginning_isnt_evicted_for_it() -> None:
    copies, held = books(blocks=6)
    fill(held, HASHES[:2])
    fill(held, (b"x" * 16, b"y" * 16))
    reserved = copies.reserve(KEY, HASHES[:6])
    assert reserved is not None
    assert reserved.prefix_blocks == 2
    held.check()


def test_what_somebody_else_computed_meanwhile_stays() -> None:
    copies, held = books()
    copies.reserve(KEY, HASHES[:3])
    fill(held, HASHES[:2])
    first = held.pool.block_of(HASHES[0])
    copies.attach(KEY)
    held.check()
    assert held.pool.block_of(HASHES[0]) == first
    assert held.pool.counts().cached == 3


@pytest.mark.parametrize("quarantine", [False, True])
def test_given_up(quarantine: bool) -> None:
    copies, held = books()
    copies.reserve(KEY, HASHES[:3])
    copies.give_up(KEY, quarantine)
    held.check()
    assert held.pool.counts().quarantined == (3 if quarantine else 0)
    copies.give_up(KEY)
    copies.release_quarantine(KEY)
    held.check()
    assert held.pool.counts().free == 12
    assert not held.busy


def test_what_is_pinned_isnt_evicted() -> None:
    copies, held = books(blocks=4)
    fill(held, HASHES[:3])
    blocks = copies.pin(KEY, HASHES[:3])
    assert blocks is not None
    assert held.pool.available == 1
    held.check()
    copies.unpin(KEY)
    assert held.pool.available == 4
    held.check()


def test_a_prefix_with_a_hole_isnt_given() -> None:
    copies, held = books()
    fill(held, (HASHES[0], HASHES[2]))
    assert copies.pin(KEY, HASHES[:3]) is None
    held.check()
    assert not held.busy


def test_so_many_at_once() -> None:
    copies, held = books(most=2)
    copies.reserve((1, 1), HASHES[:1])
    fill(held, HASHES[2:3])
    assert not copies.full
    copies.pin((1, 2), HASHES[2:3])
    assert copies.full


def test_any_order_keeps_every_block_accounted_for() -> None:
    draw = random.Random(7)
    copies, held = books(blocks=10, most=100)
    taking: list[RequestKey] = []
    giving: list[RequestKey] = []
    doomed: list[RequestKey] = []
    for number in range(4000):
        key = (1, number)
        start, count = draw.randrange(3), draw.randrange(1, 6)
        chain = tuple(prefix_hashes(TOKENS[start:], BLOCK_TOKENS))[:count]
        match draw.randrange(7):
            case 0 | 1 if copies.reserve(key, chain) is not None:
                taking.append(key)
            case 2 if copies.pin(key, chain) is not None:
                giving.append(key)
            case 3 if taking:
                copies.attach(taking.pop(draw.randrange(len(taking))))
            case 4 if taking:
                key = taking.pop(draw.randrange(len(taking)))
                if draw.random() < 0.5:
                    copies.give_up(key, quarantine=True)
                    doomed.append(key)
                else:
                    copies.give_up(key)
            case 5 if giving:
                copies.unpin(giving.pop(draw.randrange(len(giving))))
            case 6 if doomed:
                copies.release_quarantine(doomed.pop())
        held.check()
    for key in taking:
        copies.give_up(key)
    for key in giving:
        copies.unpin(key)
    for key in doomed:
        copies.release_quarantine(key)
    held.check()
    assert not held.busy
    assert held.pool.available == 10
