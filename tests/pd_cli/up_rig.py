"""A running `up` with fake containers in a test: its lines, its file, its processes."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.pd_operator.objects import document
from tests.ports import free_port

FAKE_UP = str(Path(__file__).with_name("fake_up.py"))
ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engine_env(**variables: str) -> dict[str, Any]:
    """A pool's template with variables for its fake engine."""
    env = [{"name": name, "value": value} for name, value in variables.items()]
    return {"spec": {"containers": [{"name": "engine", "env": env}]}}


@dataclass
class Up:
    """`process` is `up` itself; `printed` all of its lines so far."""

    folder: Path
    port: int
    process: asyncio.subprocess.Process
    printed: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def file(self) -> Path:
        return self.folder / "chat.yaml"

    @property
    def env(self) -> dict[str, str]:
        return environment(self.folder)

    def state(self) -> dict[str, Any]:
        path = self.folder / "pdcluster" / "chat" / "state.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"pods": []}
        return found

    def pids(self) -> list[int]:
        return [pod["pid"] for pod in self.state()["pods"] if pod["pid"]]

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.printed.append(line.decode().rstrip("\n"))
            self._news.set()
        self._news.set()

    async def line(self, pattern: str) -> str:
        """The first line, printed already or not, that the pattern finds."""
        found: str = await self.until(
            lambda: next((line for line in self.printed if re.search(pattern, line)), None)
        )
        return found

    async def until(self, condition: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (found := condition()):
                    self._news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await self._news.wait()
                return found
        except TimeoutError:
            text = "\n".join(self.printed[-40:])
            raise AssertionError(f"didn't happen; up printed:\n{text}") from None

    async def ready(self) -> None:
        await self.line(rf"^ready: http://127\.0\.0\.1:{self.port}/v1$")

    def write(self, body: Any) -> None:
        """Replaces the file as an editor does."""
        text = body if isinstance(body, str) else yaml.safe_dump(body)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.file)

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return await self.ended()


def environment(folder: Path) -> dict[str, str]:
    """Commands find the state of this test's clusters only."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    pythonpath = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "XDG_STATE_HOME": str(folder), "PYTHONPATH": pythonpath}


async def start(folder: Path, port: int, name: str = "chat.yaml") -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, FAKE_UP, str(folder / name), str(port), str(folder)),
        env=environment(folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def refused(folder: Path, port: int, name: str = "chat.yaml") -> tuple[int, str]:
    """The exit code and the words of an `up` that should end by itself."""
    async with asyncio.timeout(DEADLINE_S):
        process = await start(folder, port, name)
        said, _ = await process.communicate()
        return await process.wait(), said.decode()


@asynccontextmanager
async def up(folder: Path, **changes: Any) -> AsyncIterator[Up]:
    """A cluster named chat; whatever happens, nothing of it is left."""
    (folder / "chat.yaml").write_text(yaml.safe_dump(document(**changes)))
    port = free_port()
    running = Up(folder, port, await start(folder, port))
    reading = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        if running.process.returncode is None:
            running.process.kill()
        await running.process.wait()
        await reading


async def pdcluster(folder: Path, *arguments: str) -> tuple[int, str]:
    """A `pdcluster` command to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pd_cli.main", *arguments),
        env=environment(folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(DEADLINE_S):
        said, _ = await process.communicate()
        return await process.wait(), said.decode()
