"""What `up` tells a person: plain lines, and a progress bar where a terminal is."""

import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pd_operator.local.kubelet import Listener


class Terminal(Listener):
    """Prints the life of a local cluster."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._stages: set[str] = set()
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def line(self, text: str) -> None:
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
        if self.console.is_terminal and total > 0:
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
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._bar = self._progress.add_task(stage, total=total)
            self._progress.start()
        if self._bar is not None:
            self._progress.update(self._bar, description=stage, completed=done, total=total)

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
