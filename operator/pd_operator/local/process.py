"""One child process: in a session of its own, and never outliving us."""

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class StartFailed(Exception):
    """The program can't be started at all."""


def _die_with(parent: int) -> Callable[[], None]:
    """Runs in the child before it becomes the program: the kernel kills it when we end."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # we ended before prctl
            os._exit(1)

    return prepare


class Process:
    """A running child. Must be made in the thread of the event loop, which has to be the
    main thread: the kernel ties the child's life to the thread that made it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: int) -> None:
        try:
            self._popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
                preexec_fn=_die_with(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartFailed(f"{argv[0]}: {error}") from error
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError as error:
            self._popen.kill()
            self._popen.wait()
            raise StartFailed(f"{argv[0]}: can't be watched ({error}); use Linux 5.3") from error
        loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return not self._ended.done()

    def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # What it left behind goes with it. Before the reaping the group's id is still its own.
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        code = self._popen.wait()
        if not self._ended.done():
            self._ended.set_result(code if code >= 0 else 128 - code)

    async def wait(self) -> int:
        """Its exit code; 128 + the signal's number where a signal ended it."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """SIGTERM to the process alone, as a container runtime does."""
        if self.running:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to it and all that it started."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    async def stop(self, grace_s: float, hurry: asyncio.Event, last_words_s: float = 0.0) -> int:
        """SIGTERM, then SIGKILL after the grace period, or at once when `hurry` is set. With
        `last_words_s`, SIGTERM once more so long before SIGKILL: who drains (routers do) then
        tells clients that their answers end here."""
        self.terminate()
        hurried = asyncio.create_task(hurry.wait())
        try:
            waits = {asyncio.ensure_future(self.wait()), hurried}
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait(waits, timeout=grace_s - last_words_s, return_when=first)
            if last_words_s and self.running and not hurry.is_set():
                self.terminate()
                await asyncio.wait(waits, timeout=last_words_s, return_when=first)
        finally:
            hurried.cancel()
        self.kill()
        return await self.wait()
