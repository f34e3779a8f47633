"""How workers are chosen: the policies by name, and what the default one goes by. Pure."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pd_core.estimate import LINKS, Link
from pd_core.policies import POLICIES, PolicyName
from pd_router.hedging import Hedge
from pd_router.pulls import USUAL, PullRules

Disaggregate = Literal["auto", "always", "never"]
DISAGGREGATE: tuple[Disaggregate, ...] = get_args(Disaggregate)


@dataclass(frozen=True, slots=True)
class Routing:
    """`cost`, the default, predicts seconds from all that is known; the others each go by
    one thing alone, for comparison and for those who want no cleverness.

    | policy | decode | prefill |
    |---|---|---|
    | random | any | any |
    | round_robin | in turn | in turn |
    | least_load | least KV in use | soonest through with what waits |
    | least_outstanding | fewest requests that aren't through | as least_load |
    | prompt_length | least KV in use | soonest through with a prompt of this length |
    | prefix | least KV in use | longest cached prefix |
    | session | the session's, else least KV | the session's, else least load |
    """

    policy: PolicyName = "cost"
    disaggregate: Disaggregate = "auto"  # auto: decode may compute a prompt itself if faster
    session_kv_limit: float = 0.8  # a fuller decode worker loses its sessions' next turns
    link: Link = LINKS["tcp-25g"]  # between workers, until hand-overs have shown its speed
    pulls: PullRules | None = USUAL  # copies of cached prefixes; None: none are made
    hedge: Hedge | None = None  # a prefill that gives nothing for long is tried elsewhere too

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy {self.policy!r}: one of {', '.join(POLICIES)}")
        if self.disaggregate not in DISAGGREGATE:
            raise ValueError(
                f"disaggregate {self.disaggregate!r}: one of {', '.join(DISAGGREGATE)}"
            )
        if not 0 < self.session_kv_limit <= 1:
            raise ValueError(f"session_kv_limit {self.session_kv_limit:g}: above 0, at most 1")


class Chance(NamedTuple):
    """What differs from one choice to the next, given from outside: policies are pure.

    `routers` is how many share the workers, as these tell. With several others about, the
    best worker of the last heartbeat is everybody's best: two are drawn, and the better of
    them is taken. With any, equals are drawn from: idle workers look the same to all.
    """

    lot: int = 0  # a random number, 0 or above
    turn: int = 0  # counts choices
    routers: float = 1.0

    @property
    def alone(self) -> bool:
        return self.routers < _NOT_ALONE

    def turn_of(self, ordinal: int) -> int:
        """The order among equals, lowest first: a router alone keeps to low ordinals, which
        scale-in takes last; others would all do the same, so each time it's another order."""
        if self.routers < _SEVERAL:
            return ordinal
        return ((ordinal + 1) * (self.lot | 1) * _MIX & _MASK) >> 32


_NOT_ALONE = 3.0
_SEVERAL = 2.0
_MIX = 0x9E3779B97F4A7C15  # odd: different ordinals stay different
_MASK = (1 << 64) - 1
NO_CHANCE = Chance()
DEFAULT = Routing()
