"""What runs have found, kept and added up: the figures of many short runs count as one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.common import Metrics

FILE = Path(__file__).with_name("runs.jsonl")
Found = dict[str, Any]
"""One part's run: `part`, `seconds`, counts, growths (None where nobody lived long enough)."""

_SUMS = ("requests", "wrong_tokens", "failed", "leaked_blocks")
_WORST = ("rss_growth", "fd_growth")


def keep(found: Found, file: Path = FILE) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(found) + "\n")


def all_kept(file: Path = FILE) -> list[Found]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def total(runs: Iterable[Found]) -> Metrics:
    """Counts are added, of growths the worst one stands."""
    runs = list(runs)
    seconds = sum(run["seconds"] for run in runs)
    metrics: dict[str, float | None] = {key: sum(run[key] for run in runs) for key in _SUMS}
    for key in _WORST:
        metrics[key] = max((run[key] for run in runs if run[key] is not None), default=None)
    requests = metrics["requests"]
    metrics["requests_s"] = requests / seconds if requests and seconds else None
    metrics["hours"] = seconds / 3600
    return metrics


def rows(runs: Iterable[Found]) -> list[tuple[object, ...]]:
    """By part, for a table."""
    by_part: dict[str, list[Found]] = {}
    for run in runs:
        by_part.setdefault(run["part"], []).append(run)
    return [(name, len(some), *total(some).values()) for name, some in by_part.items()]


HEAD = ("part", "runs", *_SUMS, *_WORST, "requests_s", "hours")
