"""A container's log: a file that the process writes by itself and that stays bounded."""

import os
import shutil
from pathlib import Path

MAX_BYTES = 8 << 20
_MESSAGE_BYTES = 2048
_READ_BYTES = 1 << 16


class LogFile:
    """Appended to by one run of the container after the other.

    The process has the file itself, not a pipe: it never blocks on us, and what it says
    last is there even when we are gone.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._run_start = 0
        self._followed = 0
        self._partial = b""

    def open_run(self) -> int:
        """A descriptor for the next run of the container; the caller closes it."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        self._run_start = self._followed = os.fstat(descriptor).st_size
        self._partial = b""
        return descriptor

    def last_line(self) -> str:
        """The last line of the present run that isn't blank: a crash's own words."""
        size = self._size()
        start = max(self._run_start, size - _MESSAGE_BYTES)
        lines = self._read(start, size - start).decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def new_lines(self) -> list[str]:
        """Whole lines of the present run that nobody has asked for yet."""
        data = self._partial + self._read(self._followed, _READ_BYTES)
        self._followed += len(data) - len(self._partial)
        *lines, self._partial = data.split(b"\n")
        if len(self._partial) > _READ_BYTES:
            self._partial = b""
        return [line.decode(errors="replace") for line in lines]

    def trim(self) -> None:
        """Moves a log that is too long to `….1` and goes on with an empty file."""
        size = self._size()
        if size <= self._max_bytes:
            return
        with (
            self.path.open("rb") as log,
            self.path.with_name(self.path.name + ".1").open("wb") as kept,
        ):
            log.seek(size - self._max_bytes)
            shutil.copyfileobj(log, kept, _READ_BYTES)  # in pieces: who trims stays small
        os.truncate(self.path, 0)  # the writer appends, so it goes on at the beginning
        self._run_start = self._followed = 0

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def _read(self, start: int, count: int) -> bytes:
        if count <= 0:
            return b""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(count)
        except FileNotFoundError:
            return b""
