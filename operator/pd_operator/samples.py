"""What routers measured, read from their admin ports. "No data" is a value, never a zero."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pd_core import sketch
from pd_operator import httpget
from pd_operator.podspec import ADMIN_PORT

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Bucket counts of the last minute, of all routers together; empty is "no data"."""

    ttft: Mapping[int, int] = field(default_factory=dict)
    tpot: Mapping[int, int] = field(default_factory=dict)

    def ttft_s(self, percentile: float) -> float | None:
        return sketch.quantile(self.ttft, percentile / 100)

    def tpot_s(self, percentile: float) -> float | None:
        return sketch.quantile(self.tpot, percentile / 100)


async def read(routers: Iterable[str], port: int = ADMIN_PORT) -> Samples:
    """The samples of the routers at these addresses; one that doesn't answer has none."""
    found = await asyncio.gather(*(_read_one(host, port) for host in routers))
    return Samples(
        ttft=sketch.merge(one.ttft for one in found),
        tpot=sketch.merge(one.tpot for one in found),
    )


async def _read_one(host: str, port: int) -> Samples:
    try:
        response = await httpget.get(host, port, "/sketches", timeout_s=_TIMEOUT_S)
    except httpget.GetFailed:
        return Samples()
    return parse(response.body) if response.ok else Samples()


def parse(body: bytes) -> Samples:
    """Samples of `{"ttft_s": {bucket: count}, "tpot_s": …}`; none of anything else."""
    try:
        data = json.loads(body)
        return Samples(sketch.from_json(data["ttft_s"]), sketch.from_json(data["tpot_s"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return Samples()
