"""What `up` tells a person: plain lines, and a progress bar where a terminal is."""

import json
import os
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pd_operator.local.kubelet import Listener


class QuietWhenAlone(Console):
    """Goes silent when nobody reads any more, where rich would end the process: a cluster
    doesn't go down because `| head` has seen enough."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # else Python complains when it flushes at exit
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.file.fileno())
            os.close(nothing)


class Terminal(Listener):
    """Prints the life of a local cluster."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or QuietWhenAlone(highlight=False, soft_wrap=True)
        self._stages: set[str] = set()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def line(self, text: str) -> None:
        with suppress(OSError):  # a full disk under the output is no reason to end either
            self.console.print(text, markup=False)

    def say(self, pod: str, text: str) -> None:
        self.line(f"{pod}: {text}")

    def output(self, pod: str, line: str) -> None:
        """A line of an init container: progress of the model's preparation, or its words."""
        del pod
        step = _progress(line)
        if step is None:
            return
        stage, done, total = step
        if stage == "waiting":  # for another pod that does the same
            return
        if stage == "ready":
            self.end_progress()
        if self.console.is_terminal and total > 0 and stage != "ready":
            self._draw(stage, done, total)
        elif stage not in self._stages:
            self._stages.add(stage)
            self.line(f"model: {stage}")

    def _draw(self, stage: str, done: float, total: float) -> None:
        if self._progress is None:
            columns = (
                TextColumn("model: {task.description}"),
                BarColumn(),
                "{task.percentage:3.0f}%",
            )
            self._progress = Progress(
                *columns, console=self.console, transient=True, auto_refresh=False
            )
            self._bar = self._progress.add_task(stage, total=total)
            with suppress(OSError):
                self._progress.start()
        if self._bar is not None:
            self._progress.update(self._bar, description=stage, completed=done, total=total)
            with suppress(OSError):
                self._progress.refresh()  # by itself it would need a thread, and we fork

    def end_progress(self) -> None:
        """Gives the terminal's last line back."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _progress(line: str) -> tuple[str, float, float] | None:
    """Stage, done and total of a line such as {"stage": "weights", "done": 3, "total": 9}."""
    try:
        data: Any = json.loads(line)
        return str(data["stage"]), float(data["done"]), float(data["total"])
    except (ValueError, TypeError, KeyError):
        return None
