"""The values that the engine's parts hand to each other. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pd_core.failures import Failure
from pd_core.kv import KvLayout

RequestKey = tuple[int, int]
"""(number of the router's stream, handle on it): unique within the process."""


class Mode(Enum):
    """What a worker does for a request."""

    LOCAL = "local"  # prefill and decode here
    EXPORT = "export"  # prefill here, hand the KV over
    IMPORT = "import"  # reserve room, take KV over, decode here


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to pick tokens. `stop_token_ids` holds the model's end tokens too."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added), each token once
    grammar: str = ""  # that the output keeps to

    @property
    def penalizes(self) -> bool:
        """A draw depends on which tokens there were before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at a request as a worker sees it.

    `token_ids` is the client's prompt and, when resumed, the tokens emitted so far;
    `prompt_tokens` says where the client's prompt ends. Output indices count from there.
    `deadline` and `grant_deadline` are on this process's monotonic clock, in seconds.
    `tpot_s`: what its client was promised between two tokens; 0: nothing.
    """

    key: RequestKey
    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    prompt_tokens: int
    choices: tuple[int, ...]
    sampling: Sampling
    mode: Mode
    deadline: float
    grant_deadline: float
    priority: int = 0
    cache_salt: bytes = b""
    tpot_s: float = 0.0

    @property
    def first_index(self) -> int:
        """Index of the next token to sample."""
        return len(self.token_ids) - self.prompt_tokens


class Guide(Protocol):
    """What one sequence may write next. It follows the sequence's tokens."""

    def note(self, token: int) -> None:
        """The sequence has this token more."""
        ...

    def mask(self, ahead: Sequence[int]) -> bytes | None:
        """A bit for each token, the lowest first: set for those that may come after `ahead`.
        None where `ahead` itself may not be written."""
        ...

    def fork(self) -> "Guide":
        """Another one that stands where this one does."""
        ...

    @property
    def problem(self) -> str:
        """Why it can't say any more; empty as long as it can."""
        ...


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Sample one token from the row's last logits. `index` seeds the draw with choice.

    `seen`, where the sampling penalizes: how often each token of the sequence was generated,
    0 for those that the prompt alone has. Nothing changes it while a step runs. `guide` says
    what may be drawn after `ahead`, the guesses before this draw.
    """

    choice: int
    index: int
    sampling: Sampling
    seen: Mapping[int, int] | None = None
    guide: Guide | None = None
    ahead: tuple[int, ...] = ()

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        """Tokens that may not be drawn yet (min_tokens)."""
        s = self.sampling
        return s.stop_token_ids if self.index < s.min_tokens else ()


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence to compute in a step.

    Positions start, start+1, …; `block_table[i]` is the pool block that holds positions
    [i*block_tokens, (i+1)*block_tokens). Covers at least start + len(token_ids). The last
    `drafts` tokens are guesses: then there is a sample for the token before them and for
    each of them. All samples of other rows are for the last token.

    A draft model is to guess `proposals` tokens behind what the row draws; `text` is then all
    that the sequence has until now. Nothing changes it while a step runs.
    """

    seq_id: int
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: tuple[SampleSpec, ...] = ()
    drafts: int = 0
    proposals: int = 0
    text: Sequence[int] = ()

    @property
    def decodes(self) -> bool:
        """It computes one token that is known, and maybe guesses."""
        return len(self.token_ids) == 1 + self.drafts


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. `copies` are (source block, destination block), done first."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token with, where asked for, log-probabilities (natural log)."""

    choice: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step drew, in the order of each row's samples, and what a draft model guesses
    behind that; both by seq_id."""

    samples: dict[int, tuple[Sampled, ...]]
    proposals: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenOut:
    """One token of one choice, as it leaves the engine."""

    choice: int
    index: int
    token: int
    finish: Finish | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class LayerCallback(Protocol):
    """KV of layers [first, end) of a step's rows is final."""

    def __call__(self, first: int, end: int) -> None: ...


class StepRunner(Protocol):
    """What the core needs of `runner.Runner`."""

    layout: KvLayout
    vocab_size: int
    prefill_tokens_per_s: float

    def step(self, batch: Batch, on_layers: LayerCallback | None = None) -> StepOutput: ...


# ---- what the scheduler reports ------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """An IMPORT request has its blocks. The KV goes to `block_ids[prefix_blocks:prompt_blocks]`."""

    key: RequestKey
    block_ids: tuple[int, ...]  # the blocks of token_ids (whole prompt), prefix first
    prefix_blocks: int  # leading ones that hold valid KV already
    wait_s: float


@dataclass(frozen=True, slots=True)
class Advanced:
    """An EXPORT request's KV for positions below `computed_tokens` is final."""

    key: RequestKey
    computed_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A LOCAL or EXPORT request's prompt is computed and token 0 drawn for each choice."""

    key: RequestKey
    first: tuple[TokenOut, ...]
    cached_tokens: int
    queue_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Later tokens of a request (index of the attempt's second token on). `guessed` of them
    came by guesses that were right."""

    key: RequestKey
    tokens: tuple[TokenOut, ...]
    guessed: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices ended; the scheduler holds nothing for the request any more."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request is over and holds nothing any more."""

    key: RequestKey
    failure: Failure


SchedulerEvent = Granted | Advanced | Prefilled | Tokens | Finished | RequestFailed


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's load as its heartbeat tells it. Blocks by state add up to kv_blocks."""

    queued: int = 0
    running: int = 0
    waiting_grants: int = 0
    pending_tokens: int = 0
    pending_pairs: int = 0
    kv_blocks: int = 0
    kv_free: int = 0
    kv_cached: int = 0
    kv_active: int = 0
    kv_granted: int = 0
    kv_quarantined: int = 0


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """Prefix hashes that the pool gained and lost since it was last asked."""

    gained: tuple[bytes, ...] = field(default_factory=tuple)
    lost: tuple[bytes, ...] = field(default_factory=tuple)
