"""Histograms of durations that cost next to nothing to add to: once a token, often."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pd_core.buckets import SECONDS


class Counts:
    """What the durations of one pool, or of one class there, were."""

    __slots__ = ("buckets", "total_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(SECONDS) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds


class Histogram(Collector):
    """One kind of duration of one model, by pool and whatever else, as Prometheus reads it."""

    def __init__(self, name: str, text: str, model: str, *more: str) -> None:
        """`more`: labels behind the pool."""
        self._name = name
        self._text = text
        self._model = model
        self.labels = ("model", "pool", *more)
        self._counts: dict[tuple[str, ...], Counts] = {}

    def at(self, *values: str) -> Counts:
        """Of a pool, and of a value for each further label."""
        found = self._counts.get(values)
        if found is None:
            found = self._counts[values] = Counts()
        return found

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self.labels)
        for values, counts in self._counts.items():
            edges = [*map(floatToGoString, SECONDS), "+Inf"]
            buckets = list(zip(edges, accumulate(counts.buckets), strict=True))
            family.add_metric((self._model, *values), buckets, counts.total_s)
        yield family

    def distribution(self) -> dict[str, list[float]]:
        """Of all together: bounds in seconds, and how many were at most that; the last count is
        that of all."""
        together = [sum(column) for column in zip(*self._buckets(), strict=True)]
        return {"bounds": list(SECONDS), "counts": [float(n) for n in accumulate(together)]}

    def _buckets(self) -> list[list[int]]:
        return [counts.buckets for counts in self._counts.values()] or [Counts().buckets]
