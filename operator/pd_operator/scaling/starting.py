"""PURE. How long a worker takes from being asked for until it serves, measured."""

from dataclasses import dataclass, replace

UNKNOWN_S = 120.0
_LEAST_S, _MOST_S = 5.0, 900.0
_KEPT = 8


@dataclass(frozen=True, slots=True)
class Starts:
    """`asked`: sizes that were asked for and aren't there yet. Bounded."""

    asked: tuple[tuple[float, int], ...] = ()
    measured_s: float | None = None

    @property
    def start_s(self) -> float:
        return UNKNOWN_S if self.measured_s is None else self.measured_s

    def ask(self, now: float, size: int, serving: int) -> "Starts":
        """A pool is to grow. Workers that still serve while they drain tell no time."""
        if serving >= size:
            return self
        return replace(self, asked=(*self.asked, (now, size))[-_KEPT:])

    def look(self, now: float, wanted: int, serving: int) -> "Starts":
        """`wanted`: the pool's size as asked for; what was withdrawn is forgotten."""
        known, waiting = self.measured_s, []
        for at, size in self.asked:
            if size > wanted:
                continue
            if size > serving:
                waiting.append((at, size))
                continue
            took_s = min(max(now - at, _LEAST_S), _MOST_S)
            known = took_s if known is None else (known + took_s) / 2
        return Starts(tuple(waiting), known)
