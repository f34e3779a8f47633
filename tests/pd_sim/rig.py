"""Clusters and traces for tests of the simulator: a worker whose times are round numbers."""

from dataclasses import replace
from typing import Any

from pd_core.estimate import Link
from pd_core.geometry import ModelKv
from pd_operator.api import Role
from pd_sim.perf import MAX_BATCH, Perf
from pd_sim.pools import PoolPlan
from pd_sim.router import RouterPlan
from pd_sim.scalers import Fixed, Goal, Scaler
from pd_sim.simulation import Plan, Result, run
from pd_sim.trace import Request, Trace

PERF = Perf(
    name="round",
    gpus=1,
    kv=ModelKv(1, 2, 64, "bfloat16"),
    kv_tokens=100_000,
    floor_s=0.01,
    token_s=0.0001,
    pair_s=0.0,
    kv_token_s=0.0,
    steps_s=tuple(0.010 + 0.0005 * batch for batch in range(MAX_BATCH + 1)),
)
"""10,000 prompt tokens a second; a step is 10 ms and half a millisecond a sequence."""
FAST = Link("none", 1e15, 0.0)
GOAL = Goal(1.0, 0.030)


def pair(prefill: int = 1, decode: int = 1, perf: Perf = PERF, **fields: Any) -> Plan:
    pools = (
        PoolPlan(Role.PREFILL, perf, prefill, **fields),
        PoolPlan(Role.DECODE, perf, decode, **fields),
    )
    return Plan(pools, RouterPlan(FAST, overhead_s=0.0), GOAL)


def together(workers: int = 1, chunk_tokens: int = 0, perf: Perf = PERF, **fields: Any) -> Plan:
    pool = PoolPlan(Role.COLOCATED, perf, workers, chunk_tokens=chunk_tokens, **fields)
    return Plan((pool,), RouterPlan(FAST, overhead_s=0.0), GOAL)


def evenly(
    a_second: float, seconds: float, prompt: int = 1000, output: int = 100, start_s: float = 0.0
) -> Trace:
    count = int(a_second * seconds)
    return Trace(tuple(Request(start_s + i / a_second, prompt, output) for i in range(count)))


def joined(*traces: Trace) -> Trace:
    requests = sorted((one for t in traces for one in t.requests), key=lambda r: r.at_s)
    return Trace(tuple(requests))


def simulate(plan: Plan, trace: Trace, scaler: Scaler | None = None) -> Result:
    return run(plan, trace, scaler or Fixed())


def with_perf(**fields: Any) -> Perf:
    return replace(PERF, **fields)
