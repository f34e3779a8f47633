"""PURE. What a scaling decision is made from, and what it is.

Times are on the operator's monotonic clock, in seconds; rates are per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pd_operator.api import Role
from pd_operator.measured import Sketch

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Target:
    """So many percent of all requests within so many seconds."""

    percentile: float
    seconds: float

    @property
    def quantile(self) -> float:
        return self.percentile / 100


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a user wants of one pool. `fixed`: its size isn't ours to decide, only to respect."""

    role: Role
    replicas: int  # that it has now, as asked for: pods that load or drain included
    minimum: int = 1
    maximum: int = 1
    gpus_each: int = 0
    fixed: bool = False
    ttft: Target | None = None  # decode has it, too: who waits for its room is late by it
    tpot: Target | None = None
    window_s: float = 60.0  # over which demand is measured
    panic_window_s: float = 10.0  # the same for bursts
    stabilization_s: float = 300.0  # a fall waits until nothing asked for more so long
    step_s: float = 60.0  # between two falls
    max_up: int | None = None  # pods a decision adds at most; None: as many as there are, or 4
    max_down: int | None = None  # pods a decision takes at most; None: half

    def clamp(self, replicas: int) -> int:
        return max(self.minimum, min(self.maximum, replicas))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Prefill workers for each decode worker, at least and at most."""

    low: float = 0.0
    high: float = float("inf")


@dataclass(frozen=True, slots=True)
class Spec:
    """All pools of one cluster; `gpus` bounds them together."""

    pools: tuple[PoolSpec, ...]
    gpus: int | None = None
    ratio: Ratio = Ratio()

    def pool(self, role: Role) -> PoolSpec | None:
        return next((pool for pool in self.pools if pool.role is role), None)


@dataclass(frozen=True, slots=True)
class Flow:
    """What arrives at the door, a second: taken or turned away alike."""

    requests: float = 0.0
    sequences: float = 0.0
    prompt_tokens: float = 0.0
    lengths: Mapping[int, float] = field(default_factory=dict)
    """Of the sequences, those whose prompts are below each power of two; routers of an older
    version tell none."""


@dataclass(frozen=True, slots=True)
class Flows:
    """Over a pool's window, and over its panic window; None until two readings are there."""

    long: Flow | None = None
    short: Flow | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What one worker did between two readings."""

    worker: str
    steps: float
    busy_s: float
    tokens: float
    warm: bool  # it has run enough steps before that these tell its speed


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """A pool's workers, as they last told. `stale` ones are announced but not heard of."""

    workers: int = 0
    stale: int = 0
    running: float = 0.0
    waiting_grants: float = 0.0
    pending_tokens: float = 0.0
    kv_used_tokens: float = 0.0
    kv_tokens_each: float = 0.0
    max_running_each: float = 0.0
    announced_tokens_per_s: float = 0.0  # measured by workers when they started; 0: unknown
    work: tuple[Work, ...] = ()


class Answered(NamedTuple):
    """Sequences that ended, and the tokens that they put out."""

    sequences: float = 0.0
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptSums:
    """Over prompts that were computed: uncached tokens n and seconds s, and sums of n x n,
    n x n x n and n x s."""

    tokens: float = 0.0
    squared: float = 0.0
    cubed: float = 0.0
    seconds: float = 0.0
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Observations:
    """Everything that is known of a cluster at a moment.

    `complete`: all routers answered; else all sums are lower bounds. Averages are over the
    last minute.
    """

    read_at: float | None = None
    complete: bool = False
    flows: Mapping[Role, Flows] = field(default_factory=dict)
    uncached_share: float | None = None  # of prompt tokens; None: nothing was computed
    output_tokens: float | None = None  # a sequence; None: none ended
    answers: Mapping[int, Answered] = field(default_factory=dict)  # by prompts' lengths
    overhead_s: float | None = None  # of TTFT, neither waiting nor computing
    queued_requests: float = 0.0  # in the routers' admission
    queued_tokens: float = 0.0
    queued_sequences: float = 0.0
    held_requests: float = 0.0  # for want of any worker
    ttft: Sketch = field(default_factory=dict)
    own_ttft: Sketch = field(default_factory=dict)  # without waiting for decode's room
    tpot: Sketch = field(default_factory=dict)
    uncached: Sketch = field(default_factory=dict)  # tokens to compute, a request
    prompts: PromptSums = field(default_factory=PromptSums)
    pools: Mapping[Role, PoolSignals] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hold:
    """The pool stays as it is. `reason` is stable CamelCase."""

    replicas: int
    reason: str
    message: str = ""
    numbers: Numbers = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scale:
    """The pool is to have so many workers."""

    replicas: int
    reason: str
    message: str = ""
    numbers: Numbers = field(default_factory=dict)


Decision = Hold | Scale
