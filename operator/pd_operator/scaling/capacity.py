"""PURE. What a worker can do, learned from what workers did.

Sums that fade with time, so that a pool which changes is learned anew within the hour.
Steps of a worker's first moments are left out, and one reading never moves what is known
by more than a factor.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from pd_operator.scaling.types import PromptSums, Work

HALF_LIFE_S = 1800.0
_KNOWN_BUSY_S = 5.0  # from so much on a reading that is far off is taken for an outlier
_OUTLIER = 4.0
# What one sequence more costs of a step with one, until batches have varied enough to
# tell: 1-2% on GPUs, 8-14% on the CPUs that were measured.
_PRIOR_SLOPE = 0.05
_PRIOR_LENGTH = 0.01  # a variance of lengths, over their mean's square, that doubts a slope
_PRIOR_WEIGHT = 1.0  # as much as a variance of one sequence squared
_SMALL_BATCH = 2.0  # from there to a lone sequence a wrong slope does little
_VARIED = 4.0  # a variance of batches beside which the prior slope is a fifth of what is said


def fade(elapsed_s: float) -> float:
    """How much of what was learned so long ago still counts."""
    return 0.5 ** (max(elapsed_s, 0.0) / HALF_LIFE_S)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of a worker that has something to do."""

    tokens: float = 0.0
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.busy_s if self.busy_s > 0 else None

    def learn(self, works: Iterable[Work], elapsed_s: float) -> "Speed":
        keep = fade(elapsed_s)
        tokens, busy_s = self.tokens * keep, self.busy_s * keep
        known = self.tokens_per_s if self.busy_s >= _KNOWN_BUSY_S else None
        for work in works:
            if not work.warm:
                continue
            speed = work.tokens / work.busy_s
            if known is not None:
                speed = min(max(speed, known / _OUTLIER), known * _OUTLIER)
            tokens += speed * work.busy_s
            busy_s += work.busy_s
        return Speed(tokens, busy_s)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """How a prompt's time grows with its length: attention makes each token dearer, the
    longer the prompt is. A line of seconds a token over tokens, weighted by tokens, so that
    the longest decide and what tiny prompts cost at the least doesn't bend it.
    """

    sums: PromptSums = field(default_factory=PromptSums)

    def learn(self, found: PromptSums, share: float, elapsed_s: float) -> "PromptCost":
        """`found`: of the last minute; `share`: of it that is new."""
        keep = fade(elapsed_s)
        return PromptCost(
            PromptSums(
                *(
                    getattr(self.sums, one.name) * keep + getattr(found, one.name) * share
                    for one in fields(PromptSums)
                )
            )
        )

    def line(self) -> tuple[float, float]:
        """Seconds of a token in a short prompt, and seconds a token more for each token."""
        sums = self.sums
        if sums.tokens <= 0 or sums.squared <= 0 or sums.seconds <= 0:
            return 1.0, 0.0
        length, token_s = sums.squared / sums.tokens, sums.seconds / sums.tokens
        variance = max(sums.cubed / sums.tokens - length * length, 0.0)
        covariance = sums.token_seconds / sums.tokens - length * token_s
        slope = covariance / (variance + _PRIOR_LENGTH * length * length)
        slope = min(max(slope, 0.0), token_s / length)
        return token_s - slope * length, slope

    def seconds(self, tokens: float) -> float:
        """As measured, or in any unit while nothing is: then time grows as tokens do."""
        token_s, more_s = self.line()
        return tokens * (token_s + more_s * tokens)


@dataclass(frozen=True, slots=True)
class StepLine:
    """How long a step takes, as a line over the tokens in it: decode's batch.

    Weighted least squares over (mean batch, mean step time) of each worker and reading,
    drawn towards a prior slope while all batches were alike.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def learn(self, works: Iterable[Work], elapsed_s: float) -> "StepLine":
        keep = fade(elapsed_s)
        weight, x, y, xx, xy = (
            value * keep for value in (self.weight, self.x, self.y, self.xx, self.xy)
        )
        for work in works:
            if not work.warm:
                continue
            batch, step_s = work.tokens / work.steps, work.busy_s / work.steps
            if self.weight >= 1:
                known_s = self.step_s(batch) or step_s
                step_s = min(max(step_s, known_s / _OUTLIER), known_s * _OUTLIER)
            weight += 1
            x += batch
            y += step_s
            xx += batch * batch
            xy += batch * step_s
        return StepLine(weight, x, y, xx, xy)

    @property
    def mean_batch(self) -> float:
        return self.x / self.weight if self.weight > 0 else 0.0

    def fit(self) -> tuple[float, float] | None:
        """Seconds of an empty step, and seconds a token more; both at least 0."""
        if self.weight <= 0 or self.x <= 0:
            return None
        batch, step_s = self.x / self.weight, self.y / self.weight
        prior = _PRIOR_SLOPE * step_s / (1 + _PRIOR_SLOPE * (batch - 1))
        variance = max(self.xx / self.weight - batch * batch, 0.0)
        covariance = self.xy / self.weight - batch * step_s
        slope = (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT)
        slope = min(max(slope, 0.0), step_s / batch)
        return step_s - slope * batch, slope

    @property
    def knows_lone(self) -> bool:
        """Whether a lone sequence's step is known from what was seen: small batches, or batches
        that varied. While all were large and alike it is the prior's guess."""
        if self.weight <= 0:
            return False
        batch = self.x / self.weight
        variance = self.xx / self.weight - batch * batch
        return batch <= _SMALL_BATCH or variance >= _VARIED

    def step_s(self, batch: float) -> float | None:
        line = self.fit()
        return line[0] + line[1] * batch if line else None

    def largest_batch(self, step_s: float) -> float:
        """The batch whose step takes so long; infinite where batches cost nothing."""
        line = self.fit()
        if line is None:
            return 0.0
        base_s, slope = line
        return max((step_s - base_s) / slope, 0.0) if slope > 0 else math.inf
