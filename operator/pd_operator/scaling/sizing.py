"""PURE. How many workers a demand needs: one simple model for each kind of pool.

Prefill: the fewest workers at which the p-th percentile of the wait in the queue, over
what computing takes, still meets the TTFT target, at most `MAX_LOAD` busy, plus what it
takes to work a backlog off within `DRAIN_S`.

Decode: concurrency (arrivals x residence) over the largest batch whose steps meet the
TPOT target, and over what fits in KV with headroom; whichever needs more.

Where a target can't be met with one request alone, workers can't help: `infeasible` says
so, and the pool is sized as for a target that can be met.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pd_core import sketch
from pd_operator.scaling.capacity import Speed, StepLine
from pd_operator.scaling.queueing import wait_quantile_s
from pd_operator.scaling.types import Flow, Numbers, Observations, PoolSignals, PoolSpec

MAX_LOAD = 0.85
DRAIN_S = 60.0
KV_HEADROOM = 0.15
_LEAST_WAIT_SHARE = 0.25  # of the TTFT target, for waiting, however long computing takes
_LEAST_STEP = 1.25  # times a lone sequence's step: what is sized for at the least
_MOST_BATCH = 64.0  # times the mean batch seen: no line is drawn further
_NO_TARGET_WAIT_S = 1.0
_UNKNOWN_VARIATION = 1.0
_UNKNOWN_TAIL = 3.0  # of the mean, where no distribution is known


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of a pool's workers and of requests, and outlasts a quiet minute."""

    speed: Speed = field(default_factory=Speed)
    line: StepLine = field(default_factory=StepLine)
    spread: float | None = None  # the TPOT percentile over the mean step
    uncached_share: float = 1.0
    output_tokens: float | None = None
    kv_each: float | None = None  # tokens of KV, a sequence
    overhead_s: float = 0.0
    sizes: Mapping[int, int] = field(default_factory=dict)  # tokens to compute, a request


@dataclass(frozen=True, slots=True)
class Need:
    """`workers` may be 0: nothing is to be done. None: what a worker can do isn't known."""

    workers: int | None
    numbers: Numbers
    infeasible: bool = False


def prefill(
    spec: PoolSpec, seen: Observations, pool: PoolSignals, flow: Flow, learned: Learned
) -> Need:
    share = learned.uncached_share
    backlog = seen.queued_tokens * share + pool.pending_tokens
    speed = learned.speed.tokens_per_s or pool.announced_tokens_per_s
    return _by_waiting(
        spec, seen, learned, requests=flow.requests, tokens=flow.prompt_tokens * share,
        backlog=backlog, speed=speed,
    )  # fmt: skip


def decode(
    spec: PoolSpec, seen: Observations, pool: PoolSignals, flow: Flow, learned: Learned
) -> Need:
    waiting = pool.waiting_grants * _own_share(pool, learned) + seen.queued_sequences
    if not (flow.sequences or pool.running or waiting):
        return Need(0, {"sequences_per_s": 0.0, "running": 0.0})
    line = learned.line
    if line.fit() is None:
        return Need(None, {"sequences_per_s": flow.sequences, "running": pool.running})
    batch, infeasible = _largest_batch(spec, pool, learned)
    room = pool.kv_tokens_each * (1 - KV_HEADROOM)
    if room > 0 and learned.kv_each:
        # Where KV lets no more run, steps are shorter than the target, and stays too.
        batch = max(min(batch, room / learned.kv_each), 1.0)
    step_s = line.step_s(batch) or 0.0
    predicted = flow.sequences * (learned.output_tokens or 0.0) * step_s
    present = pool.running / max(pool.workers, 1)
    # Steps that take too long keep sequences longer than they would with enough workers.
    slow = min(1.0, step_s / (line.step_s(present) or step_s)) if step_s > 0 else 1.0
    concurrency = max(predicted, pool.running * slow) + waiting
    by_batch = concurrency / batch
    by_kv = concurrency * (learned.kv_each or 0.0) / room if room > 0 else 0.0
    return Need(
        max(_whole(max(by_batch, by_kv)), 1),
        {
            "sequences_per_s": flow.sequences,
            "running": pool.running,
            "waiting": waiting,
            "concurrency": concurrency,
            "output_tokens": learned.output_tokens or 0.0,
            "batch": batch,
            "step_s": step_s,
            "by_batch": by_batch,
            "by_kv": by_kv,
        },
        infeasible,
    )


def _own_share(pool: PoolSignals, learned: Learned) -> float:
    """Of the KV in use, what sequences that run hold. The rest is granted to prompts that
    prefill still computes; who waits behind those waits for prefill, and more decode workers
    would only hold more grants."""
    if not learned.kv_each or pool.kv_used_tokens <= 0:
        return 1.0
    return min(pool.running * learned.kv_each / pool.kv_used_tokens, 1.0)


