"""A trace through simulated workers by the product's own policy, with several routers.

Workers, their speeds and virtual time are `pd_sim`'s. Added here: each router knows only
what heartbeats told it, a second old at most, and what it did itself since; prefix caches
are the workers' own, and routers hear of them late. Who begins with all that an earlier
request had is the next turn of its session.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pd_core.estimate import Link, exposed_s
from pd_core.kv import KvForm
from pd_router.fleet import LoadReport, Role, WorkerId, WorkerView, routers_seen
from pd_router.policy import Unplaced, place
from pd_router.prefixes import PrefixIndex
from pd_router.routing import Chance, Routing
from pd_router.speeds import Fit
from pd_sim.job import Job, Prompt
from pd_sim.loop import Loop
from pd_sim.perf import Perf
from pd_sim.trace import MOONCAKE_BLOCK_TOKENS, Request, Trace
from pd_sim.worker import Worker

_BLOCK_TOKENS = 16
_KV = KvForm("m", "bfloat16", _BLOCK_TOKENS, layers=1, kv_heads=1, head_dim=1)  # any: all alike
_HEARTBEAT_S = 1.0
_CHUNK_TOKENS = 512
_HANDOVER_S = 0.003
_SPREAD = 2654435761  # makes a checksum a lot of 64 bits
_AFTER_S = 600.0  # the last requests get so long to end
_SPEED_PROMPT_TOKENS = 512  # what a worker measures itself with when it starts


@dataclass(frozen=True, slots=True)
class Site:
    """Who serves: a Perf for each worker."""

    prefill: tuple[Perf, ...]
    decode: tuple[Perf, ...]
    link: Link
    routers: int = 1


@dataclass(slots=True)
class Outcome:
    """Seconds; None: it never came to that."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(slots=True)
class Result:
    outcomes: list[Outcome]
    seconds: float
    computed_tokens: int = 0
    prompt_tokens: int = 0
    local: int = 0
    by_prefill: dict[str, float] = field(default_factory=dict)  # seconds computing

    def goodput(self, ttft_s: float, tpot_s: float) -> float:
        """Requests a second that were served in time."""
        good = sum(
            o.ttft_s is not None and o.ttft_s <= ttft_s and (o.tpot_s or 0.0) <= tpot_s
            for o in self.outcomes
            if o.tpot_s is not None
        )
        return good / self.seconds

    def ttft(self, percent: float) -> float:
        times = sorted(o.ttft_s if o.ttft_s is not None else _AFTER_S for o in self.outcomes)
        return times[min(int(len(times) * percent / 100), len(times) - 1)]

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.computed_tokens / max(self.prompt_tokens, 1)

    @property
    def imbalance(self) -> float:
        """The busiest prefill worker's time against the mean."""
        times = list(self.by_prefill.values())
        return max(times) / (sum(times) / len(times)) if times and sum(times) else 1.0


def sessions(requests: Iterable[Request]) -> list[bytes]:
    """Each request's session, which traces don't tell: a prompt that begins with all whole
    blocks of an earlier one goes on with that one's, which then nobody else does: what many
    begin with is no session. Without blocks: of nobody knows which."""
    ends: dict[bytes, bytes] = {}
    found = []
    for number, request in enumerate(requests):
        whole = request.blocks[:-1]  # the last one is seldom full, and no other's begin
        last = next((block for block in reversed(whole) if block in ends), b"")
        session = ends.pop(last) if last else b"%d" % number if whole else b""
        if whole:
            ends[whole[-1]] = session
        found.append(session)
    return found


