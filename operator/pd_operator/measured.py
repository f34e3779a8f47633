"""PURE. What routers measured. "No data" is a value, never a zero."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pd_core import sketch


@dataclass(frozen=True, slots=True)
class Samples:
    """Bucket counts of the last minute, of all routers together; empty is "no data"."""

    ttft: Mapping[int, int] = field(default_factory=dict)
    tpot: Mapping[int, int] = field(default_factory=dict)

    def ttft_s(self, percentile: float) -> float | None:
        return sketch.quantile(self.ttft, percentile / 100)

    def tpot_s(self, percentile: float) -> float | None:
        return sketch.quantile(self.tpot, percentile / 100)


def merge(many: Sequence[Samples]) -> Samples:
    """The samples of several routers as those of one."""
    return Samples(
        ttft=sketch.merge(one.ttft for one in many),
        tpot=sketch.merge(one.tpot for one in many),
    )


def parse(body: bytes) -> Samples:
    """Samples of `{"ttft_s": {bucket: count}, "tpot_s": …}`; none of anything else."""
    try:
        data = json.loads(body)
        return Samples(sketch.from_json(data["ttft_s"]), sketch.from_json(data["tpot_s"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Samples()
