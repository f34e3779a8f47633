"""PURE. How many workers a demand needs: one simple model for each kind of pool.

Prefill: the fewest workers at which no more prompts than allowed wait and compute for
longer than the TTFT target, at most `MAX_LOAD` busy, plus what it takes to work a backlog
off within `DRAIN_S`, if it would still be there when another worker has started.

Decode: concurrency (arrivals x residence), and what chance adds to it at the percentile, over
the largest batch whose steps meet the TPOT target, and over what fits in KV with headroom;
whichever needs more.

Both for the demand that is forecast. Up to the `margin` by which forecasts have been wrong,
they promise less: no queue may grow, and the mean step may take as long as the target.

Where a target can't be met with one request alone, workers can't help: `infeasible` says
so once that has been seen, and the pool is sized as for a target that can be met.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pd_operator.scaling import service
from pd_operator.scaling.allowance import Allowance
from pd_operator.scaling.answers import Answers
from pd_operator.scaling.capacity import PromptCost, Speed, StepLine
from pd_operator.scaling.feedback import Feedback
from pd_operator.scaling.queueing import waiting
from pd_operator.scaling.starting import UNKNOWN_S
from pd_operator.scaling.types import Flow, Numbers, Observations, PoolSignals, PoolSpec

MAX_LOAD = 0.9
DRAIN_S = 60.0
KV_HEADROOM = 0.05
_CHANCE = 2.0
"""Standard deviations beyond which running sequences are more than usual."""
_PERCENTILE_SIGMA = 2.33  # standard deviations below which 99% of a normal distribution are
_KV_VARIATION = 1.5  # of a sequence's KV: variance over the mean's square
_LEAST_ALLOWED = 0.25  # of who may be late, for waiting, however many are late anyway
UNKNOWN_SPREAD = 1.15
_LEAST_STEP = 1.25  # times a lone sequence's step: what is sized for at the least
_MOST_BATCH = 64.0  # times the mean batch seen: no line is drawn further
_NO_TARGET_WAIT_S = 1.0
_NO_TARGET_QUANTILE = 0.95
_ROUNDING = 1e-9
_SLOWEST_TOKENS_PER_S = 1e-3  # no worker is: a lower speed says that it is not known


@dataclass(frozen=True, slots=True)
class Learned:
    """What is known of a pool's workers and of requests, and outlasts a quiet minute."""

    speed: Speed = field(default_factory=Speed)
    line: StepLine = field(default_factory=StepLine)
    spread: float | None = None  # co-located: the TPOT percentile over the mean step
    uncached_share: float = 1.0
    output_tokens: float | None = None  # of the last minute's mean answer
    answers: Answers = field(default_factory=Answers)
    kv_each: float | None = None  # tokens of KV, a sequence
    running: float | None = None  # sequences in the pool, on average over its window
    dispersion: float = 1.0  # of them: variance over mean; 1 where they come independently
    overhead_s: float = 0.0
    sizes: Mapping[int, int] = field(default_factory=dict)  # tokens to compute, a request
    cost: PromptCost = field(default_factory=PromptCost)
    allowance: Allowance = field(default_factory=Allowance)
    feedback: Feedback = field(default_factory=Feedback)
    start_s: float = UNKNOWN_S  # from asking for a worker until it serves

    def outputs(self, flow: Flow) -> float:
        """Tokens a second that these arrivals will put out."""
        unknown = max(flow.sequences - sum(flow.lengths.values()), 0.0)
        return self.answers.tokens(flow.lengths) + unknown * (self.output_tokens or 0.0)


@dataclass(frozen=True, slots=True)
class Need:
    """`workers` may be 0: nothing is to be done. None: what a worker can do isn't known."""

    workers: int | None
    numbers: Numbers
    infeasible: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A pool, what is seen of it, and the demand; `margin` by which forecasts were wrong."""

    spec: PoolSpec
    seen: Observations
    pool: PoolSignals
    flow: Flow
    learned: Learned
    margin: float = 1.0

    @property
    def kv_room(self) -> float:
        """Tokens of KV that a worker's sequences may fill; less than one: not known."""
        return self.pool.kv_tokens_each * (1 - KV_HEADROOM)

    def by_kv(self, sequences: float) -> float:
        """Workers for the KV of so many sequences; 0: not known."""
        if self.kv_room < 1:
            return 0.0
        variance = sequences * (self.learned.dispersion + _KV_VARIATION)
        most = sequences + _PERCENTILE_SIGMA * math.sqrt(variance)
        return most * (self.learned.kv_each or 0.0) / self.kv_room


