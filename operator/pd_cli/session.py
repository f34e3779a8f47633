"""A cluster in the foreground: up, its file watched, down by a signal."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pd_cli import document
from pd_cli.console import Terminal
from pd_operator import api
from pd_operator.api import Cluster, HostPath, InvalidCluster
from pd_operator.fields import FieldError
from pd_operator.local import support
from pd_operator.local.cluster import ANSWERS_S, LocalCluster, Options, is_ready
from pd_operator.local.network import AddressTaken
from pd_operator.local.state import AlreadyRunning

OK, FAILED, BAD_FILE = 0, 1, 2
_POLL_S = 0.5
_SETTLE_POLL_S = 0.2
_READY_S = 900.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Hopeless(Exception):
    """The model or a setting has to be another; the message is the worker's own."""


class Failed(Exception):
    """What was to be done with the cluster didn't work; the message is for the user."""


WhenReady = Callable[[LocalCluster], Awaitable[bool]]
"""Called once when the cluster is ready; True lets it go on until a signal."""


def run(file: Path, options: Options, when_ready: WhenReady | None = None) -> int:
    """The exit code: 0 after a signal, 1 when it can't run, 2 for a bad file.

    With `when_ready` somebody waits for the cluster: it has to get ready within a bound.
    """
    stamp = _stamp(file)
    try:
        body = document.load(file)
    except document.BadFile as error:
        report(file, error)
        return BAD_FILE
    return _run(body, _Session(file, stamp, options, when_ready), str(file))


def run_document(body: dict[str, Any], options: Options) -> int:
    """The exit code, as with `run`, of a document that is in no file, so that nobody can mend
    it: 2, too, when its model or a setting is refused."""
    return _run(body, _Session(None, None, replace(options, gives_up=True), None), "the model")


def _run(body: dict[str, Any], session: "_Session", named: str) -> int:
    if sys.platform != "linux":
        click.echo("running a PDCluster on this machine needs Linux", err=True)
        return FAILED
    try:
        cluster = check(body)
    except InvalidCluster as error:
        report(named, error)
        return BAD_FILE
    try:
        return asyncio.run(session.run(cluster, body))
    except Hopeless as error:
        click.echo(str(error), err=True)
        return BAD_FILE
    except (AlreadyRunning, AddressTaken, Failed) as error:
        click.echo(str(error), err=True)
        return FAILED


def check(body: dict[str, Any]) -> Cluster:
    """The parsed document, if this machine can run it. InvalidCluster otherwise."""
    cluster = api.parse(body)
    check_here(cluster)
    return cluster


def check_here(cluster: Cluster) -> None:
    """InvalidCluster with what this machine hasn't."""
    support.check(cluster)
    _missing_model(cluster)


def _missing_model(cluster: Cluster) -> None:
    """InvalidCluster when the file names a model that isn't on this machine."""
    remedy = "write the folder of a model in Hugging Face format, or a GGUF file"
    errors = [
        FieldError(f"{field}.hostPath", problem, remedy)
        for field, source in cluster.sources
        if isinstance(source, HostPath) and (problem := _no_model(Path(source.path)))
    ]
    if errors:
        raise InvalidCluster(errors)


def _no_model(path: Path) -> str:
    """Why there is none; "" when there seems to be one."""
    if not path.exists():
        return f"{path} does not exist on this machine"
    if path.is_dir() and not (path / "config.json").is_file():
        return f"{path} has no config.json"
    return ""


def report(file: Path | str, error: document.BadFile | InvalidCluster) -> None:
    """Every mistake on a line of its own."""
    if isinstance(error, InvalidCluster):
        for one in error.errors:
            click.echo(f"{file}: {one}", err=True)
    else:
        click.echo(str(error), err=True)


