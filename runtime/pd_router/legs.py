"""A walk's legs: some of a request's choices on their way, and where their attempt is. Pure."""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from pd_core.failures import Failure
from pd_router.fleet import WorkerId
from pd_router.moves import Side
from pd_router.policy import Exclusions, Placement


class State(Enum):
    WAITING = "waiting"  # for its next attempt: back-off, or no worker is there
    RESERVING = "reserving"  # Generate sent
    PREFILLING = "prefilling"  # granted, Prefill sent
    COMMITTING = "committing"  # token 0 is here from P, D is still to commit
    VERDICT = "verdict"  # P failed but may have sealed: D knows
    LOCAL = "local"  # D computes the prompt
    DECODING = "decoding"


@dataclass(slots=True, eq=False)
class Leg:
    """Some choices on their way. `due`: when the present state has lasted too long."""

    choices: tuple[int, ...]
    exclusions: Exclusions = field(default_factory=Exclusions)
    state: State = State.WAITING
    due: float = 0.0
    tries: int = 0
    attempt: int = 0
    began: float = 0.0  # of the attempt
    prefilled: float | None = None  # when P's token 0 came, of this attempt
    step_failures: int = 0
    token_ids: tuple[int, ...] = ()
    placement: Placement | None = None
    decode: Side | None = None  # open sides
    prefill: Side | None = None
    failure: Failure | None = None  # the last attempt's; in VERDICT: P's
    give_up: float | None = None  # when waiting for a worker ends
    asked: float = 0.0  # when Prefill was sent
    hedge_due: float = inf  # when a second prefill may begin
    rival: "Leg | None" = None  # with the same choices: whoever gives token 0 first wins
    hedges: bool = False  # it is the second of the two

    @property
    def next_due(self) -> float:
        return min(self.due, self.hedge_due)

    @property
    def last_sent(self) -> float:
        """When the attempt was last sent to anybody: to its prefill worker, if it has been."""
        return max(self.began, self.asked)

    @property
    def expected_s(self) -> float:
        """How long its prefill was predicted to take."""
        return self.placement.expected_s if self.placement else 0.0

    @property
    def decode_at(self) -> WorkerId | None:
        return self.placement.decode if self.placement else None

    @property
    def prefill_at(self) -> WorkerId | None:
        return self.placement.prefill if self.placement else None
