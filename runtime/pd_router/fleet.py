"""What a router knows of each worker: who it is, what it can hold, how loaded it is. Pure."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

_ORDINAL = re.compile(r"-(\d+)$")
_NO_ORDINAL = 1 << 30


class WorkerId(NamedTuple):
    """One process. A worker that restarted has another epoch and is somebody else."""

    name: str
    epoch: str


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A heartbeat's load. Blocks of the KV pool; tokens of prompts still to compute."""

    queued: int = 0
    running: int = 0
    waiting_grants: int = 0
    pending_tokens: int = 0
    kv_blocks: int = 0
    kv_free: int = 0
    kv_cached: int = 0
    kv_active: int = 0
    kv_granted: int = 0
    kv_quarantined: int = 0
    step_s: float = 0.0
    steps: int = 0
    busy_s: float = 0.0  # in steps, since the worker's start
    computed_tokens: int = 0  # in these steps

    @property
    def kv_used(self) -> int:
        """Blocks that a new request can't have now."""
        return max(0, self.kv_blocks - self.kv_free - self.kv_cached)

    @property
    def busy(self) -> bool:
        """Something is there to step for."""
        return bool(self.queued or self.running or self.pending_tokens)


@dataclass(slots=True)
class WorkerView:
    """One worker as the policy sees it.

    A heartbeat is up to a second old, so what this router assigned or saw ended since
    then is counted on top of it: else a burst would all go to the same worker.
    """

    id: WorkerId
    role: Role
    model_hash: str
    layout_hash: str
    block_tokens: int
    kv_blocks: int
    max_model_tokens: int
    revision: str = ""
    load: LoadReport = LoadReport()
    usable: bool = False  # announced, not draining, linked, breaker closed
    own_tokens: int = 0  # prompt tokens of this router that it computes now
    tokens_since: int = 0  # assigned less ended since the heartbeat
    blocks_since: int = 0
    running_since: int = 0

    @property
    def ordinal(self) -> int:
        """The pod's number in its set; scale-in takes the highest first."""
        match = _ORDINAL.search(self.id.name)
        return int(match.group(1)) if match else _NO_ORDINAL

    @property
    def pool_tokens(self) -> int:
        return self.kv_blocks * self.block_tokens

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that wait here, as far as this router can know."""
        return max(self.load.pending_tokens + self.tokens_since, self.own_tokens, 0)

    @property
    def kv_used(self) -> int:
        """Blocks in use, granted, or promised by this router since the heartbeat."""
        return max(self.load.kv_used + self.blocks_since, 0)

    @property
    def running(self) -> int:
        return max(self.load.running + self.running_since, 0)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def holds(self, tokens: int) -> bool:
        """Whether it could compute so many tokens and one more (which needs no KV) when
        nothing else is here."""
        return tokens < self.max_model_tokens and tokens <= self.pool_tokens

    def report(self, load: LoadReport) -> None:
        """A heartbeat came: it knows of all that was assigned before."""
        self.load = load
        self.tokens_since = self.blocks_since = self.running_since = 0

    def assign_prefill(self, tokens: int) -> None:
        self.own_tokens += tokens
        self.tokens_since += tokens

    def end_prefill(self, tokens: int) -> None:
        self.own_tokens -= tokens
        self.tokens_since -= tokens

    def assign_decode(self, blocks: int, sequences: int) -> None:
        self.blocks_since += blocks
        self.running_since += sequences

    def end_decode(self, blocks: int, sequences: int) -> None:
        self.blocks_since -= blocks
        self.running_since -= sequences