class _Simulated(Worker):
    """A worker with a prefix cache: what it holds when a prompt's turn comes counts."""

    def __init__(self, view: WorkerView, perf: Perf, chunk_tokens: int, blocks: int) -> None:
        super().__init__(view, perf, chunk_tokens, max_running=256, born_s=0.0)
        self.ready_s = 0.0
        self.cache: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = blocks
        self.gained: list[bytes] = []
        self.lost: list[bytes] = []
        self.computed_tokens = 0
        self.prompt_seconds = 0.0

    def cached_tokens(self, prompt: Prompt) -> int:
        most = (len(prompt) - 1) // MOONCAKE_BLOCK_TOKENS
        count = 0
        for key in prompt.blocks[:most]:
            if key not in self.cache:
                break
            self.cache.move_to_end(key)
            count += 1
        return count * MOONCAKE_BLOCK_TOKENS

    def keep(self, prompt: Prompt) -> None:
        for key in prompt.blocks:
            if key not in self.cache:
                self.gained.append(key)
            self.cache[key] = None
            self.cache.move_to_end(key)
        while len(self.cache) > self.capacity:
            old, _ = self.cache.popitem(last=False)
            self.lost.append(old)

    def _begin_prompt(self, now: float) -> None:
        job = self.prompts[0]
        job.compute_tokens = job.tokens - self.cached_tokens(job.prompt)
        self.computed_tokens += job.compute_tokens
        super()._begin_prompt(now)
        self.prompt_seconds += self._chunks_left * self._chunk_s

    def load(self, now: float) -> LoadReport:
        step_s = self.perf.step_s(self.batch, self.kv) if self.batch else 0.0
        return replace(super().load(now), step_s=step_s)


class _Router:
    """What one router knows."""

    def __init__(self, views: Sequence[WorkerView], routing: Routing) -> None:
        self.views = {view.id: view for view in views}
        self.routing = routing
        self.index = PrefixIndex()
        self.turn = 0
        self.routers = 1.0

    def hear(self, worker: _Simulated, load: LoadReport) -> None:
        view = self.views[worker.view.id]
        view.report(load)
        self.index.update(view.id, worker.gained, worker.lost)
        self.routers += 0.1 * (routers_seen(list(self.views.values())) - self.routers)

    def place(self, job: Job, session: bytes) -> Any:
        def cached(view: WorkerView) -> int:
            return self.index.cached_tokens(view.id, job.prompt, MOONCAKE_BLOCK_TOKENS)

        self.turn += 1
        chance = Chance(zlib.crc32(job.key.encode()) * _SPREAD, self.turn, self.routers)
        return place(
            replace(job.need, session=session),
            self.views.values(),
            cached,
            job.exclusions,
            block_hash=job.prompt.at,
            routing=self.routing,
            chance=chance,
        )


