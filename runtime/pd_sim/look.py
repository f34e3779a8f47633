"""PURE. What those who scale see of a simulated cluster at a moment.

`samples` is what the operator reads: the router's document, through the operator's own
parser. The rest is for policies that go by what other systems measure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pd_operator.api import Role
from pd_operator.measured import Samples, parse
from pd_sim.pools import Pool, Pools
from pd_sim.router import SimRouter
from pd_sim.worker import Worker


@dataclass(frozen=True, slots=True)
class PoolLook:
    """A pool now. `busy_s`: all that its workers have ever computed."""

    asked: int
    serving: int
    running: int  # sequences that decode
    queue: int  # prompts to compute, or sequences that wait for room
    kv_share: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Look:
    now: float
    samples: Samples
    pools: Mapping[Role, PoolLook]


def look(router: SimRouter, pools: Pools, now: float) -> Look:
    router.heartbeats()
    told = [_told(worker, now) for worker in pools.workers.values()]
    document = router.signals.document(now, router.queued(), told)
    return Look(
        now,
        parse(json.dumps(document).encode(), now),
        {role: _pool(pool, now) for role, pool in pools.pools.items()},
    )


def _pool(pool: Pool, now: float) -> PoolLook:
    serving = pool.serving(now)
    known = (*pool.live, *pool.leaving, *pool.past)
    room = sum(worker.perf.kv_tokens for worker in serving)
    return PoolLook(
        asked=pool.asked,
        serving=len(serving),
        running=sum(worker.batch for worker in serving),
        queue=sum(len(worker.prompts) + len(worker.grants) for worker in serving),
        kv_share=sum(worker.reserved for worker in serving) / room if room else 0.0,
        busy_s=sum(worker.busy_s for worker in known),
    )


def _told(worker: Worker, now: float) -> dict[str, object]:
    """As a router passes on what a worker last said of itself."""
    view, load = worker.view, worker.view.load
    return {
        "worker": view.id.name,
        "epoch": view.id.epoch,
        "role": view.role.value,
        "heard_s_ago": 0.0,
        "heartbeats": max(int(now - worker.ready_s), 0) + 1,
        "draining": worker.draining,
        "usable": view.usable,
        "kv_tokens": view.pool_tokens,
        "kv_used_tokens": load.kv_used * view.block_tokens,
        "max_running": worker.max_running,
        "prefill_tokens_per_s": 1.0 / worker.perf.token_s,
        "queued": load.queued,
        "running": load.running,
        "waiting_grants": load.waiting_grants,
        "pending_tokens": load.pending_tokens,
        "steps": load.steps,
        "busy_s": load.busy_s,
        "computed_tokens": load.computed_tokens,
    }
