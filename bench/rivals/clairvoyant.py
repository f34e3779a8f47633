"""Who knows all arrivals, and an estimate of the least that anybody would pay.

Bound: each minute's work at a worker's best speed (prompts flat out, decode at the largest
batch within TPOT), in whole workers, of which one serves always; between two peaks a worker
is kept, or given back and started anew, whichever costs less. What is late on purpose (1% of
requests) is taken off each minute's work; no queues, no draining, no rounding of batches. Not
a proven bound: whole workers a minute forbid what putting work off would allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.rivals import PAIR, profile
from pd_operator.api import Role
from pd_sim.look import Look
from pd_sim.perf import Perf
from pd_sim.scalers import Goal
from pd_sim.trace import Trace

SLOT_S = 60.0
CACHES = 12
LATE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Demand:
    """Workers that each slot keeps busy, by pool."""

    slot_s: float
    workers: Mapping[Role, Sequence[float]]


def demand(trace: Trace, perf: Perf, goal: Goal, slot_s: float = SLOT_S) -> Demand:
    """A prompt's blocks are cached if a cache as large as `CACHES` workers' held them."""
    count = max(math.ceil(trace.seconds / slot_s), 1)
    busy = {role: [0.0] * (count + 1) for role in PAIR}
    seen: dict[bytes, None] = {}
    room = CACHES * perf.kv_tokens // trace.block_tokens
    mean_output = sum(one.output_tokens for one in trace.requests) / len(trace.requests)
    mean_prompt = sum(one.prompt_tokens for one in trace.requests) / len(trace.requests)
    best = profile(perf, goal, mean_prompt, mean_output)
    for one in trace.requests:
        slot = min(int(one.at_s // slot_s), count)
        cached = 0
        for block in one.blocks:
            if block not in seen:
                break
            cached += trace.block_tokens
        for block in one.blocks:
            seen.pop(block, None)
            seen[block] = None
        while len(seen) > room:
            del seen[next(iter(seen))]
        cached = min(cached, one.prompt_tokens - 1)
        busy[Role.PREFILL][slot] += _linear_s(perf, one.prompt_tokens - cached, cached)
        # Steps of this sequence's share in a full batch, with its own KV.
        context = one.prompt_tokens + one.output_tokens / 2
        share_s = best.step_s / best.batch
        mean_kv_s = perf.kv_token_s * (mean_prompt + mean_output / 2)
        share_s += perf.kv_token_s * context - mean_kv_s
        busy[Role.DECODE][slot] += (one.output_tokens - 1) * max(share_s, 0.0)
    return Demand(
        slot_s, {role: [s / slot_s for s in slots[:count]] for role, slots in busy.items()}
    )


def _linear_s(perf: Perf, tokens: int, cached: int) -> float:
    """A prompt's computing when others fill its floor."""
    return tokens * perf.token_s + perf.pair_s * tokens * (cached + tokens / 2)


def bound_gpu_hours(found: Demand, perf: Perf, start_s: float) -> float:
    total_s = 0.0
    for workers in found.workers.values():
        needed = [max(math.ceil(one * (1 - LATE_SHARE)), 1) for one in workers]
        for level in range(1, max(needed) + 1):
            total_s += _level_s([one >= level for one in needed], found.slot_s, start_s)
    return total_s * perf.gpus / 3600


def _level_s(on: Sequence[bool], slot_s: float, start_s: float) -> float:
    """Seconds that the n-th worker is paid for: needed slots, and the cheaper of keeping it
    and starting it anew for each gap. The first start is free: all begin sized."""
    total, gap, begun = 0.0, 0.0, on[0]
    if not begun:
        total += start_s
    for needed in on:
        if needed:
            total += slot_s + (min(gap, start_s) if begun else 0.0)
            gap, begun = 0.0, True
        elif begun:
            gap += slot_s
    return total


@dataclass
class Clairvoyant:
    """Knows each slot's work, asks for workers a start ahead; `load`: how full they may be."""

    found: Demand
    start_s: float
    load: float = 0.8
    period_s: float = 10.0

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        return {role: self._size(role, seen.now) for role in PAIR}

    def _size(self, role: Role, now: float) -> int:
        workers, slot_s = self.found.workers[role], self.found.slot_s
        first = int(now // slot_s)
        last = int((now + self.start_s + self.period_s) // slot_s)
        window = workers[max(first - 1, 0) : last + 1] or workers[-1:]
        return max(math.ceil(max(window) / self.load), 1)
