"""What a choice of workers costs, in predicted seconds until a request is answered. Pure.

    TTFT   tokens that wait on the worker + this prompt's uncached ones, at its measured
           speed (`speeds`: the longer a prompt, the slower its tokens); then what of the
           hand-over doesn't hide behind computing (pd_core's estimate); the wait for KV
           room on decode
    TPOT   so many steps on the decode worker as it will be, and what this request's KV adds
           to the steps of those that run there already

A worker without measurements is taken for those of its product that have some, else for
all others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pd_core.estimate import Link, exposed_s
from pd_core.work import pairs
from pd_router.fleet import Role, WorkerView
from pd_router.speeds import Speeds

_HORIZON_TOKENS = 256
"""Output beyond it is hope: most answers end earlier, and loads change."""
_FULL_STEP = 2.0
"""A step with the KV pool full takes about so many times as long as one with it empty."""
_FULL_WAIT_S = 2.0
"""For each request that waits for KV room: somebody has to end first."""
FOLLOWERS = 2.0
"""As many wait behind a prompt on a worker that is never idle."""
_ROOM_MARGIN = 1.5
"""Answers end when they end: of what is predicted for the mean a third would be late."""
_HANDOVER_S = 0.005
"""Grant, seal and commit, whatever the size."""
_CHUNK_TOKENS = 512
_DECODE_RESERVE_TOKENS = 256

CachedTokens = Callable[[WorkerView], int]
"""Tokens at this prompt's start that a worker has already."""


@dataclass(frozen=True, slots=True)
class Need:
    """What an attempt takes: tokens to hold at its start, and what may follow."""

    tokens: int  # prompt and tokens already out
    output_tokens: int  # still to come, a choice
    choices: int = 1
    session: bytes = b""  # requests of one conversation; empty: unknown

    def reserve_blocks(self, worker: WorkerView) -> int:
        """Blocks that the worker will reserve for it."""
        reserve = min(self.output_tokens, _DECODE_RESERVE_TOKENS)
        shared = self.tokens // worker.block_tokens
        each = worker.blocks_for(self.tokens + reserve) - shared
        return shared + each * self.choices


@dataclass(frozen=True, slots=True)
class Prefill:
    """What computing the prompt at one worker would take. Seconds and tokens."""

    worker: WorkerView
    compute_tokens: int
    queue_s: float
    compute_s: float

    @property
    def ready_s(self) -> float:
        return self.queue_s + self.compute_s


