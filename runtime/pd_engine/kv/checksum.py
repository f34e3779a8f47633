"""xxh3_64 of a payload, and the same while it is copied.

Compiled (csrc/), a byte is read once for its copy and its checksum, and written around the
caches: as fast as a copy alone. That takes pieces of whole stripes of 64 bytes, which blocks of
all models but toys are; anything else, and everything without a compiler, goes by xxhash.
Both give the same checksum.
"""

import ctypes
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash

from pd_engine.build import CHECKSUM

log = logging.getLogger(__name__)

_ABI = 1  # pd_checksum_abi
_STRIPE_BYTES = 64
_LEAST_BYTES = 241
"""Shorter inputs have algorithms of their own."""
_PAUSE_BYTES = 2 << 20
"""Copied before the loop's others have their turn: some 0.2 ms."""
_PLAIN_BYTES = 256 * 1024
"""Copied, then hashed while it is still in the core's cache."""

Pair = tuple[memoryview, memoryview]
"""(source, target), of one size."""


class Checksum(Protocol):
    """Of bytes in order."""

    def update(self, piece: memoryview) -> None: ...

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copies, and goes on with what is in the targets then."""
        ...

    def intdigest(self) -> int: ...


def checksum_of(*sides: Iterable[memoryview]) -> Checksum:
    """For a payload that lies in these pieces; with several sides (source, target) it is cut
    where pieces of either end."""
    library = compiled()
    if library is None:
        return _Plain()
    for side in sides:
        sizes = [len(piece) for piece in side]
        if sum(sizes) < _LEAST_BYTES or any(size % _STRIPE_BYTES for size in sizes):
            return _Plain()
    return _Compiled(library)


def checksum(slices: Sequence[memoryview]) -> int:
    """Of all slices, as if they were one."""
    made = checksum_of(slices)
    for piece in slices:
        made.update(piece)
    return made.intdigest()


def copy(
    source: Sequence[memoryview], target: Sequence[memoryview], through: Checksum
) -> Iterator[None]:
    """Bytes in order, whatever the pieces on both sides are. Pauses now and then."""
    batch: list[Pair] = []
    size = 0
    for pair in _matched(source, target):
        batch.append(pair)
        size += len(pair[0])
        if size >= _PAUSE_BYTES:
            through.copy(batch)
            batch, size = [], 0
            yield
    through.copy(batch)


def _matched(source: Sequence[memoryview], target: Sequence[memoryview]) -> Iterator[Pair]:
    pieces = iter(source)
    left = memoryview(b"")
    for whole in target:
        done = 0
        while done < len(whole):
            if not left:
                left = next(pieces)
            size = min(len(left), len(whole) - done, _PAUSE_BYTES)
            yield left[:size], whole[done : done + size]
            left = left[size:]
            done += size


class _Plain:
    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()

    def update(self, piece: memoryview) -> None:
        self._hasher.update(piece)

    def copy(self, pairs: Sequence[Pair]) -> None:
        for source, target in pairs:
            for start in range(0, len(source), _PLAIN_BYTES):
                piece = target[start : start + _PLAIN_BYTES]
                piece[:] = source[start : start + _PLAIN_BYTES]
                self._hasher.update(piece)

    def intdigest(self) -> int:
        return self._hasher.intdigest()


class _State(ctypes.Structure):
    """PdChecksum in csrc/checksum.cpp."""

    _fields_ = (
        ("sums", ctypes.c_uint64 * 8),
        ("held", ctypes.c_uint8 * _STRIPE_BYTES),
        ("length", ctypes.c_uint64),
    )


class _Compiled:
    """Calls let go of the interpreter: the step's thread goes on meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._state = _State()
        library.pd_checksum_begin(ctypes.byref(self._state))

    def update(self, piece: memoryview) -> None:
        self._add([(piece, None)])

    def copy(self, pairs: Sequence[Pair]) -> None:
        if any(len(source) != len(target) or target.readonly for source, target in pairs):
            raise ValueError("a copy between pieces that don't fit")
        self._add(pairs)

    def intdigest(self) -> int:
        return int(self._library.pd_checksum_end(ctypes.byref(self._state)))

    def _add(self, pieces: "Sequence[tuple[memoryview, memoryview | None]]") -> None:
        table, count = _table(pieces)
        self._library.pd_checksum_add(ctypes.byref(self._state), table, count)


def _table(pieces: "Sequence[tuple[memoryview, memoryview | None]]") -> tuple[object, int]:
    """PdPiece in csrc/checksum.cpp, so many of them."""
    found = [
        number
        for source, target in pieces
        if source
        for number in (_address(source), 0 if target is None else _address(target), len(source))
    ]
    return (ctypes.c_uint64 * len(found))(*found), len(found) // 3


def _address(view: memoryview) -> int:
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The library; None where it isn't built (the log says why)."""
    path = CHECKSUM.path()
    try:
        library = ctypes.CDLL(str(path))
        if library.pd_checksum_abi() != _ABI:
            raise OSError("it has another interface")
        library.pd_checksum_begin.argtypes = (ctypes.c_void_p,)
        library.pd_checksum_begin.restype = None
        library.pd_checksum_add.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)
        library.pd_checksum_add.restype = None
        library.pd_checksum_end.argtypes = (ctypes.c_void_p,)
        library.pd_checksum_end.restype = ctypes.c_uint64
        library.pd_checksum_variant.restype = ctypes.c_char_p
        library.pd_checksum_use.argtypes = (ctypes.c_char_p,)
    except (OSError, AttributeError) as error:
        log.info("checksums go by xxhash: %s (python -m pd_engine.build)", error)
        return None
    return library
