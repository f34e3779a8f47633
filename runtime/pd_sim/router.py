"""PURE. The router of the simulation: admission, policy and prefix index are the product's.

What it leaves out: the protocol's frames (`walk` has a simulation of its own), tokenizing,
and all time that isn't waiting, computing or sending KV (`overhead_s` stands for it).
"""

from dataclasses import dataclass

from pd_core.estimate import Link, estimate
from pd_core.failures import Failure
from pd_router.admission import Admission, AdmissionConfig, Verdict
from pd_router.fleet import Role, WorkerView
from pd_router.policy import Unplaced, place
from pd_router.prefixes import PrefixIndex
from pd_router.signals import Queued, Signals
from pd_router.types import Timeline
from pd_sim.job import Job
from pd_sim.loop import Loop
from pd_sim.pools import Pools
from pd_sim.trace import Request
from pd_sim.worker import Worker

PLACE_AGAIN_S = 1.0
_ALL_RUN = AdmissionConfig(max_running=1 << 20, max_queued=1 << 20)


@dataclass(slots=True)
class Outcome:
    """What a request got. NaN-free: a request that was refused has no times."""

    at_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    waited_s: float = 0.0  # of the first token: for decode's room


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """`cache_blocks`: prefix blocks of the trace's size that a worker keeps."""

    link: Link
    admission: AdmissionConfig = _ALL_RUN
    block_tokens: int = 512
    cache_blocks: int = 512
    overhead_s: float = 0.003


