"""PURE. One engine as a performance model: prompts one after the other, all sequences in each
step.

Between two events its batch stays what it is, so a stretch of steps is one formula instead of
many events: with n sequences over K tokens of KV, step i takes a + c(K + i n), and k steps
take (a + cK) k + c n k^2 / 2. A prompt that is computed here adds its chunk to each step.
"""

import heapq
import math
from collections import deque
from typing import Protocol

from pd_core.work import pairs
from pd_router.fleet import LoadReport, Role, WorkerView
from pd_sim.job import Job
from pd_sim.loop import Loop
from pd_sim.perf import Perf

GAP_BUCKETS = 40
"""Of gaps between tokens, from a millisecond on, a quarter of an octave each."""


class Owner(Protocol):
    """Who hears of what a worker has done."""

    def granted(self, job: Job, worker: "Worker") -> None: ...

    def computed(self, job: Job, worker: "Worker") -> None: ...

    def finished(self, job: Job, worker: "Worker") -> None: ...

    def emptied(self, worker: "Worker") -> None: ...


class Worker:
    """`chunk_tokens` 0: a prompt is computed in one step, in which nobody decodes."""

    def __init__(
        self, view: WorkerView, perf: Perf, chunk_tokens: int, max_running: int, born_s: float
    ) -> None:
        self.view = view
        self.perf = perf
        self.chunk_tokens = chunk_tokens
        self.max_running = max_running
        self.born_s = born_s
        self.ready_s = math.inf
        self.gone_s = math.inf
        self.draining = False
        self.jobs: dict[Job, None] = {}  # all that need this worker, in order
        self.prompts: deque[Job] = deque()  # the first is being computed
        self.grants: deque[Job] = deque()  # wait for room
        self.reserved = 0  # KV tokens granted or in use
        self.seats = 0
        self.batch = 0
        self.kv = 0.0  # tokens of sequences that run
        self.steps = 0.0
        self.busy_s = 0.0
        self.tokens_done = 0.0
        self.pairs_done = 0.0
        self.gaps = [0.0] * GAP_BUCKETS
        self._ends: list[tuple[float, int, Job]] = []
        self._count = 0
        self._chunks_left = 0.0
        self._chunk_s = 0.0
        self._chunk_share = 0.0
        self._chunk_pairs = 0.0
        self._settled_s = born_s
        self._turn = 0

    # ---- requests ------------------------------------------------------------------

    def reserve(self, job: Job, owner: Owner, now: float) -> None:
        """Room for a sequence to its end, now or when its turn comes."""
        self.jobs[job] = None
        self.grants.append(job)
        self._grant(owner, now)

    def compute(self, job: Job, loop: Loop, owner: Owner) -> None:
        """Queues a prompt."""
        self.settle(loop.now)
        self.jobs[job] = None
        self.prompts.append(job)
        if len(self.prompts) == 1:
            self._begin_prompt(loop.now)
            self._plan(loop, owner)

    def join(self, job: Job, loop: Loop, owner: Owner) -> None:
        """A sequence whose first token is out decodes from here on."""
        self.settle(loop.now)
        self._seat(job)
        self._plan(loop, owner)

    def leave(self, job: Job, owner: Owner, now: float) -> None:
        """It needs nothing here any more."""
        del self.jobs[job]
        if job.decode is self and job.reserved:
            self.reserved -= job.reserved
            self.seats -= 1
            job.reserved = 0
            self._grant(owner, now)
        if self.draining and not self.jobs:
            owner.emptied(self)

    def lose_all(self, now: float) -> list[tuple[Job, int]]:
        """It died: those who were here, and how many tokens each has put out."""
        self.settle(now)
        running = {job for _, _, job in self._ends}
        lost = [
            (job, job.emitted + 1 + int(self.steps - job.start_step))
            if job in running
            else (job, job.emitted + (1 if job.first_s >= 0 and job.emitted == 0 else 0))
            for job in self.jobs
        ]
        self._turn += 1
        self.jobs.clear()
        return lost

    def drop_prompt(self, job: Job, loop: Loop, owner: Owner) -> None:
        """A prompt is given up, whether it waits or is being computed."""
        first = self.prompts[0] is job
        self.prompts.remove(job)
        if first and self.prompts:
            self._begin_prompt(loop.now)
        self._plan(loop, owner)

    # ---- what it tells -------------------------------------------------------------

    def load(self, now: float) -> LoadReport:
        self.settle(now)
        block = self.view.block_tokens
        used = -(-self.reserved // block)
        pending = sum(job.compute_tokens for job in self.prompts)
        looked_back = sum(_pairs_of(job) for job in self.prompts)
        return LoadReport(
            queued=len(self.prompts),
            running=self.batch,
            waiting_grants=len(self.grants),
            pending_tokens=pending,
            kv_blocks=self.view.kv_blocks,
            kv_free=max(self.view.kv_blocks - used, 0),
            kv_active=used,
            step_s=self._pace()[0] if self.batch else 0.0,
            steps=int(self.steps),
            busy_s=self.busy_s,
            computed_tokens=int(self.tokens_done),
            computed_pairs=int(self.pairs_done),
            pending_pairs=int(looked_back),
        )

    @property
    def role(self) -> Role:
        return self.view.role

    # ---- time ----------------------------------------------------------------------

    def wake(self, turn: int, loop: Loop, owner: Owner) -> None:
        """Something is due here, unless it was planned anew meanwhile."""
        if turn != self._turn:
            return
        self.settle(loop.now)
        if self.prompts and self._chunks_left <= 1e-6:
            job = self.prompts.popleft()
            if self.prompts:
                self._begin_prompt(loop.now)
            if job.decode is self and job.left > 1:
                self._seat(job)
            owner.computed(job, self)
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, _, job = heapq.heappop(self._ends)
            self.batch -= 1
            self.kv -= job.tokens + job.left - 1
            if not self.batch:
                self.kv = 0.0
            owner.finished(job, self)
        self._plan(loop, owner)

    def _seat(self, job: Job) -> None:
        self.batch += 1
        self.kv += job.tokens
        self._count += 1
        job.start_step, job.end_step = self.steps, self.steps + job.left - 1
        heapq.heappush(self._ends, (job.end_step, self._count, job))

    def _begin_prompt(self, now: float) -> None:
        job = self.prompts[0]
        job.prompt_began_s = now
        tokens = max(job.compute_tokens, 1)
        cached = max(job.tokens - tokens, 0)
        chunk = self.chunk_tokens or tokens
        self._chunks_left = float(-(-tokens // chunk))
        self._chunk_share = tokens / self._chunks_left
        self._chunk_pairs = pairs(tokens, cached) / self._chunks_left
        self._chunk_s = self.perf.prompt_s(tokens, cached, self.chunk_tokens) / self._chunks_left

    def _pace(self) -> tuple[float, float]:
        """Seconds of a step now, and by how much each is longer than the one before."""
        perf, batch = self.perf, self.batch
        if not self.prompts:
            return perf.step_s(batch, self.kv), perf.kv_token_s * batch
        # Weights are read once for the chunk and the sequences together.
        more_s = perf.steps_s[min(batch, len(perf.steps_s) - 1)] - perf.steps_s[0]
        return self._chunk_s + more_s + perf.kv_token_s * self.kv, perf.kv_token_s * batch

    def settle(self, now: float) -> None:
        """Counts the steps since it was last looked at."""
        elapsed_s = now - self._settled_s
        self._settled_s = now
        if elapsed_s <= 0 or not (self.batch or self.prompts):
            return
        first_s, growth_s = self._pace()
        steps = elapsed_s / first_s
        if growth_s > 0:
            root = math.sqrt(first_s * first_s + 2 * growth_s * elapsed_s)
            steps = 2 * elapsed_s / (first_s + root)
        self.steps += steps
        self.busy_s += elapsed_s
        produced = steps * self.batch
        self.kv += produced
        self.tokens_done += produced
        if self.prompts:
            self._chunks_left -= steps
            self.tokens_done += steps * self._chunk_share
            self.pairs_done += steps * self._chunk_pairs
        if self.batch:
            self.gaps[_gap_bucket(elapsed_s / steps)] += produced

    def _plan(self, loop: Loop, owner: Owner) -> None:
        """When the next prompt or sequence is through, if nothing changes."""
        self._turn += 1
        steps = math.inf
        if self.prompts:
            steps = self._chunks_left
        if self._ends:
            steps = min(steps, self._ends[0][0] - self.steps)
        if steps is math.inf:
            return
        steps = max(steps, 0.0)
        first_s, growth_s = self._pace()
        due_s = loop.now + first_s * steps + growth_s * steps * steps / 2
        loop.at(due_s, self.wake, self._turn, loop, owner)

    def _grant(self, owner: Owner, now: float) -> None:
        """In order of asking, while there is room."""
        while self.grants:
            job = self.grants[0]
            tokens = min(job.tokens + job.left, self.perf.kv_tokens)
            if self.seats and (
                self.reserved + tokens > self.perf.kv_tokens or self.seats >= self.max_running
            ):
                return
            self.grants.popleft()
            job.reserved, job.granted_s = tokens, now
            self.reserved += tokens
            self.seats += 1
            owner.granted(job, self)


def _pairs_of(job: Job) -> float:
    return pairs(job.compute_tokens, max(job.tokens - job.compute_tokens, 0))


def _gap_bucket(gap_s: float) -> int:
    return min(max(int(4 * math.log2(max(gap_s, 1e-3) * 1000)), 0), GAP_BUCKETS - 1)


def gap_s(bucket: int) -> float:
    """The middle of a bucket."""
    return float(2 ** ((bucket + 0.5) / 4)) / 1000
