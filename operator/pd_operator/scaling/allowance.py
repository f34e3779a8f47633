"""PURE. How much of the lateness that users were promised to see at most is used up.

A promise of 99% allows one request in a hundred to be late, over hours, not in each minute.
Usually a twentieth of all forecasts may fall short: pools also have room by whole workers, and
by falling late. A pool of which users have seen more than half of the lateness that is allowed
must trust its forecasts less, until that is hours ago.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pd_core import sketch
from pd_operator.scaling.types import Target

_HALF_LIFE_S = 3600.0
_PRIOR_S = 900.0  # of requests as they come now, of which half of what is allowed were late
_PRIOR_USED = 0.5
_SKETCH_S = 60.0  # what a reading's sketches go back
_MOST_SHORT, _LEAST_SHORT = 0.05, 0.01
"""Of forecasts, while half of the allowance is there, and once there is none."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Requests and late ones, the older the less; `per_s`: as they come now."""

    requests: float = 0.0
    late: float = 0.0
    per_s: float = 0.0
    allowed: float = 0.01

    def learn(
        self,
        seen: Mapping[int, int],
        target: Target | None,
        hopeless: float,
        elapsed_s: float,
        waited: float = 0.0,
    ) -> "Allowance":
        """`hopeless`: the share that no number of workers would have served in time; `waited`:
        that is late for having waited for this pool, beside those whom `seen` tells of."""
        above = sketch.share_above(seen, target.seconds) if target else None
        keep = 0.5 ** (max(elapsed_s, 0.0) / _HALF_LIFE_S)
        if target is None or above is None:
            return Allowance(self.requests * keep, self.late * keep, self.per_s, self.allowed)
        per_s = sum(seen.values()) / _SKETCH_S
        new = per_s * min(elapsed_s, _SKETCH_S)
        return Allowance(
            self.requests * keep + new,
            self.late * keep + new * max(min(above + waited, 1.0) - hopeless, 0.0),
            per_s,
            max(1 - target.quantile, 1e-3),
        )

    @property
    def used(self) -> float:
        """1: all that is allowed."""
        prior = self.per_s * _PRIOR_S
        if self.requests + prior <= 0:
            return _PRIOR_USED
        late = self.late + prior * _PRIOR_USED * self.allowed
        return late / (self.requests + prior) / self.allowed

    @property
    def safe(self) -> float:
        """So many forecasts are to be enough."""
        left = min(max(2 * (1 - self.used), 0.0), 1.0)
        return 1 - max(_MOST_SHORT * left, _LEAST_SHORT)
