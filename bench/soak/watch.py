"""Memory and descriptors of each process over time, and how they have grown.

Its first tenth, or its first five minutes, are a process's own affair: then caches and
rings are full, and what follows is held against the end. A process that is started again
begins anew, and one that lived too short isn't judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from bench.common import median

PERIOD_S = 1.0
_WARM_UP = 300  # samples, at least
_ENOUGH = _WARM_UP + 120


@dataclass(slots=True)
class Series:
    """What was seen of one process."""

    name: str
    rss_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def judged(self) -> bool:
        return len(self.rss_bytes) >= _ENOUGH

    def rss_growth(self) -> float:
        """Of the medians of the first and the last tenth after it, relative."""
        early, late = _ends(self.rss_bytes)
        return median(late) / median(early) - 1

    def rss_curve_mib(self) -> list[float]:
        """The median of each tenth, to see whether it goes on."""
        tenth = len(self.rss_bytes) // 10 or 1
        parts = [self.rss_bytes[i : i + tenth] for i in range(0, len(self.rss_bytes), tenth)]
        return [round(median(part) / 2**20, 1) for part in parts]

    def fd_growth(self) -> int:
        """Of the least in both spans: what comes and goes is no leak."""
        early, late = _ends(self.fds)
        return min(late) - min(early)


def _ends(values: list[int]) -> tuple[list[int], list[int]]:
    tenth = len(values) // 10
    start = max(tenth, _WARM_UP)
    return values[start : start + tenth], values[-tenth:]


class Watch:
    """Samples processes by their numbers."""

    def __init__(self) -> None:
        self.series: dict[tuple[int, float], Series] = {}

    def sample(self, processes: Mapping[int, str]) -> None:
        for pid, name in processes.items():
            try:
                process = psutil.Process(pid)
                rss, fds = process.memory_info().rss, process.num_fds()
            except psutil.Error:  # it has just ended
                continue
            series = self.series.setdefault((pid, process.create_time()), Series(name))
            series.rss_bytes.append(rss)
            series.fds.append(fds)

    def judged(self) -> list[Series]:
        return [series for series in self.series.values() if series.judged()]

    def rss_growth(self) -> float | None:
        """Of the process that has grown most; None when none lived long enough."""
        return max((series.rss_growth() for series in self.judged()), default=None)

    def fd_growth(self) -> int | None:
        return max((series.fd_growth() for series in self.judged()), default=None)
