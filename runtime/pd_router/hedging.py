"""When a prompt is computed a second time elsewhere, because the first has produced nothing for
long. Pure.

The first to give token 0 wins, the other is cancelled. Only where asked for, only where
another is predicted to need less than has been waited already, and never for more than a
share of the requests in flight: what is slow because all is full must not be made fuller.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

_OBSERVED = 200
_ENOUGH = 20
"""Prefills seen, before their times say what is unusual."""
_UNUSUAL = 0.95
_LEAST_EXPECTED_S = 0.005
_LEAST_AFTER_S = 0.05
DEFAULT_SHARE = 0.05
MOST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Hedge:
    """`after_s` None: after as long as one of twenty prefills takes, against its prediction.
    `share`: of the requests in flight, so many may have a second prefill; one always may."""

    after_s: float | None = None
    share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        if self.after_s is not None and not 0 < self.after_s < inf:
            raise ValueError(f"hedge after {self.after_s:g} s: above 0")
        if not 0 < self.share <= MOST_SHARE:
            raise ValueError(f"hedge share {self.share:g}: above 0, at most {MOST_SHARE:g}")


class Hedging:
    """All requests' hedges together, and what prefills took of late."""

    def __init__(self, hedge: Hedge | None = None) -> None:
        """None: no hedges."""
        self._hedge = hedge
        self._ratios: deque[float] = deque(maxlen=_OBSERVED)
        self.in_flight = 0
        self.running = 0

    def after_s(self, expected_s: float) -> float:
        """How long a prefill that is predicted to take `expected_s` may give nothing."""
        if self._hedge is None:
            return inf
        if self._hedge.after_s is not None:
            return self._hedge.after_s
        if len(self._ratios) < _ENOUGH:
            return inf
        ratio = sorted(self._ratios)[int(_UNUSUAL * (len(self._ratios) - 1))]
        return max(ratio * max(expected_s, _LEAST_EXPECTED_S), _LEAST_AFTER_S)

    def took(self, expected_s: float, took_s: float) -> None:
        """A prefill gave token 0; or it was given up after so long, and would have taken more."""
        if self._hedge is not None and self._hedge.after_s is None:
            self._ratios.append(took_s / max(expected_s, _LEAST_EXPECTED_S))

    @property
    def room(self) -> bool:
        """Whether another hedge may run."""
        if self._hedge is None:
            return False
        return self.running < max(1, int(self._hedge.share * self.in_flight))


NO_HEDGING = Hedging()
