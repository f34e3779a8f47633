"""What `up` tells a person: plain lines, and progress bars where a terminal is."""

import json
import os
import re
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

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


_MODEL = "model"
_LOADING = re.compile(r"loading the model: ([a-z-]+)(?:, (\d+) of (\d+))?$")
"""What a worker answers to probes before it is ready (pd_engine.loading)."""


class Terminal(Listener):
    """Prints the life of a local cluster."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or QuietWhenAlone(highlight=False, soft_wrap=True)
        self._said: set[str] = set()
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}

    def line(self, text: str) -> None:
        with suppress(OSError):  # a full disk under the output is no reason to end either
            self.console.print(text, markup=False)

    def say(self, pod: str, text: str) -> None:
        self._remove(pod)
        self.line(f"{pod}: {text}")

    def output(self, pod: str, line: str) -> None:
        """Progress of a model's preparation or of its loading, or an init container's words."""
        if found := _LOADING.search(line):
            self._show(pod, f"loading the model: {found[1]}", found[2], found[3])
        elif step := _progress(line):
            self._prepared(*step)
        elif not line:
            self._remove(pod)

    def _prepared(self, stage: str, done: float, total: float) -> None:
        if stage == "waiting":  # for another pod that does the same
            return
        if stage == "ready":
            self._remove(_MODEL)
        if stage == "ready" or not self.console.is_terminal or total <= 0:
            self._once(f"{_MODEL}: {stage}")
        else:
            self._draw(_MODEL, f"{_MODEL}: {stage}", done, total)

    def _show(self, pod: str, text: str, done: str | None, total: str | None) -> None:
        if self.console.is_terminal:
            self._draw(pod, f"{pod}: {text}", float(done or 0), float(total) if total else None)
        else:
            self._once(f"{pod}: loading the model")

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.line(text)

    def _draw(self, name: str, text: str, done: float, total: float | None) -> None:
        """A bar for each model or pod. What has no total leaves it as it is."""
        if self._progress is None:
            columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
            self._progress = Progress(
                *columns, console=self.console, transient=True, auto_refresh=False
            )
            with suppress(OSError):
                self._progress.start()
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(text, total=total)
        completed = None if total is None else done
        self._progress.update(self._bars[name], description=text, total=total, completed=completed)
        with suppress(OSError):
            self._progress.refresh()  # by itself it would need a thread, and we fork

    def _remove(self, name: str) -> None:
        """The last bar gives the terminal's last line back."""
        bar = self._bars.pop(name, None)
        if self._progress is None or bar is None:
            return
        if self._bars:
            self._progress.remove_task(bar)
        else:
            self.end_progress()

    def end_progress(self) -> None:
        """Gives the terminal's last lines back."""
        self._bars.clear()
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
