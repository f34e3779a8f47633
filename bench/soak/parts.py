"""The soak's parts: what is asked, of which workers, for how long, with which faults."""

from dataclasses import dataclass
from typing import Any

from bench.soak.load import Mix

_ENGINE = {"threads": 1, "kvCacheTokens": 4096}
"""A small pool: it is used up, evicted and used again all the time."""


@dataclass(frozen=True, slots=True)
class Part:
    """`share`: of the time of a round."""

    name: str
    share: float
    mix: Mix
    users: int = 64
    workers: int = 1  # of each kind
    disaggregate: str = "always"
    faults: bool = False

    def pools(self) -> dict[str, Any]:
        pool = {"replicas": self.workers, "engine": _ENGINE}
        routing = {"disaggregate": self.disaggregate}
        return {"prefill": pool, "decode": pool, "router": {"routing": routing}}


PARTS = (
    Part("plain", 0.25, Mix({"short": 1})),
    Part("prefix", 0.1, Mix({"prefixed": 1}), disaggregate="auto"),
    Part("long", 0.1, Mix({"long": 1}), users=16),
    Part("cancelled", 0.1, Mix({"short": 6, "prefixed": 2, "long": 1}, leaving=0.4), users=32),
    Part("bad", 0.05, Mix({"bad": 1, "short": 3}), users=32),
    Part(
        "faults",
        0.4,
        Mix({"short": 200, "prefixed": 20, "bad": 10, "long": 1}, leaving=0.03),
        workers=2,
        faults=True,
    ),
)
BY_NAME = {part.name: part for part in PARTS}
QUICK = ("faults",)
"""It has something of each."""
