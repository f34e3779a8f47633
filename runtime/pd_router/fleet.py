"""What a router knows of each worker: who it is, what it can hold, how loaded it is. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from pd_core.kv import KvForm
from pd_core.work import pairs
from pd_router.speeds import Fit

_ORDINAL = re.compile(r"-(\d+)$")
_NO_ORDINAL = 1 << 30
_TELLING_STEP_TOKENS = 64
_SPEED_MEMORY = 0.9  # of what was measured before, a heartbeat with news
_STEP_MEMORY = 0.8
_IDLE_BEATS = 10  # then a step's measured time counts no more
_STAY_MEMORY = 0.95
_LINK_FADE = 0.99
_TELLING_SEQUENCES = 4
_MOST_ROUTERS = 16.0
_FOREVER_S = 1e9
_TELLING_TRANSFER_BYTES = 1 << 20


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
    computed_pairs: int = 0  # likewise; 0: it doesn't tell (`speeds`)
    pending_pairs: int = 0

    def computed_since(self, before: "LoadReport") -> tuple[int, int, float] | None:
        """Tokens, pairs and seconds since an earlier report; None where its steps were too
        small to tell how fast it computes: their time was that of starting a step."""
        steps = self.steps - before.steps
        busy_s = self.busy_s - before.busy_s
        tokens = self.computed_tokens - before.computed_tokens
        if steps < 1 or not 0 < busy_s < _FOREVER_S or tokens < steps * _TELLING_STEP_TOKENS:
            return None
        return tokens, self.computed_pairs - before.computed_pairs, busy_s

    @property
    def kv_used(self) -> int:
        """Blocks that a new request can't have now."""
        return max(0, self.kv_blocks - self.kv_free - self.kv_cached)

    @property
    def busy(self) -> bool:
        """Something is there to step for."""
        return bool(self.queued or self.running or self.pending_tokens)


@lru_cache(maxsize=4096)
def _ordinal(name: str) -> int:
    match = _ORDINAL.search(name)
    return int(match.group(1)) if match else _NO_ORDINAL


