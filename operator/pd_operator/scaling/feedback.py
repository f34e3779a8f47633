"""PURE. What users got against what they were promised, and so how far to trust the model.

While a pool has the workers that the model asked for, requests that are late beyond what is
allowed say that it asks for too few: it is made to ask for more, by a factor. While hardly
anybody is late, the factor goes back, slowly, and not below 1: that nobody is late may be due
to the hour. A pool that is too small, since it still starts or is held by a bound, teaches
nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pd_core import sketch
from pd_operator.scaling.types import Target

_UP_PER_MINUTE = 0.04
_DOWN_PER_MINUTE = 0.004
_MOST_AT_ONCE = 4.0  # times what is allowed; a minute that went wholly wrong counts no more
_LOW, _HIGH = 1.0, 1.6


@dataclass(frozen=True, slots=True)
class Feedback:
    """`factor`: of workers, over what the model asks for."""

    factor: float = 1.0
    late: float | None = None  # the share of the last minute's requests

    def learn(
        self,
        seen: Mapping[int, int],
        target: Target | None,
        hopeless: float,
        settled: bool,
        elapsed_s: float,
        waited: float = 0.0,
    ) -> "Feedback":
        """`hopeless`: the share for which more workers would do nothing; `waited`: that is
        late for having waited for this pool, beside those whom `seen` tells of."""
        late = sketch.share_above(seen, target.seconds) if target else None
        if target is None or late is None:
            return Feedback(self.factor)
        late = min(late + waited, 1.0)
        if not settled:
            return Feedback(self.factor, late)
        allowed = max(1 - target.quantile, 1e-3)
        over = max(late - hopeless, 0.0) / allowed - 1
        step = _UP_PER_MINUTE * min(over, _MOST_AT_ONCE) if over > 0 else _DOWN_PER_MINUTE * over
        factor = self.factor + step * min(elapsed_s, 60.0) / 60.0
        return Feedback(min(max(factor, _LOW), _HIGH), late)
