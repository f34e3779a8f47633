"""PURE. What demand will be when a worker that is asked for now has started.

Demand is noted once a minute. Its level and slope come from the last minutes, the slope as
far as chance doesn't explain it: few requests, or requests that differ much in size, make a
minute's demand jump although nothing has changed. How wrong such forecasts have been, beyond
chance again, is learned, and is what a forecast adds to be on the safe side.
"""

import math
from dataclasses import dataclass, replace

SLOT_S = 60.0
_SLOTS = 6  # of which level and slope are made
_KEPT = 24
_ERRORS = 120
"""Forecasts that are remembered: two hours."""
_JUMP = 2.5
"""A minute that is so many standard deviations above the level is a new level."""
_SURE = 2.0
"""A slope counts from so many standard deviations on."""
_CHANCE_QUANTILE = 1.64  # of a normal distribution: what one minute in twenty exceeds
_FORECAST_NOISE = 1.5  # variance of a minute and of a forecast for it, in a minute's
_MOST_MISSED = math.log(2)
"""A forecast that lacked more tells no more: one burst to five times the demand, that none
foresaw, would keep five times the workers for two hours."""
_PRIOR_SHORT = 0.25
_PRIOR_WEIGHT = 10.0
_MOST_GROWTH = 3.0
UNKNOWN_MARGIN = math.exp(_PRIOR_SHORT)
"""While nothing has been forecast."""


@dataclass(frozen=True, slots=True)
class Chance:
    """What chance alone does to a minute's demand: variance over the mean's square."""

    requests_per_s: float
    variation: float = 0.0  # of a request's size, likewise

    @property
    def variance(self) -> float:
        count = self.requests_per_s * SLOT_S
        return (1 + self.variation) / count if count > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Ahead:
    """`demand` is what to be ready for; the others are how it comes about."""

    level: float = 0.0
    growth: float = 1.0  # over the horizon, by the slope
    margin: float = 1.0  # for what past forecasts missed
    horizon_s: float = 0.0

    @property
    def demand(self) -> float:
        return self.level * self.growth * self.margin


@dataclass(frozen=True, slots=True)
class Course:
    """Demand over the last minutes, and what became of forecasts. Bounded."""

    points: tuple[tuple[float, float], ...] = ()  # (when, demand a second)
    short: tuple[float, ...] = ()  # what forecasts lacked beyond chance, as logarithms
    begun: float | None = None

    def add(self, at: float, demand: float, chance: Chance, horizon_s: float) -> "Course":
        """The last minute's demand; once a minute it is kept and judges a forecast."""
        begun = at if self.begun is None else self.begun
        if at - (self.points[-1][0] if self.points else begun) < SLOT_S:
            return replace(self, begun=begun)  # nor is the first minute whole yet
        if self.points and at - self.points[-1][0] > 3 * SLOT_S:  # blind meanwhile
            return replace(self, points=((at, demand),))
        made = replace(self, points=(*self.points, (at, demand))[-_KEPT:])
        then = [point for point in made.points if point[0] <= at - horizon_s]
        if len(then) < 2 or demand <= 0:
            return made
        level, growth = _expected(then[-_SLOTS:], chance, horizon_s)
        if level <= 0:
            return made
        short = max(math.log(demand / (level * growth)), 0.0)
        by_chance = _CHANCE_QUANTILE**2 * _FORECAST_NOISE * chance.variance
        short = min(math.sqrt(max(short * short - by_chance, 0.0)), _MOST_MISSED)
        return replace(made, short=(*made.short, short)[-_ERRORS:])

    def ahead(
        self, at: float, demand: float, chance: Chance, horizon_s: float, safe: float
    ) -> Ahead:
        """`demand`: of the last minute; `safe`: so many of past forecasts, with the margin,
        would have been enough."""
        points = [point for point in self.points if point[0] <= at - SLOT_S / 2]
        points = [*points[1 - _SLOTS :], (at, demand)]
        level, growth = _expected(points, chance, horizon_s)
        return Ahead(level, growth, math.exp(self._safe_short(safe)), horizon_s)

    def _safe_short(self, safe: float) -> float:
        """What most forecasts lacked no more than; drawn to a prior while there are few."""
        count = len(self.short)
        enough = sorted(self.short)[math.ceil(safe * count) - 1] if count else 0.0
        return (enough * count + _PRIOR_SHORT * _PRIOR_WEIGHT) / (count + _PRIOR_WEIGHT)


def _expected(
    points: list[tuple[float, float]], chance: Chance, horizon_s: float
) -> tuple[float, float]:
    """The level now and its growth, unless the last minute is beyond what chance does."""
    level, growth = _line(points, chance, horizon_s)
    last = points[-1][1]
    if last > level * (1 + _JUMP * math.sqrt(chance.variance)):
        return last, 1.0
    return level, growth


def _line(
    points: list[tuple[float, float]], chance: Chance, horizon_s: float
) -> tuple[float, float]:
    """The level at the last point, and the factor by which the slope raises it until the
    horizon; never below 1, since what is needed first is needed too."""
    count = len(points)
    mean_at = sum(at for at, _ in points) / count
    mean = sum(demand for _, demand in points) / count
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    if count < 3 or mean <= 0 or spread <= 0:
        return max(mean, 0.0), 1.0
    slope = sum((at - mean_at) * (demand - mean) for at, demand in points) / spread
    # Products, not powers: they raise nothing, however small a rate is.
    relative = mean / slope if slope else 0.0
    by_chance = relative * relative * chance.variance / spread
    sure = max(0.0, 1 - _SURE**2 * by_chance) if slope else 0.0
    level = max(mean + sure * slope * (points[-1][0] - mean_at), 0.0)
    if level <= 0 or slope <= 0:
        return level, 1.0
    return level, min(1 + sure * slope * horizon_s / level, _MOST_GROWTH)
