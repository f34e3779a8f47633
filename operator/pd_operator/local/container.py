"""One container's life: start, probes, restarts with back-off, the end."""

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pd_operator.local import environment, probes
from pd_operator.local.environment import ConfigError
from pd_operator.local.logs import LogFile
from pd_operator.local.process import Process, StartFailed
from pd_operator.local.volumes import Volumes
from pd_operator.podparts import Manifest
from pd_operator.status import timestamp

_FOLLOW_S = 0.2
_TRIM_S = 5.0
_NOT_STARTED = 128
"""The exit code of a run that never began."""
LAST_WORDS_S = 3.0
"""Of the time that a cluster's pods have to end: for routers to fail what still runs."""
HOPELESS = os.EX_CONFIG
"""The exit code of a worker whose model or settings have to be others."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A container port that is served at another address of this machine."""

    container: str
    port_name: str
    address: tuple[str, int]
    env: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long after the n-th end in a row the next run begins."""

    first_s: float = 0.5
    last_s: float = 30.0
    forget_after_s: float = 30.0
    """A run that lasts so long makes the next end the first one again."""

    def delay_s(self, ends_in_a_row: int) -> float:
        return min(self.last_s, self.first_s * 2.0 ** min(ends_in_a_row - 1, 30))


@dataclass(slots=True)
class PodContext:
    """What a pod's containers share."""

    pod: Manifest
    """The Pod object: metadata, spec, and status.podIP."""
    folder: Path
    logs: Path
    volumes: Volumes
    base_env: Mapping[str, str]
    publications: tuple[Publication, ...]
    backoff: Backoff
    hurry: asyncio.Event
    """Set when grace periods no longer count."""
    changed: Callable[[], None]
    say: Callable[[str, str], None]
    """(pod, text): something that a person wants to know."""
    output: Callable[[str, str], None]
    """(pod, line): a line that an init container printed, or what a container that starts says
    to its startup probe; "" when that is over."""
    gives_up: bool = False
    """Whether a container that ends as HOPELESS before it was ever ready stays ended."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])


class Container:
    """Runs its process again and again until `stop`, or until it gives up."""

    def __init__(self, spec: Manifest, context: PodContext) -> None:
        self._spec = spec
        self._context = context
        self.name = str(spec["name"])
        self.log = LogFile(context.logs / f"{context.name}.{self.name}.log")
        self.restarts = 0
        self.started = self.ready = False
        self.given_up = ""
        """Its last words, where it stays ended because no restart would help."""
        self._was_ready = False
        self._process: Process | None = None
        self._ends_in_a_row = 0
        self._stopping = asyncio.Event()
        self._kill_reason = ""
        self._began = ""
        self._state: Manifest = {"waiting": {"reason": "ContainerCreating"}}
        self._last_state: Manifest = {}
        published = {item.port_name: item.address for item in self._published()}
        self._startup, self._readiness, self._liveness = (
            probes.parse(spec, kind, context.pod["status"]["podIP"], published)
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process and self._process.running else None

    def document(self) -> dict[str, Any]:
        """Its entry in the pod's status."""
        return {
            "name": self.name,
            "image": self._spec.get("image", ""),
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "state": self._state,
            "lastState": self._last_state,
        }

    async def run(self) -> None:
        """Until `stop`, whatever the process does, or until it gives up."""
        while not self._stopping.is_set():
            if self._gives_up(await self._run_once()):
                return
            await self._pause()

    async def run_to_success(self) -> bool:
        """An init container: until it exits with 0 (True), or `stop`, or it gives up (False)."""
        while not self._stopping.is_set():
            code = await self._run_once()
            if code == 0:
                self.ready = True
                return True
            if self._gives_up(code):
                return False
            await self._pause()
        return False

    def _gives_up(self, code: int) -> bool:
        if not self._context.gives_up or code != HOPELESS or self._was_ready:
            return False
        self.given_up = str(self._last_state["terminated"]["message"]) or f"exit code {code}"
        self._context.changed()
        return True

    async def stop(self, grace_s: float, *, pre_stop: bool) -> None:
        """SIGTERM after the preStop pause, SIGKILL after the grace period. Without the pause the
        whole cluster goes, in less time than its pods have for a drain: then they're told when
        it's nearly over."""
        self._stopping.set()
        process = self._process
        if process is None or not process.running:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        hook = self._spec.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        if pre_stop:
            await self._sleep(min(grace_s, float(hook.get("seconds", 0))))
        last_words_s = 0.0 if pre_stop else min(LAST_WORDS_S, grace_s / 2)
        await process.stop(max(0.0, deadline - loop.time()), self._context.hurry, last_words_s)

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._context.hurry.wait()
        except TimeoutError:
            return

    async def _run_once(self) -> int:
        """One run of the process; its exit code."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._began = timestamp(datetime.now(UTC))
        self._kill_reason = ""
        try:
            process = self._process = self._start()
        except (ConfigError, StartFailed, OSError) as error:
            self._ended(_NOT_STARTED, str(error))
            self._ends_in_a_row += 1
            return _NOT_STARTED
        self._set_state({"running": {"startedAt": self._began}})
        watchers = [asyncio.create_task(self._probe(process)), asyncio.create_task(self._follow())]
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            self.started = self.ready = False
        self._read_output()
        lasted_s = loop.time() - began
        self._ends_in_a_row = (
            1 if lasted_s >= self._context.backoff.forget_after_s else self._ends_in_a_row + 1
        )
        self._ended(code, self._kill_reason or self.log.last_line())
        return code

    def _start(self) -> Process:
        context = self._context
        mounts = context.volumes.mounts(self._spec)
        variables = environment.container_env(self._spec, context.pod)
        spec = self._spec
        for published in self._published():
            variables[published.env] = f"{published.address[0]}:{published.address[1]}"
            spec = {**spec, "args": [*spec.get("args", []), *published.args]}
        argv = environment.command(spec, variables, mounts, sys.executable)
        mapped = {name: environment.map_paths(text, mounts) for name, text in variables.items()}
        context.folder.mkdir(parents=True, exist_ok=True)
        descriptor = self.log.open_run()
        try:
            return Process(argv, {**context.base_env, **mapped}, context.folder, descriptor)
        finally:
            os.close(descriptor)

    def _published(self) -> list[Publication]:
        return [item for item in self._context.publications if item.container == self.name]

    def _ended(self, code: int, message: str) -> None:
        terminated = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "message": message,
            "startedAt": self._began,
            "finishedAt": timestamp(datetime.now(UTC)),
        }
        self._last_state = {"terminated": terminated}
        self._set_state({"terminated": terminated})

    def _set_state(self, state: Manifest) -> None:
        self._state = state
        self._context.changed()

    async def _pause(self) -> None:
        """The back-off between two runs; short after a first end."""
        if self._stopping.is_set():
            return
        delay_s = self._context.backoff.delay_s(self._ends_in_a_row)
        ended = self._last_state["terminated"]
        how = f"ended, exit code {ended['exitCode']}"
        if ended["exitCode"] > _NOT_STARTED:  # its last words had no part in that
            how = f"was killed by signal {ended['exitCode'] - _NOT_STARTED}"
        elif ended["message"]:
            how += f": {ended['message']}"
        self._context.say(self._context.name, f"{self.name} {how}; starting again in {delay_s:g} s")
        if self._ends_in_a_row > 1 or ended["exitCode"] == _NOT_STARTED:
            message = f"back-off {delay_s:g} s restarting failed container {self.name}"
            self._set_state({"waiting": {"reason": "CrashLoopBackOff", "message": message}})
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            self.restarts += 1

    async def _follow(self) -> None:
        """Keeps the log bounded, and hands on what an init container says."""
        loop = asyncio.get_running_loop()
        trim_at = loop.time() + _TRIM_S
        while True:
            await asyncio.sleep(_FOLLOW_S if self._is_init() else _TRIM_S)
            self._read_output()
            if loop.time() >= trim_at:
                self.log.trim()
                trim_at = loop.time() + _TRIM_S

    def _read_output(self) -> None:
        if self._is_init():
            for line in self.log.new_lines():
                self._context.output(self._context.name, line)

    def _is_init(self) -> bool:
        return self._spec in self._context.pod["spec"].get("initContainers", [])

    async def _probe(self, process: Process) -> None:
        """Startup first; then readiness and liveness beside each other. Init containers
        have no probes: they are done when they end."""
        if self._is_init():
            return
        if self._startup and not await self._start_up(self._startup, process):
            return
        self.started = True
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_readiness(self._readiness, process.pid))
            if self._liveness:
                group.create_task(self._watch_liveness(self._liveness, process))

    async def _start_up(self, probe: probes.Probe, process: Process) -> bool:
        """Asks often, and counts time instead of failures."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + probe.initial_delay_s + probe.failures * probe.period_s
        try:
            while (problem := await probe.ask(process.pid)) is not None:
                self._context.output(self._context.name, problem)
                if loop.time() >= deadline:
                    await self._kill(probe, process, f"startup probe failed: {problem}")
                    return False
                await asyncio.sleep(min(probes.EAGER_S, probe.period_s))
        finally:
            self._context.output(self._context.name, "")
        return True

    async def _watch_readiness(self, probe: probes.Probe | None, pid: int) -> None:
        if probe is None:
            self._set_ready(True)
            return
        while await probe.ask(pid) is not None:
            await asyncio.sleep(min(probes.EAGER_S, probe.period_s))
        self._set_ready(True)
        streak = probes.Streak(probe.failures, probe.successes, good=True)
        async with aclosing(probe.answers(pid)) as answers:
            async for problem in answers:
                self._set_ready(streak.record(problem is None))

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._was_ready = self._was_ready or ready
            self._context.say(self._context.name, "ready" if ready else "not ready")
            self._context.changed()

    async def _watch_liveness(self, probe: probes.Probe, process: Process) -> None:
        streak = probes.Streak(probe.failures, 1, good=True)
        async with aclosing(probe.answers(process.pid)) as answers:
            async for problem in answers:
                if not streak.record(problem is None):
                    await self._kill(probe, process, f"liveness probe failed: {problem}")
                    return

    async def _kill(self, probe: probes.Probe, process: Process, reason: str) -> None:
        self._kill_reason = reason
        self._context.say(self._context.name, f"{reason}; stopping {self.name}")
        grace_s = probe.grace_s
        if grace_s is None:
            grace_s = self._context.pod["spec"].get("terminationGracePeriodSeconds", 30)
        await process.stop(grace_s, self._context.hurry)
