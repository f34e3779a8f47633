"""Copies KV from memory to memory and hashes it, each in a thread: the event loop has its turn
meanwhile, and what is copied is hashed by another core while it is still in a cache.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

import numpy as np
import xxhash

_PIECE_BYTES = 256 * 1024
"""Copied at once: then it can be hashed, and nothing of it is in any but the largest cache."""
_IN_PLACE_BYTES = 512 * 1024
"""Threads don't pay for less."""

Pair = tuple[memoryview, memoryview]
"""Where to, and from where; of one length."""
_Through = SimpleQueue[memoryview | None]


class Copier:
    """One at a time of each: who comes later waits."""

    def __init__(self, name: str) -> None:
        # Both take their work in the same order, so neither waits for the other's next.
        self._copying = ThreadPoolExecutor(1, f"{name}-copy")
        self._hashing = ThreadPoolExecutor(1, f"{name}-hash")

    async def copy(self, source: Sequence[memoryview], target: Sequence[memoryview]) -> int:
        """Bytes in order, whatever the pieces on both sides are -> xxh3_64 of the target.

        When it has returned, or raised, nothing is written any more.
        """
        pairs = list(paired(source, target))
        if sum(map(len, target)) <= _IN_PLACE_BYTES:
            return _in_place(pairs)
        through, stop = _Through(), threading.Event()
        copied = self._copying.submit(_copy, pairs, through, stop)
        hashed = self._hashing.submit(_hash, through)
        try:
            await asyncio.wrap_future(copied)
            return await asyncio.wrap_future(hashed)
        finally:
            stop.set()
            if copied.cancel():
                through.put(None)
            else:
                wait([copied])  # it ends within a piece: less than the loop waits elsewhere

    def hasher(self) -> "Hasher":
        """For what comes here in other ways."""
        return Hasher(self._hashing)

    def close(self) -> None:
        """Nobody copies any more."""
        self._copying.shutdown()
        self._hashing.shutdown()


class Hasher:
    """xxh3_64 of what is added, in that order, by a thread that only reads."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._hasher = xxhash.xxh3_64()
        self._last: Future[None] | None = None

    async def add(self, views: Sequence[memoryview]) -> None:
        """Returns when all but these are hashed."""
        before, self._last = self._last, self._threads.submit(self._add, views)
        if before is not None:
            await asyncio.wrap_future(before)

    async def digest(self) -> int:
        if self._last is not None:
            await asyncio.wrap_future(self._last)
        return self._hasher.intdigest()

    def _add(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._hasher.update(view)


def paired(source: Sequence[memoryview], target: Sequence[memoryview]) -> Iterator[Pair]:
    """Pieces of both that belong together."""
    pieces = iter(source)
    left = memoryview(b"")
    for whole in target:
        done = 0
        while done < len(whole):
            if not left:
                left = next(pieces)
            size = min(len(left), len(whole) - done, _PIECE_BYTES)
            yield whole[done : done + size], left[:size]
            left = left[size:]
            done += size


def _in_place(pairs: Sequence[Pair]) -> int:
    hasher = xxhash.xxh3_64()
    for into, piece in pairs:
        into[:] = piece
        hasher.update(into)
    return hasher.intdigest()


def _copy(pairs: Sequence[Pair], through: _Through, stop: threading.Event) -> None:
    try:
        for into, piece in pairs:
            if stop.is_set():
                return
            # numpy lets other threads run meanwhile; a memoryview's own copy doesn't.
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(piece, np.uint8))
            through.put(into)
    finally:
        through.put(None)


def _hash(through: _Through) -> int:
    hasher = xxhash.xxh3_64()
    while (piece := through.get()) is not None:
        hasher.update(piece)
    return hasher.intdigest()
