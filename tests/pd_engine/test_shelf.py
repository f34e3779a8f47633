"""Shelves: each slot in one state, what was used longest ago leaves first, readers are safe."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pd_engine.shelf import Shelf


def put(shelf: Shelf, key: bytes, now: float = 0.0) -> bytes | None:
    """Who had to leave for it."""
    reserved = shelf.reserve()
    assert reserved is not None
    slot, gone = reserved
    shelf.commit(slot, key, now)
    return gone


def test_a_shelf_without_slots_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="a shelf of 0 slots"):
        Shelf(0)


def test_what_was_used_longest_ago_leaves_first() -> None:
    shelf = Shelf(2)
    assert put(shelf, b"a", 1) is None
    assert put(shelf, b"b", 2) is None
    shelf.touch(b"a", 3)
    assert put(shelf, b"c", 4) == b"b"
    assert list(shelf) == [b"a", b"c"]


def test_what_is_read_stays() -> None:
    shelf = Shelf(2)
    put(shelf, b"a", 1)
    put(shelf, b"b", 2)
    slot = shelf.pin(b"a", 3)
    assert shelf.drop(b"a") is None
    assert shelf.expired(10) == [b"b"]
    assert put(shelf, b"c", 4) == b"b"
    shelf.pin(b"c", 5)
    assert shelf.reserve() is None
    shelf.unpin(b"a")
    assert shelf.reserve() == (slot, b"a")
    shelf.unpin(b"c")
    with pytest.raises(AssertionError, match="nobody reads"):
        shelf.unpin(b"c")


def test_a_copy_is_no_use() -> None:
    shelf = Shelf(2)
    put(shelf, b"a", 1)
    put(shelf, b"b", 2)
    shelf.pin(b"a", None)
    shelf.unpin(b"a")
    assert list(shelf) == [b"a", b"b"]


def test_a_reserved_slot_is_found_by_nobody_until_it_is_written() -> None:
    shelf = Shelf(1)
    assert shelf.reserve() == (0, None)
    assert (len(shelf), shelf.room, shelf.reserve()) == (0, 0, None)
    shelf.abandon(0)
    assert shelf.room == 1


def test_two_writers_of_one_block_leave_one() -> None:
    shelf = Shelf(2)
    slots = [reserved[0] for reserved in (shelf.reserve(), shelf.reserve()) if reserved]
    for slot in slots:
        shelf.commit(slot, b"a", 1)
    assert (len(shelf), shelf.room) == (1, 1)


def test_what_was_found_is_taken_over_once() -> None:
    shelf = Shelf(3)
    shelf.restore(2, b"old", -5)
    shelf.restore(0, b"new", -1)
    assert list(shelf) == [b"old", b"new"]
    for slot, key in ((2, b"other"), (1, b"old")):
        with pytest.raises(ValueError, match="taken"):
            shelf.restore(slot, key, 0)
    assert shelf.expired(-1) == [b"old"]


class Shelves(RuleBasedStateMachine):
    """Any order of calls, against a plain list of what was used when."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(4)
        self.order: list[bytes] = []
        self.readers: list[bytes] = []
        self.reserved: list[int] = []
        self.now = 0.0

    keys = st.sampled_from([bytes([n]) for n in range(7)])

    @rule()
    def reserve(self) -> None:
        reserved = self.shelf.reserve()
        if reserved is None:
            assert all(key in self.readers for key in self.order)
            assert len(self.order) + len(self.reserved) == 4
            return
        slot, gone = reserved
        self.reserved.append(slot)
        if gone is not None:
            assert gone == next(key for key in self.order if key not in self.readers)
            self.order.remove(gone)

    @rule(key=keys)
    def commit(self, key: bytes) -> None:
        if self.reserved:
            self.now += 1
            self.shelf.commit(self.reserved.pop(), key, self.now)
            self.order = [one for one in self.order if one != key] + [key]

    @rule()
    def abandon(self) -> None:
        if self.reserved:
            self.shelf.abandon(self.reserved.pop())

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        self.now += 1
        if key in self.order:
            self.shelf.pin(key, self.now)
            self.readers.append(key)
            self.order.remove(key)
            self.order.append(key)
        else:
            with pytest.raises(KeyError):
                self.shelf.pin(key, self.now)

    @rule()
    def unpin(self) -> None:
        if self.readers:
            self.shelf.unpin(self.readers.pop())

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        if key in self.order:
            assert (self.shelf.drop(key) is None) == (key in self.readers)
            if key not in self.readers:
                self.order.remove(key)

    @invariant()
    def agrees(self) -> None:
        self.shelf.check()
        assert list(self.shelf) == self.order
        assert self.shelf.room == 4 - len(self.order) - len(self.reserved)


TestShelves = Shelves.TestCase
TestShelves.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
