"""PURE. What the last reading teaches about a pool's workers and about requests.

Learned values outlast a quiet minute: silence says nothing of how fast a worker is.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from pd_core import sketch
from pd_operator.api import Role
from pd_operator.scaling.capacity import fade
from pd_operator.scaling.sizing import UNKNOWN_SPREAD, Learned
from pd_operator.scaling.types import Observations, PoolSignals, PoolSpec

_SLOW = 0.05  # how far one reading moves what is averaged
_SLOWER = 0.02  # the same for what minutes of trouble would bend
_SPREAD = (1.0, 4.0)
_BUSY = 0.5  # of the largest batch within the target
_DISPERSION = (1.0, 4.0)
_SKETCH_S = 60.0  # what a reading's sketches go back
_RESERVE_TOKENS = 256  # an engine sets aside so much for a sequence's output at its grant


def learn(
    learned: Learned, spec: PoolSpec, seen: Observations, pool: PoolSignals, elapsed_s: float
) -> Learned:
    """`elapsed_s`: since the reading before this one."""
    speed, line = learned.speed, learned.line
    if spec.role is Role.PREFILL:
        speed = speed.learn(pool.work, elapsed_s)
    else:
        line = line.learn(pool.work, elapsed_s)
    usual = pool.running if learned.running is None else learned.running
    made = replace(
        learned,
        running=usual + (1 - math.exp(-elapsed_s / spec.window_s)) * (pool.running - usual),
        dispersion=_dispersion(learned, pool, usual, elapsed_s),
        speed=speed,
        line=line,
        uncached_share=_follow(learned.uncached_share, seen.uncached_share),
        output_tokens=_follow(learned.output_tokens, seen.output_tokens),
        answers=learned.answers.learn(seen.answers, _new_share(elapsed_s)),
        overhead_s=_follow(learned.overhead_s, seen.overhead_s),
        sizes=_sizes(learned.sizes, seen.uncached, elapsed_s),
        cost=learned.cost.learn(seen.prompts, _new_share(elapsed_s), elapsed_s),
    )
    if pool.running >= 1 and pool.kv_used_tokens > 0:
        each = pool.kv_used_tokens / (pool.running + pool.waiting_grants)
        each = min(each, _longest(made, spec, seen))
        made = replace(made, kv_each=_average(learned.kv_each, each, elapsed_s))
    return replace(made, spread=_spread(made, spec, seen, pool, elapsed_s))


def _dispersion(learned: Learned, pool: PoolSignals, usual: float, elapsed_s: float) -> float:
    """How much running sequences swing around their average of the window."""
    if usual < 1:
        return learned.dispersion
    found = min((pool.running - usual) ** 2 / usual, _DISPERSION[1] ** 2)
    low, high = _DISPERSION
    weight = 1 - fade(elapsed_s)
    return min(max(learned.dispersion + weight * (found - learned.dispersion), low), high)


def size_variation(learned: Learned) -> float:
    """Of prompts' lengths: the variance over the mean's square."""
    known = sketch.mean_and_variation(learned.sizes)
    return known[1] if known else 1.0


def _new_share(elapsed_s: float) -> float:
    """Of what is told about the last minute, what the reading before hadn't told yet."""
    return min(elapsed_s / _SKETCH_S, 1.0)


def _sizes(
    known: Mapping[int, int], found: Mapping[int, int], elapsed_s: float
) -> Mapping[int, int]:
    """Prompts' sizes, in thousandths, fading. What is found are those of the last minute, again
    and again: each look counts for its share of it, the first one in full."""
    if not found:
        return known
    share = _new_share(elapsed_s) if known else 1.0
    keep = fade(elapsed_s)
    made = {bucket: int(count * keep) for bucket, count in known.items()}
    for bucket, count in found.items():
        made[bucket] = made.get(bucket, 0) + round(1000 * count * share)
    return {bucket: count for bucket, count in made.items() if count}


def _longest(learned: Learned, spec: PoolSpec, seen: Observations) -> float:
    """Tokens of KV that a sequence may need: its prompt, its output, and what is set aside.
    KV that is granted for prompts which are still computed belongs to nobody who runs yet:
    a slow prefill would make each sequence look large."""
    flows = seen.flows.get(spec.role)
    flow = flows.long if flows else None
    if flow is None or flow.sequences <= 0 or not learned.output_tokens:
        return math.inf
    return flow.prompt_tokens / flow.sequences + learned.output_tokens + _RESERVE_TOKENS


def _follow(known: float | None, found: float | None) -> float:
    """What was seen over the last minute is an average already."""
    if found is not None and math.isfinite(found):
        return found
    return known if known is not None else 0.0


def _average(known: float | None, found: float, elapsed_s: float, least: float = _SLOW) -> float:
    if known is None:
        return found
    weight = max(least, 1 - fade(elapsed_s))
    return known + weight * (found - known)


def _spread(
    learned: Learned, spec: PoolSpec, seen: Observations, pool: PoolSignals, elapsed_s: float
) -> float | None:
    """How much worse the target's percentile of TPOT is than the mean step: sequences meet
    longer batches, other prompts and pauses. So the model is corrected by what users see, while
    batches are such that it matters: an idle worker's steps vary more, and harm nobody."""
    if spec.role is not Role.COLOCATED or spec.tpot is None or not pool.work:
        return learned.spread
    batch = pool.running / max(pool.workers, 1)
    if batch < _BUSY * learned.line.largest_batch(spec.tpot.seconds):
        return learned.spread
    found = sketch.quantile(seen.tpot, spec.tpot.quantile)
    steps = sum(work.steps for work in pool.work)
    mean_s = sum(work.busy_s for work in pool.work) / steps if steps else 0.0
    if found is None or mean_s <= 0:
        return learned.spread
    low, high = _SPREAD
    found = min(max(found / mean_s, low), high)
    return _average(learned.spread or UNKNOWN_SPREAD, found, elapsed_s, _SLOWER)
