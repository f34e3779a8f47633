"""What a running `up` leaves for other commands to read, and how they know it still runs."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATE, _LOCK = "state.json", "lock"
DECISIONS = "scaling.jsonl"
"""Among a cluster's logs: why its pools have the sizes that they have."""
_MEMORY_PREFIX = "pdcluster-"


class AlreadyRunning(Exception):
    """Another `up` has the cluster of this name."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that no later one can be taken for: pids come again, start times don't."""

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """None when there is no such process, or only what is left of it."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else cls(pid, fields[19])

    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self


def state_root() -> Path:
    """$XDG_STATE_HOME/pdcluster, by default below ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "pdcluster"


def cache_root() -> Path:
    """$XDG_CACHE_HOME/pdcluster, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pdcluster"


def write_json(path: Path, value: object) -> None:
    """Readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)


class MemoryFolder:
    """A folder on /dev/shm for volumes in memory. Its name tells whose it is, so that what
    a killed `up` left is found and removed by the next one."""

    def __init__(self, name: str, root: Path = Path("/dev/shm")) -> None:
        for left in root.glob(f"{_MEMORY_PREFIX}*"):
            _, pid, started = left.name.rsplit("-", 2)
            if not ProcessId(int(pid), started).alive():
                shutil.rmtree(left, ignore_errors=True)
        me = _myself()
        self.path = root / f"{_MEMORY_PREFIX}{name}-{me.pid}-{me.started}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _myself() -> ProcessId:
    me = ProcessId.of(os.getpid())
    assert me is not None
    return me


class StateFolder:
    """The folder of one cluster, locked by the `up` that runs it."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            owner = next((item for item in running(root) if item["name"] == name), None)
            by = f" (pid {owner['pid']})" if owner else ""
            raise AlreadyRunning(
                f'PDCluster "{name}" is running already{by}; '
                f"edit its file, if it has one, or end it with: pdcluster down {name}"
            ) from None
        self._clear()

    def _clear(self) -> None:
        """Removes what an `up` left that was killed."""
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink(missing_ok=True)

    def write(self, state: Mapping[str, Any]) -> None:
        me = _myself()
        write_json(self.path / _STATE, {"pid": me.pid, "pid_started": me.started, **state})

    def close(self) -> None:
        """Only the logs stay, until the next `up` of this name."""
        for entry in self.path.iterdir():
            if entry.is_dir() and entry.name != "logs":
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.is_file() and entry.name != _LOCK:
                entry.unlink(missing_ok=True)
        os.close(self._lock)


def running(root: Path) -> Iterator[dict[str, Any]]:
    """The states of all clusters whose `up` is alive, by name."""
    for path in sorted(root.glob(f"*/{_STATE}")):
        try:
            state = json.loads(path.read_text())
            owner = ProcessId(int(state["pid"]), str(state["pid_started"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if owner.alive():
            yield state
