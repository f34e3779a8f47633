"""Stores of KV blocks beyond the pool: rows of slots in host memory or in one file.

A file's slot is a header page and the block. The header is written last and erased first, so
a slot that was being written when the process died holds nothing; checksums over header and
block tell everything else that may have happened to a disk. One file of a fixed number of
slots is bounded by what it is: no temporary files, nothing to collect.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

_PAGE = 4096
_MAGIC = b"PDKVSLT1"
_HEADER = struct.Struct("<8s16s16sQQQ")
"""Magic, layout hash, key, bytes of the block, its checksum, time of writing (ns, wall clock)."""
_CHECK = struct.Struct("<Q")  # behind the header: its checksum
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def disk_slot_bytes(block_bytes: int) -> int:
    """What a block takes on disk."""
    return _PAGE + -(-block_bytes // _PAGE) * _PAGE


class Corrupt(Exception):
    """A slot doesn't hold what it should."""


class HostSlots:
    """Slots in memory of our own, touched as they are first used."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.slots = slots
        self._bytes = block_bytes
        self._mapping = mmap.mmap(-1, slots * block_bytes)
        self._view = memoryview(self._mapping)

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, to read and to write."""
        return self._view[slot * self._bytes : (slot + 1) * self._bytes]

    def close(self) -> None:
        self._view.release()
        with contextlib.suppress(BufferError):  # somebody has a view: it goes with that one
            self._mapping.close()


@dataclass(frozen=True, slots=True)
class Found:
    """A slot that holds a block. `age_s`: since it was written."""

    slot: int
    key: bytes
    age_s: float


class DiskSlots:
    """Slots in a file, which is locked: a second process gets an OSError that says so.

    Calls block; one thread at a time may read or write.
    """

    def __init__(self, folder: Path, slots: int, block_bytes: int, layout_hash: str) -> None:
        """Takes the file of this layout over, whatever is in it, and deletes other layouts'."""
        self._bytes = block_bytes
        self._stride = disk_slot_bytes(block_bytes)
        self._layout = layout_hash.encode()[:16].ljust(16, b"\0")
        self.slots = slots
        self.path = folder / f"kv-{layout_hash}.slots"
        self._file = self._open()

    def _open(self) -> int:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._claim(file)
            for other in folder.glob("kv-*.slots"):
                if other != self.path:
                    other.unlink()
            os.ftruncate(file, self.slots * self._stride)
        except BaseException:
            os.close(file)
            raise
        return file

    def _claim(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = "another worker keeps its KV there; give each worker a folder of its own"
            raise OSError(errno.EBUSY, message, str(self.path)) from error

    @property
    def gone(self) -> bool:
        """Somebody deleted the file, put another in its place, or barred the way to it. The
        open one goes on, and nobody would find it after a restart."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except OSError:
            return True

    def remake(self) -> None:
        """A new file instead of one that is `gone`, with nothing in it that is known here.
        OSError when it can't be had; then the old one stays open."""
        file = self._open()
        os.close(self._file)
        self._file = file
        for found in list(self.scan()):  # somebody else's file of our layout
            self.erase(found.slot)

    def scan(self) -> Iterator[Found]:
        """Slots with a sound header, in no order. Their blocks are checked when read."""
        now = time.time_ns()
        for slot in range(self.slots):
            try:
                key, _, _, written_ns = self._header(slot)
            except Corrupt:
                continue
            yield Found(slot, key, max(0, now - written_ns) / 1e9)

    def write(self, slot: int, key: bytes, block: memoryview) -> None:
        """OSError when the disk is full or broken, or the file `gone`; then the slot holds
        nothing."""
        if self.gone:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted", str(self.path))
        self.erase(slot, keep_block=True)
        offset = slot * self._stride
        _write_all(self._file, block, offset + _PAGE)
        check = xxhash.xxh3_64_intdigest(block)
        head = _HEADER.pack(_MAGIC, self._layout, key, self._bytes, check, time.time_ns())
        page = head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))
        _write_all(self._file, memoryview(page), offset)

    def read(self, slot: int, key: bytes, into: memoryview) -> None:
        """The block of `key`. Raises Corrupt when the slot holds anything else, or OSError;
        `into` holds garbage then."""
        found, size, check, _ = self._header(slot)
        if found != key or size != into.nbytes:
            raise Corrupt(f"slot {slot} holds another block")
        if _read_all(self._file, into, slot * self._stride + _PAGE) < into.nbytes:
            raise Corrupt(f"slot {slot} is cut short")
        if xxhash.xxh3_64_intdigest(into) != check:
            raise Corrupt(f"slot {slot}: the block's checksum is wrong")

    def erase(self, slot: int, *, keep_block: bool = False) -> None:
        """The slot holds nothing any more; its block's bytes go back to the file system
        unless they're about to be written again."""
        offset = slot * self._stride
        _write_all(self._file, memoryview(bytes(_HEADER.size + _CHECK.size)), offset)
        if not keep_block:
            mode = _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE
            begin, size = ctypes.c_long(offset), ctypes.c_long(self._stride)
            if _LIBC.fallocate(self._file, mode, begin, size):  # no holes there: overwrite
                _write_all(self._file, memoryview(bytes(self._stride)), offset)

    def _header(self, slot: int) -> tuple[bytes, int, int, int]:
        page = bytearray(_HEADER.size + _CHECK.size)
        if _read_all(self._file, memoryview(page), slot * self._stride) < len(page):
            raise Corrupt(f"slot {slot} is cut short")
        head = bytes(page[: _HEADER.size])
        magic, layout, key, size, check, written_ns = _HEADER.unpack(head)
        if magic != _MAGIC or _CHECK.pack(xxhash.xxh3_64_intdigest(head)) != page[_HEADER.size :]:
            raise Corrupt(f"slot {slot} holds nothing")
        if layout != self._layout:
            raise Corrupt(f"slot {slot} holds a block of another layout")
        return key, size, check, written_ns

    def close(self) -> None:
        os.close(self._file)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _read_all(file: int, into: memoryview, offset: int) -> int:
    """Bytes read: fewer than asked for at the file's end."""
    total = 0
    while total < into.nbytes:
        done = os.preadv(file, [into[total:]], offset + total)
        if not done:
            break
        total += done
    return total