def prefill(case: Case) -> Need:
    pool, learned = case.pool, case.learned
    share = learned.uncached_share
    backlog = case.seen.queued_tokens * share + pool.pending_tokens
    speed = learned.speed.tokens_per_s or pool.announced_tokens_per_s
    return _by_waiting(case, case.flow.prompt_tokens * share, backlog, speed)


def decode(case: Case) -> Need:
    spec, seen, pool = case.spec, case.seen, case.pool
    flow, learned = case.flow, case.learned
    waits = pool.waiting_grants * _own_share(pool, learned) + seen.queued_sequences
    if not (flow.sequences or pool.running or waits):
        return Need(0, {"sequences_per_s": 0.0, "running": 0.0})
    line = learned.line
    if line.fit() is None:
        return Need(None, {"sequences_per_s": flow.sequences, "running": pool.running})
    batch, infeasible = _largest_batch(spec, pool, learned, 1.0)
    if case.kv_room >= 1 and learned.kv_each:
        # Where KV lets no more run, steps are shorter than the target, and stays too.
        batch = max(min(batch, case.kv_room / learned.kv_each), 1.0)
    step_s = line.step_s(batch) or 0.0
    outputs = learned.outputs(flow)
    predicted = outputs * step_s
    running = _beyond_chance(pool.running, learned)
    present = running / max(pool.workers, 1)
    # Steps that take too long keep sequences longer than they would with enough workers.
    slow = min(1.0, step_s / (line.step_s(present) or step_s)) if step_s > 0 else 1.0
    concurrency = max(predicted, running * slow) + waits
    # A step lasts as long as its batch is large: what chance adds has to fit, too.
    chance = _PERCENTILE_SIGMA * math.sqrt(concurrency * learned.dispersion)
    by_batch = (concurrency * learned.feedback.factor + chance) / batch
    by_peak = (predicted * case.margin + waits) / batch
    by_kv = case.by_kv(concurrency) * learned.feedback.factor
    return Need(
        max(_whole(max(by_batch, by_peak, by_kv)), 1),
        {
            "sequences_per_s": flow.sequences,
            "running": pool.running,
            "waiting": waits,
            "concurrency": concurrency,
            "output_tokens": outputs / flow.sequences if flow.sequences > 0 else 0.0,
            "batch": batch,
            "step_s": step_s,
            "by_batch": by_batch,
            "by_peak": by_peak,
            "chance": chance,
            "by_kv": by_kv,
        },
        infeasible,
    )


def _beyond_chance(running: float, learned: Learned) -> float:
    """Sequences on average, or of now where chance doesn't explain that there are more:
    else a pool would be sized for the highest of many looks."""
    usual = running if learned.running is None else learned.running
    return max(usual, running - _CHANCE * math.sqrt(running))


def _own_share(pool: PoolSignals, learned: Learned) -> float:
    """Of the KV in use, what sequences that run hold. The rest is granted to prompts that
    prefill still computes; who waits behind those waits for prefill, and more decode workers
    would only hold more grants."""
    if not learned.kv_each or pool.kv_used_tokens <= 0:
        return 1.0
    return min(pool.running * learned.kv_each / pool.kv_used_tokens, 1.0)