class Costs:
    """Predictions for one request. Durations in seconds."""

    def __init__(
        self, need: Need, workers: Iterable[WorkerView], link: Link, routers: float = 1.0
    ) -> None:
        self._need = need
        self._link = link
        self._routers = routers
        self._speeds = Speeds(workers)

    def prefill(self, worker: WorkerView, cached_tokens: int) -> Prefill:
        """Waiting and computing at a worker."""
        compute = self._need.tokens - cached_tokens
        compute_s = self._speeds.prompt(worker).seconds(compute, pairs(compute, cached_tokens))
        return Prefill(worker, compute, self.queue_s(worker), compute_s)

    def queue_s(self, worker: WorkerView) -> float:
        """Until a worker begins another prompt. What this router sent since the heartbeat,
        the others that there are sent as well, as far as anybody knows."""
        others = self._routers - 1.0
        tokens = worker.pending_tokens + others * max(worker.tokens_since, 0)
        looked_back = worker.pending_pairs + others * max(worker.pairs_since, 0.0)
        return self._speeds.prompt(worker).seconds(tokens, looked_back)

    def delay(self, prefill: Prefill) -> float:
        """What this prompt takes from those who will come after it: the busier the worker,
        the more of them wait for every token that is computed."""
        share = prefill.queue_s / max(prefill.ready_s, 1e-9)
        return FOLLOWERS * share * prefill.compute_s

    def exposed(self, decode: WorkerView, prefill: Prefill, cached_at_decode: int) -> float:
        """What the hand-over adds after the prompt is computed."""
        tokens = self._need.tokens - cached_at_decode
        pieces = decode.kv_layers * max(-(-prefill.compute_tokens // _CHUNK_TOKENS), 1)
        link = self._link
        if decode.link_bytes_s:
            link = Link(link.name, decode.link_bytes_s, link.round_trip_s)
        size = tokens * prefill.worker.kv_token_bytes  # whoever sends sends its own precision
        return _HANDOVER_S + exposed_s(size, pieces, link, prefill.compute_s)

    def stall(self, decode: WorkerView, prefill: Prefill) -> float:
        """What those that run at a decode worker lose when it computes this prompt."""
        return decode.running * prefill.compute_s

    def decode(self, worker: WorkerView) -> float:
        """Steps for the answer, the others' share in them, and the wait for room."""
        need = self._need
        blocks = need.reserve_blocks(worker)
        promised = worker.kv_used + (self._routers - 1.0) * max(worker.blocks_since, 0)
        fill = (promised + blocks) / worker.kv_blocks
        slope = _FULL_STEP - 1.0
        empty_s = self._speeds.step_s(worker) / (1.0 + slope * worker.step_fill)
        own_s = empty_s * (1.0 + slope * fill)
        others_s = worker.running * empty_s * slope * blocks / worker.kv_blocks
        steps = max(min(need.output_tokens, _HORIZON_TOKENS), 1)
        return steps * (own_s + others_s) + self._room_wait_s(worker, fill)

    def _room_wait_s(self, worker: WorkerView, fill: float) -> float:
        waiting = worker.load.waiting_grants + (1 if fill > 1.0 else 0)
        return _FULL_WAIT_S * waiting * max(fill, 1.0)


def soonest(workers: Iterable[WorkerView]) -> tuple[float, float]:
    """When a worker of those that compute prompts would begin another, in seconds, and the
    speed of all of them together in tokens a second; (0, 0): there is none."""
    usable = [w for w in workers if w.usable]
    computing = [w for w in usable if w.role is Role.PREFILL] or usable
    speeds = Speeds(computing)
    waits = (speeds.prompt(w).seconds(w.pending_tokens, w.pending_pairs) for w in computing)
    return min(waits, default=0.0), sum(speeds.tokens_per_s(w) for w in computing)


def outlook(workers: Iterable[WorkerView], need: Need | None = None) -> tuple[float, float, float]:
    """As `soonest`, but where decode lacks room for `need` (None: for anything) until it has
    some; and so many requests like it get room there in a second. 0: they needn't wait for it."""
    usable = [w for w in workers if w.usable]
    begins_s, tokens_per_s = soonest(usable)
    decoding = [w for w in usable if w.role is not Role.PREFILL]
    room_s = min((_until_room_s(w, need) for w in decoding), default=0.0)
    freed_per_s = 0.0
    if room_s > 0 and need is not None:
        freed_per_s = sum(_freed(w) / need.reserve_blocks(w) for w in decoding)
    return max(begins_s, room_s), tokens_per_s, freed_per_s


def _until_room_s(worker: WorkerView, need: Need | None) -> float:
    """Until a worker has room for one more, behind those that wait; 0 also where nothing is
    known of how long requests keep theirs. Who waits is taken for one like this."""
    blocks = need.reserve_blocks(worker) if need is not None else 1
    waiting = worker.load.waiting_grants * blocks
    short = worker.kv_used + waiting + blocks - worker.kv_blocks
    freed = _freed(worker)
    return _ROOM_MARGIN * short / freed if short > 0 and freed > 0 else 0.0


def _freed(worker: WorkerView) -> float:
    """Blocks a second that come back: those in use, each once in a request's stay."""
    return worker.load.kv_used / worker.stay_s if worker.stay_s > 0 else 0.0