@dataclass(slots=True)
class WorkerView:
    """One worker as the policy sees it.

    A heartbeat is up to a second old, so what this router assigned or saw ended since
    then is counted on top of it: else a burst would all go to the same worker.
    """

    id: WorkerId
    role: Role
    kv: KvForm
    kv_blocks: int
    max_model_tokens: int
    revision: str = ""
    load: LoadReport = LoadReport()
    usable: bool = False  # announced, not draining, linked, breaker closed
    reachable: bool = False  # for copies: it may drain, but no probe is taken for them
    shares_prefixes: bool = False
    tokens_per_s: float = 0.0  # prefill: what it measured at its start, then in its work
    product: str = ""  # of its accelerator, as the device names itself
    fit: Fit = field(default_factory=Fit)
    kv_token_bytes: float = 0.0
    kv_layers: int = 1
    step_s: float = 0.0  # decode: mean of late, at `step_fill`
    step_fill: float = 0.0  # share of the KV pool that was in use
    idle_beats: int = 0  # heartbeats in a row with nothing running
    stay_s: float = 0.0  # decode: how long a request keeps its room, of late; 0: unknown
    link_bytes_s: float = 0.0  # the fastest hand-over into it of late; 0: none yet
    own_running: int = 0  # sequences of this router
    own_tokens: int = 0  # prompt tokens of this router that it computes now
    own_pairs: float = 0.0
    tokens_since: int = 0  # assigned less ended since the heartbeat
    pairs_since: float = 0.0
    blocks_since: int = 0
    running_since: int = 0

    @property
    def ordinal(self) -> int:
        """The pod's number in its set; scale-in takes the highest first."""
        return _ordinal(self.id.name)

    @property
    def block_tokens(self) -> int:
        return self.kv.block_tokens

    @property
    def pool_tokens(self) -> int:
        return self.kv_blocks * self.block_tokens

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that wait here, as far as this router can know."""
        return max(self.load.pending_tokens + self.tokens_since, self.own_tokens, 0)

    @property
    def pending_pairs(self) -> float:
        return max(self.load.pending_pairs + self.pairs_since, self.own_pairs, 0.0)

    @property
    def only_prompts(self) -> bool:
        return self.role is Role.PREFILL

    @property
    def kv_used(self) -> int:
        """Blocks in use, granted, or promised by this router since the heartbeat."""
        return max(self.load.kv_used + self.blocks_since, 0)

    @property
    def running(self) -> int:
        return max(self.load.running + self.running_since, 0)

    @property
    def outstanding(self) -> int:
        """Sequences that decode here, and those of which it's known that they will: granted
        ones of this router's whose prompts are computed still, all that wait for room."""
        return max(self.running + self.load.waiting_grants, self.own_running)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def holds(self, tokens: int) -> bool:
        """Whether it could compute so many tokens and one more (which needs no KV) when
        nothing else is here."""
        return tokens < self.max_model_tokens and tokens <= self.pool_tokens

    @property
    def foreign_running(self) -> int:
        """Sequences here that aren't this router's."""
        return max(self.running - self.own_running, 0)

    def report(self, load: LoadReport) -> None:
        """A heartbeat came: it knows of all that was assigned before."""
        self._learn(load)
        self.load = load
        self.tokens_since = self.blocks_since = self.running_since = 0
        self.pairs_since = 0.0

    def carried(self, kv_bytes: int, transfer_s: float) -> None:
        """A hand-over into it ended. One that prefill held up shows less than the link can:
        the fastest counts, and fades."""
        if transfer_s > 0 and kv_bytes >= _TELLING_TRANSFER_BYTES:
            self.link_bytes_s = max(self.link_bytes_s * _LINK_FADE, kv_bytes / transfer_s)

    def stayed(self, seconds: float) -> None:
        """A request of this router gave its room back."""
        kept = _STAY_MEMORY if self.stay_s else 0.0
        self.stay_s = kept * self.stay_s + (1 - kept) * seconds

    def _learn(self, load: LoadReport) -> None:
        computed = load.computed_since(self.load)
        if computed is not None and self.only_prompts:
            tokens, looked_back, busy_s = computed
            kept = _SPEED_MEMORY if self.tokens_per_s else 0.0
            self.tokens_per_s = kept * self.tokens_per_s + (1 - kept) * tokens / busy_s
            if looked_back > 0:
                self.fit.add(tokens, looked_back, busy_s)
        if load.running and load.step_s > 0 and load.kv_blocks:
            kept = _STEP_MEMORY if self.step_s else 0.0
            fill = load.kv_used / load.kv_blocks
            self.step_s = kept * self.step_s + (1 - kept) * load.step_s
            self.step_fill = kept * self.step_fill + (1 - kept) * fill
            self.idle_beats = 0
        elif not load.running:
            self._forget_step()

    def _forget_step(self) -> None:
        """One that was measured in a bad moment, and therefore gets no work, would never be
        measured again: after a while it's taken for those like it."""
        self.idle_beats += 1
        if self.idle_beats >= _IDLE_BEATS:
            self.step_s = self.step_fill = 0.0

    def assign_prefill(self, tokens: int) -> None:
        """What is cached before them isn't counted until a heartbeat tells."""
        self._owe(tokens, pairs(tokens))

    def end_prefill(self, tokens: int) -> None:
        self._owe(-tokens, -pairs(tokens))

    def _owe(self, tokens: int, looked_back: float) -> None:
        self.own_tokens += tokens
        self.tokens_since += tokens
        self.own_pairs += looked_back
        self.pairs_since += looked_back

    def assign_decode(self, blocks: int, sequences: int) -> None:
        self.blocks_since += blocks
        self.running_since += sequences
        self.own_running += sequences

    def end_decode(self, blocks: int, sequences: int) -> None:
        self.blocks_since -= blocks
        self.running_since -= sequences
        self.own_running -= sequences


def routers_seen(views: Sequence[WorkerView]) -> float:
    """How many routers like this one would explain what runs on the workers; 1: it alone.

    Routers don't know each other. A few sequences tell nothing: they may be on their way.
    """
    running = sum(view.running for view in views)
    foreign = sum(view.foreign_running for view in views)
    if foreign < _TELLING_SEQUENCES:
        return 1.0
    return min(running / max(running - foreign, 1), _MOST_ROUTERS)