def colocated(case: Case) -> Need:
    """Prompts and outputs are tokens in the same steps: both models over one line."""
    seen, pool, flow, learned = case.seen, case.pool, case.flow, case.learned
    out = learned.outputs(flow)
    tokens = flow.prompt_tokens * learned.uncached_share + out
    backlog = seen.queued_tokens * learned.uncached_share + pool.pending_tokens
    if not (tokens or backlog or flow.requests or pool.running):
        return Need(0, {"tokens_per_s": 0.0})
    if learned.line.fit() is None:
        return Need(None, {"tokens_per_s": tokens})
    # max_running bounds sequences, not the tokens of a step.
    spread = learned.spread or UNKNOWN_SPREAD
    batch, infeasible = _largest_batch(case.spec, PoolSignals(), learned, spread)
    step_s = learned.line.step_s(batch) or 0.0
    speed = batch / step_s if step_s > 0 else 0.0
    need = _by_waiting(case, tokens, backlog, speed)
    sequences = pool.running + pool.waiting_grants + seen.queued_sequences
    by_kv = case.by_kv(sequences)
    by_running = sequences / pool.max_running_each if pool.max_running_each else 0.0
    workers = None if need.workers is None else max(need.workers, _whole(max(by_kv, by_running)))
    numbers = {**need.numbers, "batch": batch, "by_kv": by_kv, "by_running": by_running}
    return Need(workers, numbers, infeasible or need.infeasible)


def _by_waiting(case: Case, tokens: float, backlog: float, speed: float) -> Need:
    """The fewest workers for so many tokens a second, and a backlog, at `speed` each."""
    spec, learned, requests = case.spec, case.learned, case.flow.requests
    numbers = {"tokens_per_s": tokens, "backlog_tokens": backlog, "speed": speed}
    if not (tokens or backlog or requests):
        return Need(0, numbers)
    if speed < _SLOWEST_TOKENS_PER_S:
        return Need(None, numbers)
    target_s = (spec.ttft.seconds if spec.ttft else _NO_TARGET_WAIT_S) - learned.overhead_s
    allowed = 1 - (spec.ttft.quantile if spec.ttft else _NO_TARGET_QUANTILE)
    usual = tokens / requests if requests else tokens
    prompts = service.mix(learned.sizes or case.seen.uncached, learned.cost, usual, speed)
    hopeless = prompts.hopeless(target_s) if spec.ttft else 0.0
    infeasible = hopeless > max(allowed, _ROUNDING)
    # Those that are late anyway use up what is allowed, but for a rest that can still be met.
    allowed = max(allowed - hopeless, allowed * _LEAST_ALLOWED)
    load = requests * prompts.mean_s * learned.feedback.factor
    excess = _excess(backlog, tokens, target_s, case.pool.workers * speed, learned.start_s)
    busy = max(load, tokens / speed)
    least = max(_whole(max(busy / MAX_LOAD + excess / speed, busy * case.margin)), 1)

    def enough(count: int) -> bool:
        waits = waiting(count, load, prompts.mean_s, prompts.variation)
        if spec.ttft is None:
            return waits.longer_than(_NO_TARGET_WAIT_S) <= allowed
        return prompts.late(target_s, waits) <= allowed

    workers = _fewest(least, max(spec.maximum, least), enough)
    numbers |= {
        "load": load,
        "excess_per_s": excess,
        "service_s": prompts.mean_s,
        "service_variation": prompts.variation,
        "hopeless": hopeless,
    }
    return Need(workers, numbers, infeasible)


def _excess(
    backlog: float, tokens: float, target_s: float, capacity: float, start_s: float
) -> float:
    """Tokens a second, beyond demand, for a backlog. What waits no longer than it may isn't
    one; and what is gone before another worker could serve needs none."""
    spare = max(capacity * MAX_LOAD - tokens, 0.0)
    late = max(backlog - tokens * min(max(target_s, 0.0), DRAIN_S), 0.0)
    return max(late - spare * start_s, 0.0) / DRAIN_S


def _largest_batch(
    spec: PoolSpec, pool: PoolSignals, learned: Learned, spread: float
) -> tuple[float, bool]:
    """The tokens a step that still meet the target, and whether even one alone doesn't.
    `spread`: of TPOT's percentile over the mean step."""
    line = learned.line
    alone_s = line.step_s(1.0) or 0.0
    limit = max(line.mean_batch, 1.0) * _MOST_BATCH
    if pool.max_running_each:
        limit = min(limit, pool.max_running_each)
    if spec.tpot is None:
        return max(limit * MAX_LOAD, 1.0), False
    step_s = spec.tpot.seconds / spread
    infeasible = step_s < alone_s and line.knows_lone
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