class SimRouter:
    """Takes requests, gives them to workers, tells what came of it."""

    def __init__(self, plan: RouterPlan, loop: Loop, pools: Pools) -> None:
        self.plan = plan
        self.loop = loop
        self.pools = pools
        self.signals = Signals("simulated", 0.0)
        self.admission = Admission(plan.admission)
        self.index = PrefixIndex(max(plan.cache_blocks, 1))
        self.outcomes: list[Outcome] = []
        self.held: list[Job] = []
        self.live: dict[str, Job] = {}
        self.refused = 0
        self._transfers: dict[tuple[int, str], float] = {}

    # ---- a request's way -----------------------------------------------------------

    def arrive(self, request: Request) -> None:
        job = Job(str(len(self.outcomes)), request)
        self.outcomes.append(Outcome(request.at_s))
        self.signals.arrived(request.prompt_tokens, 1)
        verdict = self.admission.offer(job.key)
        if isinstance(verdict, Failure):
            self.refused += 1
            return
        self.live[job.key] = job
        if verdict is Verdict.ADMITTED:
            self._start(job)

    def _start(self, job: Job) -> None:
        if job.admitted_s < 0:
            job.admitted_s = self.loop.now
        found = place(
            job.need,
            self.pools.views,
            self._cached(job),
            job.exclusions,
            block_hash=job.prompt.at,
        )
        if isinstance(found, Unplaced):
            if not self.held:
                self.loop.at(self.loop.now + PLACE_AGAIN_S, self.place_held)
            self.held.append(job)
            self.signals.hold(1)
            return
        job.placed_s = self.loop.now
        decode = self.pools.workers[found.decode]
        prefill = self.pools.workers[found.prefill] if found.prefill else decode
        job.decode, job.prefill = decode, prefill
        job.compute_tokens = found.compute_tokens
        prefill.view.assign_prefill(job.compute_tokens)
        decode.view.assign_decode(found.blocks, 1)
        job.blocks = found.blocks
        if prefill is not decode:
            prefill.jobs[job] = None
        decode.reserve(job, self, self.loop.now)

    def place_held(self) -> None:
        """Those who found no worker try again."""
        held, self.held = self.held, []
        self.signals.hold(-len(held))
        for job in held:
            self._start(job)

    def granted(self, job: Job, worker: Worker) -> None:
        del worker
        prefill = job.prefill
        assert isinstance(prefill, Worker)
        prefill.compute(job, self.loop, self)

    def computed(self, job: Job, worker: Worker) -> None:
        """Token 0 is out."""
        now, outcome = self.loop.now, self.outcomes[int(job.key)]
        worker.view.end_prefill(job.compute_tokens)
        self.index.update(worker.view.id, job.prompt.blocks)
        if job.first_s < 0:
            job.first_s = now
            outcome.ttft_s = now - job.arrived_s + self.plan.overhead_s
            outcome.waited_s = max(job.granted_s - job.placed_s, 0.0)
            self.signals.first_text(self._timeline(job), outcome.ttft_s, now)
        if job.left <= 1:
            self._done(job)
            return
        decode = job.decode
        if decode is worker:
            return
        assert isinstance(decode, Worker)
        self.loop.at(now + self._exposed_s(job), self._arrived, job, job.attempt)
        worker.leave(job, self, now)

    def _arrived(self, job: Job, attempt: int) -> None:
        """Its KV is complete on the decode worker."""
        if attempt == job.attempt and isinstance(job.decode, Worker):
            job.decode.join(job, self.loop, self)

    def finished(self, job: Job, worker: Worker) -> None:
        del worker
        self._done(job)

    def emptied(self, worker: Worker) -> None:
        self.index.forget(worker.view.id)
        self.pools.gone(worker)

    def _done(self, job: Job) -> None:
        now, outcome = self.loop.now, self.outcomes[int(job.key)]
        job.done_s = now
        if job.output > 1:
            outcome.tpot_s = (now - job.first_s) / (job.output - 1)
        else:
            outcome.tpot_s = 0.0
        timeline = self._timeline(job)
        timeline.completion_tokens = job.output
        timeline.tpot_s = outcome.tpot_s if job.output > 1 else None
        self.signals.ended(timeline, now)
        for worker in {job.prefill, job.decode}:
            if isinstance(worker, Worker) and job in worker.jobs:
                if worker is job.decode:
                    worker.view.end_decode(job.blocks, 1)
                worker.leave(job, self, now)
        del self.live[job.key]
        for key in self.admission.release(job.key):
            self._start(self.live[key])

    # ---- trouble -------------------------------------------------------------------

    def died(self, worker: Worker) -> None:
        """Whoever needed it begins a new attempt elsewhere."""
        self.index.forget(worker.view.id)
        lost = worker.lose_all(self.loop.now)
        for job, emitted in lost:
            if worker is not job.decode and job.first_s >= 0 and job.emitted == 0:
                continue  # its part was over
            for other in (job.prefill, job.decode):
                if isinstance(other, Worker) and other is not worker and job in other.jobs:
                    self._take_off(job, other)
            job.again(min(emitted, job.output - 1))
            self._start(job)

    def _take_off(self, job: Job, worker: Worker) -> None:
        worker.settle(self.loop.now)
        if job in worker.grants:
            worker.grants.remove(job)
        if job in worker.prompts:
            worker.drop_prompt(job, self.loop, self)
            worker.view.end_prefill(job.compute_tokens)
        if worker is job.decode:
            worker.view.end_decode(job.blocks, 1)
        worker.leave(job, self, self.loop.now)

    # ---- what it tells -------------------------------------------------------------

    def queued(self) -> Queued:
        """What waits in admission. Those that are held wait as well."""
        if not self.admission.queued and not self.held:
            return Queued()
        waiting = [job for job in self.live.values() if job.admitted_s < 0] + self.held
        return Queued(len(waiting), sum(job.tokens for job in waiting), len(waiting))

    def heartbeats(self) -> None:
        now = self.loop.now
        for worker in self.pools.workers.values():
            worker.view.report(worker.load(now))

    def _cached(self, job: Job) -> "_Cached":
        return _Cached(self.index, job, self.plan.block_tokens)

    def _timeline(self, job: Job) -> Timeline:
        began_s = job.prompt_began_s
        return Timeline(
            request_id=job.key,
            accepted=job.arrived_s,
            prompt_tokens=len(job.prompt),
            queue_s=max(job.placed_s - job.arrived_s, 0.0),
            grant_wait_s=max(job.granted_s - job.placed_s, 0.0),
            prefill_queue_s=max(began_s - job.granted_s, 0.0),
            prefill_s=max(job.first_s - began_s, 0.0),
            cached_tokens=max(len(job.prompt) - job.compute_tokens, 0),
        )

    def _exposed_s(self, job: Job) -> float:
        """What of the KV's hand-over nothing hides."""
        prefill = job.prefill
        assert isinstance(prefill, Worker)
        # To 5%: lengths recur, the estimate doesn't change much between them.
        tokens = job.tokens if job.tokens < 64 else job.tokens // 32 * 32
        key = (tokens, prefill.perf.name)
        known = self._transfers.get(key)
        if known is None:
            speed = tokens / prefill.perf.prompt_s(tokens)
            made = estimate(prefill.perf.kv, tokens, self.plan.link, speed)
            known = self._transfers[key] = made.exposed_s
        return known


class _Cached:
    """Tokens of a prompt that a worker has already."""

    __slots__ = ("_block_tokens", "_index", "_job")

    def __init__(self, index: PrefixIndex, job: Job, block_tokens: int) -> None:
        self._index, self._job, self._block_tokens = index, job, block_tokens

    def __call__(self, worker: WorkerView) -> int:
        if not self._job.prompt.blocks or worker.role is Role.DECODE:
            return 0
        return self._index.cached_tokens(worker.id, self._job.prompt, self._block_tokens)
