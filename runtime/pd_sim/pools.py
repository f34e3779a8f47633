"""PURE. Workers come, load, serve, drain and go; each is paid for from the first second on."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pd_core.kv import KvForm
from pd_operator.api import Role as PoolRole
from pd_router.fleet import Role, WorkerId, WorkerView
from pd_sim.loop import Loop
from pd_sim.perf import Perf
from pd_sim.worker import Worker

BLOCK_TOKENS = 16
_KV = KvForm("model", "bfloat16", BLOCK_TOKENS, layers=1, kv_heads=1, head_dim=1)
"""Any: all are alike here, and sizes come from elsewhere."""
_ROLES = {
    PoolRole.PREFILL: Role.PREFILL,
    PoolRole.DECODE: Role.DECODE,
    PoolRole.COLOCATED: Role.BOTH,
}


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Workers of one kind. `start_s`: from being asked for until it serves."""

    role: PoolRole
    perf: Perf
    replicas: int = 1
    minimum: int = 1
    maximum: int = 64
    start_s: float = 60.0
    chunk_tokens: int = 0
    max_running: int = 256
    max_model_tokens: int = 1 << 20


@dataclass(slots=True)
class Pool:
    """A pool as it stands. `live`: starting or serving, by ordinal; scale-in takes the last."""

    plan: PoolPlan
    live: list[Worker] = field(default_factory=list)
    leaving: list[Worker] = field(default_factory=list)
    past: list[Worker] = field(default_factory=list)
    births: int = 0

    @property
    def asked(self) -> int:
        return len(self.live)

    def serving(self, now: float) -> list[Worker]:
        return [worker for worker in self.live if worker.ready_s <= now]

    def gpu_seconds(self, now: float) -> float:
        everyone = (*self.live, *self.leaving, *self.past)
        return sum(
            (min(worker.gone_s, now) - worker.born_s) * worker.perf.gpus for worker in everyone
        )


class Pools:
    """All pools of a cluster. `on_ready` is called when a worker begins to serve."""

    def __init__(
        self, plans: tuple[PoolPlan, ...], loop: Loop, on_ready: Callable[[Worker], None]
    ) -> None:
        self._loop = loop
        self._on_ready = on_ready
        self.pools = {plan.role: Pool(plan) for plan in plans}
        self.views: list[WorkerView] = []
        self.workers: dict[WorkerId, Worker] = {}
        for pool in self.pools.values():
            for _ in range(pool.plan.replicas):
                self._start(pool, 0.0)

    def resize(self, role: PoolRole, replicas: int) -> list[Worker]:
        """As a StatefulSet does: new ordinals at the end, which go first. Returns those that
        have something left to do before they go."""
        pool = self.pools[role]
        while len(pool.live) < replicas:
            self._start(pool, pool.plan.start_s)
        drained: list[Worker] = []
        while len(pool.live) > replicas:
            worker = pool.live.pop()
            worker.draining, worker.view.usable = True, False
            pool.leaving.append(worker)
            if worker.jobs:
                drained.append(worker)
            else:
                self.gone(worker)
        return drained

    def fail(self, role: PoolRole, ordinal: int) -> Worker | None:
        """A worker dies; another takes its place and has to start."""
        pool = self.pools[role]
        if ordinal >= len(pool.live):
            return None
        worker = pool.live[ordinal]
        worker.view.usable = False
        pool.leaving.append(worker)
        self.gone(worker)
        pool.live[ordinal] = self._made(pool, ordinal, pool.plan.start_s)
        return worker

    def gone(self, worker: Worker) -> None:
        """Nothing is left to do on it."""
        for pool in self.pools.values():
            if worker in pool.leaving:
                pool.leaving.remove(worker)
                pool.past.append(worker)
        worker.gone_s = self._loop.now
        if self.workers.pop(worker.view.id, None) is not None:
            self.views.remove(worker.view)

    def gpu_seconds(self) -> float:
        return sum(pool.gpu_seconds(self._loop.now) for pool in self.pools.values())

    def _start(self, pool: Pool, after_s: float) -> None:
        pool.live.append(self._made(pool, len(pool.live), after_s))

    def _made(self, pool: Pool, ordinal: int, after_s: float) -> Worker:
        plan = pool.plan
        pool.births += 1
        view = WorkerView(
            id=WorkerId(f"{plan.role.value}-{ordinal}", str(pool.births)),
            role=_ROLES[plan.role],
            kv=_KV,
            kv_blocks=max(plan.perf.kv_tokens // BLOCK_TOKENS, 1),
            max_model_tokens=plan.max_model_tokens,
            tokens_per_s=0.0 if plan.role is PoolRole.DECODE else 1.0 / plan.perf.token_s,
            product=plan.perf.product,
            kv_token_bytes=plan.perf.kv.token_bytes,
            kv_layers=plan.perf.kv.layers,
        )
        worker = Worker(view, plan.perf, plan.chunk_tokens, plan.max_running, self._loop.now)
        worker.ready_s = self._loop.now + after_s
        self._loop.at(worker.ready_s, self._ready, worker)
        return worker

    def _ready(self, worker: Worker) -> None:
        if worker.draining or worker.gone_s <= self._loop.now:
            return
        worker.view.usable = True
        worker.view.report(worker.load(self._loop.now))
        self.workers[worker.view.id] = worker
        self.views.append(worker.view)
        self._on_ready(worker)
