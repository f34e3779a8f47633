"""The values that the router's parts hand to each other. Pure.

`app` makes a GenerateRequest and a Sink, `session` runs it over the workers and calls
the sink. Durations are seconds; times are on this process's monotonic clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from pd_core.failures import Failure

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the workers pick tokens: the fields of the wire's Sampling, all of them set.

    `stop_token_ids` holds the model's end tokens too, unless `ignore_eos`.
    """

    max_tokens: int  # per choice, counted from the end of the client's prompt; at least 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # unsigned, 64 bits
    logprobs: bool = False
    top_logprobs: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added), each token once
    grammar: str = ""  # that the answer keeps to, in llguidance's words; empty: none


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue, `choices` times. `request_id` is unique among live requests."""

    request_id: str
    token_ids: tuple[int, ...]
    choices: int
    sampling: Sampling
    deadline_s: float  # what is left of the request's time when it is started
    priority: int = 0  # larger goes first
    cache_salt: bytes = b""
    session: bytes = b""  # the same for all requests of a conversation; empty: unknown
    sla: str | None = None  # a class of admission; None: the default one
    tenant: str = ""  # whose share and rate it counts against


class Who(NamedTuple):
    """Who asks. `sla` None: the default class. `session` empty: unknown. `salt`: whose prompts
    may find each other in a prefix cache; empty: everybody's."""

    tenant: str = ""
    sla: str | None = None
    session: bytes = b""
    salt: bytes = b""


NOBODY = Who()


class Considered(NamedTuple):
    """One way to serve a request, with what it was predicted to take. Seconds, tokens.
    No prefill: decode computes the prompt."""

    decode: str
    prefill: str | None
    compute_tokens: int
    queue_s: float
    compute_s: float
    ttft_s: float
    total_s: float

    def document(self) -> dict[str, Any]:
        """For the trace header: milliseconds are enough."""
        return {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in self._asdict().items()
        }


@dataclass(slots=True)
class Timeline:
    """What happened to one request and when. Shown by the debug page and `pdcluster up`.

    Sessions fill in all but the last block, which the HTTP side does.
    """

    request_id: str
    accepted: float  # monotonic
    prompt_tokens: int = 0
    queue_s: float = 0.0  # in admission
    grant_wait_s: float = 0.0  # for KV room on the decode worker
    prefill_worker: str = ""
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0  # prompt tokens that were not computed
    pulled_from: str = ""  # a worker that was asked for a copy of the prompt's beginning
    pulled_tokens: int = 0  # of the cached ones: copied before the prompt was computed
    pulled_bytes: int = 0
    pull_s: float = 0.0  # until the copy was there, or given up
    pulls_failed: int = 0
    pulls_cancelled: int = 0  # the request was over, or went elsewhere, before they were
    kv_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0  # of it: after token 0 had come, before decode had all
    transport: str = ""  # empty: nothing was handed over
    decode_worker: str = ""
    attempts: int = 0
    reason: str = ""  # why these workers
    considered: tuple[Considered, ...] = ()  # the last attempt's candidates

    sla: str = ""  # its class of service
    tokenize_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    completion_tokens: int = 0  # of all choices
    choices: int = 1


class Sink(Protocol):
    """Where a generation's output goes.

    Called in the event loop by whoever reads the worker's stream: must return at once
    and never raise. Indices of a choice are contiguous from 0 and come once each. The
    last call is on_done or on_failed, and after Generation.cancel() there is none.
    """

    def on_token(
        self,
        choice: int,
        index: int,
        token: int,
        finish: FinishReason | None,
        logprob: float | None,
        top: tuple[tuple[int, float], ...],
    ) -> None: ...

    def on_done(self) -> None:
        """Every choice got its finish."""
        ...

    def on_failed(self, failure: Failure) -> None: ...


class Generation(Protocol):
    """A request that runs."""

    @property
    def timeline(self) -> Timeline: ...

    def cancel(self) -> None:
        """Frees all of it, at any stage. Calling it again, or after the end, does nothing."""
        ...


class SessionsApi(Protocol):
    """Starts requests."""

    def start(self, request: GenerateRequest, sink: Sink) -> Generation:
        """Raises RequestFailure when refused at once. Calls the sink only after returning."""
        ...


@dataclass(frozen=True, slots=True)
class Bundle:
    """What it takes to tokenize for a model (the wire's TokenizerBundle)."""

    bundle_hash: str
    tokenizer_json: bytes
    chat_template: str = ""  # empty: the model has none
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, …
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    vocab_size: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the best usable workers can take for one request: prompt and output tokens."""

    context_tokens: int  # the model's context
    pool_tokens: int  # the KV pool


class WorkersApi(Protocol):
    """What the HTTP side wants to know of the workers."""

    def ready(self) -> bool:
        """A request would find workers now."""
        ...

    def expecting(self) -> bool:
        """No bundle may be here yet, but one may well come: somebody has announced itself,
        or workers are being started for the requests that wait."""
        ...

    async def settled(self) -> None:
        """Returns once a worker that decodes is usable, or those that there are have had the
        time to find this router since its start."""
        ...

    async def decoding(self) -> None:
        """Returns once a worker that decodes is usable."""
        ...

    def bundle(self) -> Bundle | None:
        """The model's current bundle; the same object until it changes."""
        ...

    def on_bundle(self, callback: Callable[[Bundle], None]) -> None:
        """Calls back in the loop whenever another bundle becomes current."""
        ...

    def limits(self) -> Limits | None:
        """None while no usable worker is known."""
        ...

    def snapshot(self) -> list[dict[str, Any]]:
        """One JSON-ready object a worker, for the debug page."""
        ...

    def signals(self) -> list[dict[str, Any]]:
        """One JSON-ready object a worker, for those who scale: what it last said of itself."""
        ...
