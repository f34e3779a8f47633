"""PURE. How long prompts take to compute, from short to long, and who of them is late.

A prompt's time grows faster than its length, and a few long ones are what others wait for:
so a load is judged by the whole mix, not by a mean and a percentile. Who arrives waits (M/G/c,
`queueing`), then is computed: late is whose wait and own time together exceed the target.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pd_core import sketch
from pd_operator.scaling.capacity import PromptCost
from pd_operator.scaling.queueing import Waiting

_UNKNOWN = ((0.43, 0.6), (1.3, 0.3), (3.5, 0.1))
"""Times of the mean, and shares, where nothing is known of how prompts differ."""


@dataclass(frozen=True, slots=True)
class Mix:
    """`times`: (seconds, share of all prompts)."""

    times: tuple[tuple[float, float], ...]
    mean_s: float
    variation: float  # the variance over the mean's square

    def hopeless(self, target_s: float) -> float:
        """The share that is late even without any wait."""
        return sum(share for seconds, share in self.times if seconds > target_s)

    def late(self, target_s: float, waiting: Waiting) -> float:
        """The share that is late for having waited."""
        return sum(
            share * waiting.longer_than(target_s - seconds)
            for seconds, share in self.times
            if seconds <= target_s
        )


def mix(sizes: Mapping[int, int], cost: PromptCost, tokens: float, tokens_per_s: float) -> Mix:
    """Prompts of `tokens` to compute on average, by workers of so many tokens a second.

    `sizes` says how prompts have differed, `cost` how their times do; if those that come now
    are longer than those were, all of them are taken as so much longer.
    """
    known = sketch.mean_and_variation(sizes)
    if known is None or known[0] <= 0:
        times = [(tokens / tokens_per_s * times, share) for times, share in _UNKNOWN]
        return _mix(times)
    total = sum(sizes.values())
    parts = [(sketch.value(bucket), count / total) for bucket, count in sizes.items()]
    # What workers measured in all is right; the shape alone comes from the prompts' times.
    usual = sum(cost.seconds(size) * share for size, share in parts)
    scale = known[0] / tokens_per_s / usual if usual > 0 else 0.0
    longer = tokens / known[0]
    return _mix([(scale * cost.seconds(longer * size), share) for size, share in parts])


def _mix(times: list[tuple[float, float]]) -> Mix:
    mean = sum(seconds * share for seconds, share in times)
    if mean <= 0:
        return Mix(tuple(times), 0.0, 0.0)
    square = sum((seconds / mean) ** 2 * share for seconds, share in times)
    return Mix(tuple(times), mean, max(square - 1, 0.0))
