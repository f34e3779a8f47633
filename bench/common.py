"""What the benches share: the table for people, the JSON line for machines, statistics,
and which core a process runs on.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"

Metrics = Mapping[str, float | None]
"""A missing peer is None, never a made-up number."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure has to reach: `Goal("<=", 1.1)`."""

    relation: str
    value: float

    def met(self, figure: float | None) -> bool | None:
        if figure is None:
            return None
        return figure <= self.value if self.relation == "<=" else figure >= self.value

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


Goals = Mapping[str, Goal]


def arguments(description: str | None) -> bool:
    """Reads the command line of a bench: whether to be quick."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute; shows only that the bench works"
    )
    return bool(parser.parse_args().quick)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose first column is left-aligned and the others right-aligned."""
    cells = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def report(
    name: str, metrics: Metrics, goals: Goals, quick: bool, notes: Sequence[str] = ()
) -> None:
    """Prints the figures with their goals, then the JSON line, which must be the last.

    The figures of a quick run are too few to be held against goals. `notes`: what figures
    alone don't say, a sentence each.
    """
    rows = []
    for key, figure in metrics.items():
        goal = None if quick else goals.get(key)
        met = goal.met(figure) if goal else None
        verdict = {True: "met", False: "MISSED", None: ""}[met]
        rows.append((key, figure, goal or "", verdict))
    print("\n" + table((name, "figure", "goal", ""), rows))
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in metrics.items()}
    line: dict[str, object] = {"bench": name, "metrics": rounded, "context": context(quick)}
    if notes:
        print("\n".join(("", *notes)))
        line["notes"] = list(notes)
    print(json.dumps(line), flush=True)


def context(quick: bool) -> dict[str, object]:
    """What the figures depend on."""
    return {"cpu": cpu_model(), "cores": os.cpu_count(), "commit": commit(), "quick": quick}


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of unsorted samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]


def median(samples: Iterable[float]) -> float:
    return statistics.median(samples)


def pin(pid: int, cores: set[int]) -> None:
    """Binds every thread of a process (0: this one) to these cores. Linux only."""
    tasks = Path("/proc") / (str(pid) if pid else "self") / "task"
    for task in tasks.iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # the thread ended meanwhile
            continue
