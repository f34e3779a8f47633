"""What goes into a walk and what comes out of it: events and actions. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pd_core.failures import Failure
from pd_router.fleet import WorkerId
from pd_router.policy import Exclusions, Need, Placement, Unplaced
from pd_router.pulls import Pull
from pd_router.types import FinishReason


class Side(NamedTuple):
    """One of an attempt's two ends. Attempts are numbered within the request from 1."""

    attempt: int
    prefill: bool


Placer = Callable[[Need, Exclusions, tuple[int, ...], WorkerId | None], Placement | Unplaced]
"""The policy over the workers of this moment. The tokens are for their prefixes; a worker
that is named is the decode worker already, and only prefill is to be chosen."""


@dataclass(frozen=True, slots=True)
class WalkConfig:
    """How often and how long. Each wait has its own limit, in seconds."""

    max_retries: int = 3
    grant_wait_s: float = 30.0  # a full decode worker may let a request wait so long
    reserve_margin_s: float = 5.0  # and must answer by then
    stale_choice_s: float = 0.25  # a grant that took longer: prefill is chosen anew
    prefill_wait_s: float = 300.0  # Prefill sent to Prefilled
    commit_wait_s: float = 30.0  # Prefilled to Committed
    decode_wait_s: float = 120.0  # between two frames of tokens
    verdict_wait_s: float = 2.0  # P failed after the seal: does D have the KV?
    lost_wait_s: float = 0.3  # P was lost before it said so: did the seal go out?
    worker_wait_s: float = 30.0  # an accepted request waits for a worker to come back
    backoff_s: float = 0.05  # before the first retry; four times as long each time
    backoff_max_s: float = 1.0
    replace_every_s: float = 0.5  # an attempt without workers looks again


# ---- events ---------------------------------------------------------------------


@dataclass(slots=True)
class Token:
    """One token of one choice. An accepted one is an action too: deliver it."""

    choice: int
    index: int
    token: int
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode has reserved room. `grant` opens it; `kv_address` may be empty: as announced."""

    grant: bytes
    prefix_tokens: int = 0
    wait_s: float = 0.0
    kv_address: str = ""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is computed: token 0 of each choice."""

    first: tuple[Token, ...]
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    kv_bytes: int = 0
    transfer_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """Decode has all of the KV, and repeats token 0."""

    first: tuple[Token, ...]
    cached_tokens: int = 0
    kv_bytes: int = 0
    transfer_s: float = 0.0
    transport: str = ""


# ---- actions ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenDecode:
    """Send Generate."""

    side: Side
    worker: WorkerId
    token_ids: tuple[int, ...]
    choices: tuple[int, ...]
    deadline_s: float
    grant_wait_s: float
    prefill_here: bool
    blocks: int  # what it will reserve, for the load's books
    compute_tokens: int  # when it prefills
    prefill: WorkerId | None = None  # who will, once decode has granted
    prefill_tokens: int = 0
    hedge: bool = False  # beside an attempt that still runs
    pull: Pull | None = None  # to wait for before it's sent


@dataclass(frozen=True, slots=True)
class OpenPrefill:
    """Send Prefill, with the KV bound for `decode`."""

    side: Side
    worker: WorkerId
    token_ids: tuple[int, ...]
    choices: tuple[int, ...]
    deadline_s: float
    decode: WorkerId
    grant: Granted
    compute_tokens: int
    pull: Pull | None = None


@dataclass(frozen=True, slots=True)
class CancelSide:
    """Send Cancel and listen no more."""

    side: Side


@dataclass(frozen=True, slots=True)
class CloseSide:
    """It ended over there: listen no more."""

    side: Side


@dataclass(frozen=True, slots=True)
class Retried:
    """An attempt failed and another follows. For the books only."""

    failure: Failure


class Suspect(NamedTuple):
    """A worker, and when the attempt was sent to it."""

    worker: WorkerId
    sent_at: float


@dataclass(frozen=True, slots=True)
class Blamed:
    """An attempt failed by the fault of one of these workers, never by the request's own."""

    workers: tuple["Suspect", ...]
    failure: Failure
    at: float


@dataclass(frozen=True, slots=True)
class Hedged:
    """A prompt was computed twice at once, and that is over; whether the second was first."""

    won: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Every choice has its finish. The last action."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The request failed. The last action."""

    failure: Failure


Action = (
    Token
    | OpenDecode
    | OpenPrefill
    | CancelSide
    | CloseSide
    | Retried
    | Blamed
    | Hedged
    | Done
    | Fail
)