def colocated(
    spec: PoolSpec, seen: Observations, pool: PoolSignals, flow: Flow, learned: Learned
) -> Need:
    """Prompts and outputs are tokens in the same steps: both models over one line."""
    out = flow.sequences * (learned.output_tokens or 0.0)
    tokens = flow.prompt_tokens * learned.uncached_share + out
    backlog = seen.queued_tokens * learned.uncached_share + pool.pending_tokens
    if not (tokens or backlog or flow.requests or pool.running):
        return Need(0, {"tokens_per_s": 0.0})
    if learned.line.fit() is None:
        return Need(None, {"tokens_per_s": tokens})
    # max_running bounds sequences, not the tokens of a step.
    batch, infeasible = _largest_batch(spec, PoolSignals(), learned)
    step_s = learned.line.step_s(batch) or 0.0
    speed = batch / step_s if step_s > 0 else 0.0
    need = _by_waiting(
        spec, seen, learned, requests=flow.requests, tokens=tokens, backlog=backlog, speed=speed
    )
    sequences = pool.running + pool.waiting_grants + seen.queued_sequences
    room = pool.kv_tokens_each * (1 - KV_HEADROOM)
    by_kv = sequences * (learned.kv_each or 0.0) / room if room > 0 else 0.0
    by_running = sequences / pool.max_running_each if pool.max_running_each else 0.0
    workers = None if need.workers is None else max(need.workers, _whole(max(by_kv, by_running)))
    numbers = {**need.numbers, "batch": batch, "by_kv": by_kv, "by_running": by_running}
    return Need(workers, numbers, infeasible or need.infeasible)


def _by_waiting(
    spec: PoolSpec,
    seen: Observations,
    learned: Learned,
    *,
    requests: float,
    tokens: float,
    backlog: float,
    speed: float,
) -> Need:
    """The fewest workers for so many tokens a second at `speed` each."""
    numbers = {"tokens_per_s": tokens, "backlog_tokens": backlog, "speed": speed}
    if not (tokens or backlog or requests):
        return Need(0, numbers)
    if speed <= 0:
        return Need(None, numbers)
    target_s = spec.ttft.seconds if spec.ttft else _NO_TARGET_WAIT_S
    # What waits no longer than it may isn't a backlog.
    excess = max(backlog - tokens * target_s, 0.0) / DRAIN_S
    load = tokens / speed
    least = max(_whole((tokens + excess) / speed / MAX_LOAD), 1)
    usual = tokens / requests if requests else tokens
    mean, tail, variation = _sizes(spec, seen, learned, usual)
    service_s, tail_s = mean / speed, learned.overhead_s + tail / speed
    quantile = spec.ttft.quantile if spec.ttft else 0.95
    wait_s = target_s - tail_s
    infeasible = spec.ttft is not None and wait_s < 0
    wait_s = max(wait_s, _LEAST_WAIT_SHARE * target_s)
    workers = _fewest(
        least,
        max(spec.maximum, least),
        lambda count: wait_quantile_s(quantile, count, load, service_s, variation) <= wait_s,
    )
    numbers |= {
        "load": load,
        "excess_per_s": excess,
        "service_s": service_s,
        "service_tail_s": tail_s,
        "wait_budget_s": wait_s,
    }
    return Need(workers, numbers, infeasible)


def _sizes(
    spec: PoolSpec, seen: Observations, learned: Learned, mean: float
) -> tuple[float, float, float]:
    """Tokens a request at the mean and at the target's percentile, and their variation.

    Arrivals say the mean, which is early; computed prompts say how sizes differ: those of
    the last half hour, since a minute hardly holds one of the hundred that p99 is about.
    """
    sizes = learned.sizes or seen.uncached
    known = sketch.mean_and_variation(sizes)
    if known is None or known[0] <= 0:
        return mean, mean * _UNKNOWN_TAIL, _UNKNOWN_VARIATION
    quantile = spec.ttft.quantile if spec.ttft else 0.95
    tail = sketch.quantile(sizes, quantile) or known[0]
    return mean, mean * tail / known[0], known[1]


def _largest_batch(spec: PoolSpec, pool: PoolSignals, learned: Learned) -> tuple[float, bool]:
    """The tokens a step that still meet the target, and whether even one alone doesn't."""
    line = learned.line
    alone_s = line.step_s(1.0) or 0.0
    limit = max(line.mean_batch, 1.0) * _MOST_BATCH
    if pool.max_running_each:
        limit = min(limit, pool.max_running_each)
    if spec.tpot is None:
        return max(limit * MAX_LOAD, 1.0), False
    step_s = spec.tpot.seconds / (learned.spread or 1.0)
    infeasible = step_s < alone_s
    batch = line.largest_batch(max(step_s, alone_s * _LEAST_STEP))
    return max(min(batch, limit), 1.0), infeasible


def _fewest(least: int, most: int, enough: Callable[[int], bool]) -> int:
    """The smallest count from `least` to `most` that is enough; `most` where none is."""
    while least < most:
        middle = (least + most) // 2
        if enough(middle):
            most = middle
        else:
            least = middle + 1
    return least


def _whole(workers: float) -> int:
    """Rounded up, but not for a rounding error's sake."""
    return math.ceil(min(workers, 1e6) - 1e-6)
