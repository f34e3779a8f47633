"""A file of lines that stays bounded: the newest ones are in it or in the one before."""

from pathlib import Path

LIMIT_BYTES = 4 << 20


class Journal:
    """`PATH`, and `PATH.1` for what was full. What can't be written is lost, not raised: no
    decision waits for a full disk."""

    def __init__(self, path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes

    def clear(self) -> None:
        for path in (self._path, _before(self._path)):
            path.unlink(missing_ok=True)

    def add(self, line: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                full = file.tell() > self._limit_bytes
            if full:
                self._path.replace(_before(self._path))
        except OSError:
            return


def lines(path: Path) -> list[str]:
    """All that there are, oldest first."""
    found: list[str] = []
    for one in (_before(path), path):
        if one.exists():
            found += one.read_text(encoding="utf-8", errors="replace").splitlines()
    return found


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".1")
