"""Which slot of a bounded store is whose, and what leaves it first. Pure.

A store beyond the KV pool (host memory, disk) is a row of slots of one block each; a `Shelf` is
its index, by a block's prefix hash. Each slot is free, reserved (somebody writes it, nobody
finds it) or holds one block; what was used longest ago leaves first, and nothing that is being
read leaves at all.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Block:
    slot: int
    used: float
    readers: int = 0


class Shelf:
    """Slots run from 0 to `slots` - 1. Times are seconds on one clock, the caller's."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a shelf of {slots} slots")
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._reserved: set[int] = set()
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # used longest ago comes first

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        """From what was used longest ago on."""
        return iter(self._blocks)

    @property
    def room(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    # ---- writing ---------------------------------------------------------------------

    def reserve(self) -> tuple[int, bytes | None] | None:
        """A slot to write, and whose block had to leave for it. None when all are in use."""
        if self._free:
            slot, gone = self._free.pop(), None
        else:
            gone = self.next_to_leave()
            if gone is None:
                return None
            slot = self._blocks.pop(gone).slot
        self._reserved.add(slot)
        return slot, gone

    def next_to_leave(self) -> bytes | None:
        """Whose slot a full shelf would give away."""
        return next((key for key, block in self._blocks.items() if not block.readers), None)

    def commit(self, slot: int, key: bytes, now: float) -> None:
        """The reserved slot holds this block now, which nobody else may hold."""
        self._reserved.remove(slot)
        if key in self._blocks:
            self._free.append(slot)
            self.touch(key, now)
            return
        self._blocks[key] = _Block(slot, now)

    def abandon(self, slot: int) -> None:
        """The reserved slot holds nothing."""
        self._reserved.remove(slot)
        self._free.append(slot)

    def restore(self, slot: int, key: bytes, used: float) -> None:
        """What a free slot was found to hold, in the order of its use. ValueError where it's
        known already."""
        if key in self._blocks or slot not in self._free:
            raise ValueError(f"slot {slot}: its block, or the slot, is taken")
        self._free.remove(slot)
        self._blocks[key] = _Block(slot, used)

    # ---- reading ---------------------------------------------------------------------

    def pin(self, key: bytes, now: float | None) -> int:
        """The block's slot, which stays as it is until `unpin`. Without a time that is no use
        of it: somebody only copies it. KeyError where it isn't."""
        block = self._blocks[key]
        block.readers += 1
        if now is not None:
            self.touch(key, now)
        return block.slot

    def unpin(self, key: bytes) -> None:
        block = self._blocks[key]
        if not block.readers:
            raise AssertionError("a block is given back that nobody reads")
        block.readers -= 1

    def touch(self, key: bytes, now: float) -> None:
        self._blocks[key].used = now
        self._blocks.move_to_end(key)

    # ---- leaving ---------------------------------------------------------------------

    def drop(self, key: bytes) -> int | None:
        """Frees its slot, and tells which; None while it's read."""
        block = self._blocks[key]
        if block.readers:
            return None
        del self._blocks[key]
        self._free.append(block.slot)
        return block.slot

    def expired(self, before: float) -> list[bytes]:
        """Blocks that were last used before then and that nobody reads."""
        found = []
        for key, block in self._blocks.items():
            if block.used >= before:
                break
            if not block.readers:
                found.append(key)
        return found

    def check(self) -> None:
        """Raises AssertionError unless each slot is in exactly one state."""
        held = [block.slot for block in self._blocks.values()]
        if sorted([*self._free, *self._reserved, *held]) != list(range(self.slots)):
            raise AssertionError("slots are lost or have two states")
        used = [block.used for block in self._blocks.values()]
        if used != sorted(used):
            raise AssertionError("blocks are out of order")
