"""The cluster's processes: those that die with us, and those that outlive a command."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 10.0
# Those that outlive us: forgetting one would warn that it still runs, which is meant.
_OUTLIVING: list[subprocess.Popen[bytes]] = []
TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be: its name, its arguments, where its output goes."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] | None = None  # None: ours


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in the child before it becomes the program: the kernel kills it when we end."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we ended before prctl
            os._exit(1)

    return prepare


def start(command: Command, *, outlive: bool = False) -> subprocess.Popen[bytes]:
    """Starts it in a session of its own. Unless it's to outlive us, the kernel kills it as
    soon as the thread ends that calls this: call it in the main thread."""
    command.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with command.log.open("ab") as log:
            process = subprocess.Popen(
                command.argv,
                env=command.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=None if outlive else _die_with(os.getpid()),
            )
    except OSError as error:
        raise ClusterError(f"{command.name} can't be started: {error}") from error
    if outlive:
        _OUTLIVING.append(process)
    return process


class Child:
    """A process that dies with us, that tests kill, freeze and start again."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        if self._popen is None or self._popen.poll() is not None:
            raise ClusterError(f"{self.command.name} doesn't run:\n{self.tail()}")
        return self._popen.pid

    def start(self) -> None:
        if not self.running:
            self._popen = start(self.command)

    def check(self) -> None:
        """Raises with the log's end when it has ended."""
        if self._popen is not None and self._popen.poll() is not None:
            code = self._popen.returncode
            raise ClusterError(f"{self.command.name} ended with {code}:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL to it and what it started; returns when it's gone."""
        if self._popen is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(timeout=STOP_GRACE_S)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, then SIGKILL after the grace."""
        if self._popen is not None and self.running:
            self._popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=grace_s)
        self.kill()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def tail(self) -> str:
        return tail(self.command.log)


def tail(log: Path, size: int = TAIL_BYTES) -> str:
    """The end of a log, for messages."""
    if not log.exists():
        return "(no output)"
    data = log.read_bytes()[-size:].decode(errors="replace").strip()
    return data or "(no output)"


# ---- processes that another command ends --------------------------------------------


def started_at(pid: int) -> int | None:
    """When the kernel started it, in its own ticks: with the pid, who it is. None: gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def alive(pid: int, started: int) -> bool:
    return started_at(pid) == started


def end(processes: Sequence[tuple[int, int]], grace_s: float = STOP_GRACE_S) -> None:
    """SIGTERM to all, SIGKILL after the grace to those still there. Never to another process
    that got the same number."""
    for number, sent in ((signal.SIGTERM, grace_s), (signal.SIGKILL, STOP_GRACE_S)):
        for pid, started in processes:
            if alive(pid, started):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + sent
        while any(alive(*one) for one in processes) and time.monotonic() < deadline:
            _reap([pid for pid, _ in processes])
            time.sleep(0.05)
    left = [pid for pid, started in processes if alive(pid, started)]
    if left:
        raise ClusterError(f"these processes can't be ended: {left}")


def _reap(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