class Replay:
    """One run."""

    def __init__(self, site: Site, trace: Trace, routing: Routing) -> None:
        self.site, self.trace = site, trace
        self.loop = Loop()
        self.workers = {
            worker.view.id: worker
            for role, perfs in ((Role.PREFILL, site.prefill), (Role.DECODE, site.decode))
            for number, perf in enumerate(perfs)
            for worker in [_worker(role, number, perf)]
        }
        self.routers = [
            _Router([replace(w.view, fit=Fit()) for w in self.workers.values()], routing)
            for _ in range(site.routers)
        ]
        self.sessions = sessions(trace.requests)
        self.outcomes: list[Outcome] = []
        self.at_router: dict[str, tuple[_Router, int]] = {}
        self.local = 0

    def run(self) -> Result:
        for number, worker in enumerate(self.workers.values()):
            self.loop.at(_HEARTBEAT_S * number / len(self.workers), self._beat, worker)
        for request in self.trace.requests:
            self.loop.at(request.at_s, self._arrive, request)
        self.loop.run(self.trace.seconds + _AFTER_S)
        made = Result(self.outcomes, self.trace.seconds)
        for worker in self.workers.values():
            made.computed_tokens += worker.computed_tokens
            if worker.role is Role.PREFILL:
                made.by_prefill[worker.view.id.name] = worker.prompt_seconds
        made.prompt_tokens = sum(one.prompt_tokens for one in self.trace.requests)
        made.local = self.local
        return made

    def _beat(self, worker: _Simulated) -> None:
        load = worker.load(self.loop.now)
        for router in self.routers:
            router.hear(worker, load)
        worker.gained, worker.lost = [], []
        self.loop.at(self.loop.now + _HEARTBEAT_S, self._beat, worker)

    def _arrive(self, request: Request) -> None:
        number = len(self.outcomes)
        job = Job(str(number), request)
        self.outcomes.append(Outcome())
        router = self.routers[zlib.crc32(job.key.encode()) % len(self.routers)]
        found = router.place(job, self.sessions[number])
        if isinstance(found, Unplaced):
            return
        job.decode = decode = self.workers[found.decode]
        job.prefill = self.workers[found.prefill] if found.prefill else decode
        self.local += found.prefill is None
        job.blocks = found.blocks
        router.views[found.prefill or found.decode].assign_prefill(found.compute_tokens)
        router.views[found.decode].assign_decode(found.blocks, 1)
        self.at_router[job.key] = (router, found.compute_tokens)
        decode.reserve(job, self, self.loop.now)

    # ---- pd_sim.worker.Owner ------------------------------------------------------------

    def granted(self, job: Job, worker: Worker) -> None:
        del worker
        assert isinstance(job.prefill, _Simulated)
        job.prefill.compute(job, self.loop, self)

    def computed(self, job: Job, worker: Worker) -> None:
        assert isinstance(worker, _Simulated)
        now = self.loop.now
        worker.keep(job.prompt)
        router, tokens = self.at_router[job.key]
        router.views[worker.view.id].end_prefill(tokens)
        job.first_s = now
        self.outcomes[int(job.key)].ttft_s = now - job.arrived_s
        if job.left <= 1:
            self._end(job)
        elif job.decode is not worker:
            assert isinstance(job.decode, _Simulated)
            job.decode.keep(job.prompt)
            self.loop.at(now + self._exposed_s(job), self._carried, job)
            worker.leave(job, self, now)

    def _carried(self, job: Job) -> None:
        assert isinstance(job.decode, _Simulated)
        job.decode.join(job, self.loop, self)

    def _exposed_s(self, job: Job) -> float:
        assert isinstance(job.prefill, _Simulated)
        perf = job.prefill.perf
        pieces = perf.kv.layers * -(-max(job.compute_tokens, 1) // _CHUNK_TOKENS)
        prefill_s = perf.prompt_s(max(job.compute_tokens, 1))
        size = job.tokens * perf.kv.token_bytes
        return _HANDOVER_S + exposed_s(size, pieces, self.site.link, prefill_s)

    def finished(self, job: Job, worker: Worker) -> None:
        del worker
        self._end(job)

    def emptied(self, worker: Worker) -> None:
        """Nobody drains here."""

    def _end(self, job: Job) -> None:
        now, outcome = self.loop.now, self.outcomes[int(job.key)]
        outcome.tpot_s = (now - job.first_s) / max(job.output - 1, 1)
        router, _ = self.at_router.pop(job.key)
        for worker in {job.prefill, job.decode}:
            if isinstance(worker, _Simulated) and job in worker.jobs:
                worker.leave(job, self, now)
        assert isinstance(job.decode, _Simulated)
        router.views[job.decode.view.id].end_decode(job.blocks, 1)


def _worker(role: Role, number: int, perf: Perf) -> _Simulated:
    view = WorkerView(
        id=WorkerId(f"{role.value}-{number}", "e"),
        role=role,
        kv=_KV,
        kv_blocks=max(perf.kv_tokens // _BLOCK_TOKENS, 1),
        max_model_tokens=1 << 20,
        usable=True,
        tokens_per_s=_SPEED_PROMPT_TOKENS / perf.prompt_s(_SPEED_PROMPT_TOKENS),
        product=perf.product,
        kv_token_bytes=perf.kv.token_bytes,
        kv_layers=perf.kv.layers,
    )
    chunk = 0 if role is Role.PREFILL else _CHUNK_TOKENS
    # What runs on a decode worker leaves about half of its pool to the cache.
    blocks = perf.kv_tokens // MOONCAKE_BLOCK_TOKENS // (1 if role is Role.PREFILL else 2)
    return _Simulated(view, perf, chunk, blocks)
