"""Memory and descriptors of each process over time, and how they have grown.

Its first tenth is a process's own affair: what follows is held against the end. A process
that is started again begins anew, and one that lived too short isn't judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from bench.common import median

PERIOD_S = 1.0
_ENOUGH = 180  # samples: shorter lives are mostly their own beginning


@dataclass(slots=True)
class Series:
    """What was seen of one process."""

    name: str
    rss_bytes: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def judged(self) -> bool:
        return len(self.rss_bytes) >= _ENOUGH

    def rss_growth(self) -> float:
        """Of the medians of the second and the last tenth, relative."""
        early, late = _ends(self.rss_bytes)
        return median(late) / median(early) - 1

    def fd_growth(self) -> int:
        """Of the least in both spans: what comes and goes is no leak."""
        early, late = _ends(self.fds)
        return min(late) - min(early)


def _ends(values: list[int]) -> tuple[list[int], list[int]]:
    tenth = len(values) // 10
    return values[tenth : 2 * tenth], values[-tenth:]


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