class _Session:
    """`file` None: the document is the caller's own, and stays as it is."""

    def __init__(
        self,
        file: Path | None,
        seen: "_Stamp | None",
        options: Options,
        when_ready: WhenReady | None,
    ) -> None:
        self._file = file
        self._seen = seen
        self._options = options
        self._when_ready = when_ready
        self._terminal = Terminal()
        self._stop = asyncio.Event()
        self._signals = 0
        self._unsettled = False  # the file has changed, and nobody was told that it's in effect

    async def run(self, cluster: Cluster, body: dict[str, Any]) -> int:
        try:
            local = LocalCluster(cluster.name, self._options, self._terminal)
        except OSError as error:
            raise Failed(f"can't keep state or models on this machine: {error}") from error
        try:
            loop = asyncio.get_running_loop()
            for number in _SIGNALS:
                loop.add_signal_handler(number, self._on_signal, local)
            for note in support.notes(cluster):
                self._terminal.line(f"note: {note}")
            local.submit(body)
            return await self._until_stopped(local)
        finally:
            self._terminal.end_progress()
            await local.close()

    def _on_signal(self, local: LocalCluster) -> None:
        self._signals += 1
        if self._signals > 1:
            local.hurry()
            return
        self._terminal.end_progress()
        self._terminal.line(
            f"stopping: running answers have {ANSWERS_S:g} s to end "
            f"(a second Ctrl-C ends it at once)"
        )
        self._stop.set()

    async def _until_stopped(self, local: LocalCluster) -> int:
        """Until a signal, or until one of the tasks fails: that is a bug of ours, but for
        Failed and Hopeless."""
        stopped = asyncio.create_task(self._stop.wait())
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(local.run()),
            asyncio.create_task(self._announce(local)),
            asyncio.create_task(self._despair(local)),
        ]
        if self._file is not None:
            tasks.append(asyncio.create_task(self._watch(self._file, local)))
        pending: set[asyncio.Task[Any]] = {stopped, *tasks}
        try:
            while not stopped.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in [stopped, *tasks]:
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)
        return OK

    async def _announce(self, local: LocalCluster) -> None:
        try:
            async with asyncio.timeout(_READY_S if self._when_ready else None):
                await local.wait_ready()
        except TimeoutError:
            message = f"not ready within {_READY_S:g} s; the logs are in {local.logs}"
            raise Failed(message) from None
        self._terminal.end_progress()
        self._terminal.line(f"ready: {local.url}")
        if page := local.live_page():
            self._terminal.line(f"live page: {page}")
        if self._when_ready is not None and not await self._when_ready(local):
            self._stop.set()

    async def _despair(self, local: LocalCluster) -> None:
        why = await local.wait_given_up()
        raise Hopeless(f"{why}\nthe logs are in {local.logs}")

    async def _watch(self, file: Path, local: LocalCluster) -> None:
        """Edits of the file, by polling: an editor may replace it or write it in place."""
        while True:
            await asyncio.sleep(_POLL_S)
            stamp = _stamp(file)
            if stamp != self._seen:
                self._seen = stamp
                await self._edited(file, local)

    async def _edited(self, file: Path, local: LocalCluster) -> None:
        before = local.document()
        try:
            body = document.load(file)
            check(body)
            local.submit(body)
        except (document.BadFile, InvalidCluster) as error:
            report(file, error)
            click.echo(f"{file}: not applied; what runs stays as it is", err=True)
            local.refuse(str(error))
            self._unsettled = True
            return
        local.refuse("")
        if local.document() is not before:
            self._terminal.line(f"{file}: changed, applying")
            self._unsettled = True
        if self._unsettled:
            await self._settled(file, local)

    async def _settled(self, file: Path, local: LocalCluster) -> None:
        """Tells when the file is in effect, unless the next edit comes first."""
        while _stamp(file) == self._seen:
            if is_ready(local.document()):
                self._terminal.line(f"{file}: in effect")
                self._unsettled = False
                return
            await asyncio.sleep(_SETTLE_POLL_S)


_Stamp = tuple[int, int, int]


def _stamp(file: Path) -> _Stamp | None:
    """Changes whenever the file does; None while it is away."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
