"""A mergeable percentile sketch with a sliding window.

Logarithmic buckets with a bounded relative error (as in DDSketch, Masson et al., VLDB
2019), kept per time slice so that old samples leave. Sketches of several routers merge
by adding counts, so a percentile over all of them is exact to the same error.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

RELATIVE_ERROR = 0.02
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_MIN_VALUE = 1e-6


def _bucket(value: float) -> int:
    return math.ceil(math.log(max(value, _MIN_VALUE)) / _LOG_GAMMA)


def value(bucket: int) -> float:
    """What a bucket's samples are, within 2%."""
    return 2 * _GAMMA**bucket / (_GAMMA + 1)


def share_above(counts: Mapping[int, int], limit: float) -> float | None:
    """The share (0..1) of samples above it, by whole buckets; None without samples."""
    total = sum(counts.values())
    if total == 0:
        return None
    return sum(count for bucket, count in counts.items() if value(bucket) > limit) / total


def quantile(counts: Mapping[int, int], q: float) -> float | None:
    """The q-quantile (0..1) of bucket counts, within 2%; None without samples."""
    total = sum(counts.values())
    if total == 0:
        return None
    rank = max(1, math.ceil(q * total))
    seen = 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return value(bucket)
    raise AssertionError("counts changed while being read")


def mean_and_variation(counts: Mapping[int, int]) -> tuple[float, float] | None:
    """The mean, and the variance over the mean's square, within a few percent; None without
    samples."""
    total = sum(counts.values())
    if total == 0:
        return None
    values = [(value(bucket), count) for bucket, count in counts.items()]
    mean = sum(one * count for one, count in values) / total
    variance = sum((one - mean) ** 2 * count for one, count in values) / total
    return mean, variance / mean**2


class WindowSketch:
    """Samples (seconds, or any positive number) of the last `window_s`."""

    def __init__(self, window_s: float = 60.0, slices: int = 6) -> None:
        self._slice_s = window_s / slices
        self._slices: deque[tuple[int, dict[int, int]]] = deque(maxlen=slices + 1)
        self._window_slices = slices

    def add(self, value: float, now: float) -> None:
        """Counts one sample. NaN and infinities are a caller's bug: ValueError."""
        if not math.isfinite(value):
            raise ValueError(f"sample {value!r} is not a finite number")
        number = int(now // self._slice_s)
        if not self._slices or self._slices[-1][0] != number:
            self._slices.append((number, {}))
        counts = self._slices[-1][1]
        bucket = _bucket(value)
        counts[bucket] = counts.get(bucket, 0) + 1

    def counts(self, now: float) -> dict[int, int]:
        """Bucket counts of the window that ends now."""
        oldest = int(now // self._slice_s) - self._window_slices
        return merge(counts for number, counts in self._slices if number > oldest)

    def quantile(self, q: float, now: float) -> float | None:
        return quantile(self.counts(now), q)

    def to_json(self, now: float) -> dict[str, Any]:
        """As it travels on the admin port: bucket number -> count."""
        return {str(bucket): count for bucket, count in self.counts(now).items()}


def from_json(data: Mapping[str, Any]) -> dict[int, int]:
    """Bucket counts from what `to_json` made; ValueError for anything else."""
    counts = {int(bucket): int(count) for bucket, count in data.items()}
    if any(count < 0 for count in counts.values()):
        raise ValueError("a sketch has a negative count")
    return counts


def merge(many: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """One set of counts from several."""
    total: dict[int, int] = {}
    for counts in many:
        for bucket, count in counts.items():
            total[bucket] = total.get(bucket, 0) + count
    return total
