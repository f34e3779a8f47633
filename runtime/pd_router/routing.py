"""How workers are chosen: the policies by name, and what the default one goes by. Pure."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pd_core.estimate import LINKS, Link
from pd_router.pulls import USUAL, PullRules

PolicyName = Literal["cost", "random", "round_robin", "least_load", "prefix", "session"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
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
    | least_load | least KV in use | fewest tokens waiting |
    | prefix | least KV in use | longest cached prefix |
    | session | the session's, else least KV | the session's, else fewest tokens |
    """

    policy: PolicyName = "cost"
    disaggregate: Disaggregate = "auto"  # auto: decode may compute a prompt itself if faster
    session_kv_limit: float = 0.8  # a fuller decode worker loses its sessions' next turns
    link: Link = LINKS["tcp-25g"]  # between workers, until hand-overs have shown its speed
    pulls: PullRules | None = USUAL  # copies of cached prefixes; None: none are made

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

    `routers` is how many share the workers, as far as this one can see. With others about,
    the best worker of the last heartbeat is everybody's best: two are drawn, and the
    better of them is taken.
    """

    lot: int = 0  # a random number, 0 or above
    turn: int = 0  # counts choices
    routers: float = 1.0

    @property
    def alone(self) -> bool:
        return self.routers < _NOT_ALONE


_NOT_ALONE = 3.0
NO_CHANCE = Chance()
DEFAULT = Routing()
