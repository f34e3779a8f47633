"""Autoscalers that compare demand with capacity.

Analyzer (llm-d's workload-variant-autoscaler, its analyzer by tokens and capacity:
https://llm-d.ai/docs/architecture/advanced/autoscaling/hpa-wva): demand, at its highest of the last
minute, against what replicas can do; up when demand / 0.85 is more than there is, down by one
when demand / 0.70 is less; every 30 s, and while pods load nothing more is asked for. It goes
by KV and queues where prefill and decode are one; here prefill's demand is tokens a second.

Throughput planner (https://docs.nvidia.com/dynamo/design-docs/planner-design): every 180 s, last
interval's load as the next one's (its predictor "constant"); prefill = ceil(tokens a second /
profiled throughput), decode = ceil(output tokens a second / the best profiled throughput within the
ITL target over a correction, measured / expected ITL). Prefill's correction is at most 1, for
prefix caches; these show in the uncached tokens already.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.rivals import PAIR, Profile
from pd_core import sketch
from pd_operator.api import Role
from pd_operator.measured import Counters
from pd_sim.look import Look

SCALE_UP = 0.85
SCALE_DOWN = 0.70


@dataclass
class _Rates:
    """What came a second since the last look."""

    at: float = 0.0
    before: Counters = field(default_factory=Counters)

    def since(self, seen: Look) -> tuple[float, float, float]:
        """Uncached prompt tokens, requests, output tokens."""
        now = seen.samples.routers[0].counters
        span = max(seen.now - self.at, 1e-9)
        new = self.before
        share = _ratio(
            now.uncached_tokens - new.uncached_tokens, now.started_tokens - new.started_tokens, 1.0
        )
        output = _ratio(
            now.ended_tokens - new.ended_tokens, now.ended_sequences - new.ended_sequences, 256.0
        )
        tokens = (now.arrived_tokens - new.arrived_tokens) * share / span
        requests = (now.arrived_requests - new.arrived_requests) / span
        self.at, self.before = seen.now, now
        return tokens, requests, requests * output


def _ratio(part: float, whole: float, otherwise: float) -> float:
    return part / whole if whole > 0 else otherwise


@dataclass
class Analyzer:
    known: Profile
    period_s: float = 30.0

    def __post_init__(self) -> None:
        self._rates = _Rates()
        self._before = dict.fromkeys(PAIR, 0.0)

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        tokens, _, _ = self._rates.since(seen)
        now = {
            Role.PREFILL: tokens / self.known.prompt_tokens_s,
            Role.DECODE: (seen.pools[Role.DECODE].running + seen.pools[Role.DECODE].queue)
            / self.known.batch,
        }
        highest = {role: max(now[role], self._before[role]) for role in PAIR}
        self._before = now
        return {role: self._size(seen, role, highest[role]) for role in PAIR}

    def _size(self, seen: Look, role: Role, demand: float) -> int:
        pool = seen.pools[role]
        up, down = demand / SCALE_UP, demand / SCALE_DOWN
        if up > pool.serving:
            return max(math.ceil(up), pool.asked)
        if down < pool.asked - 1 and pool.serving == pool.asked:
            return pool.asked - 1
        return pool.asked


@dataclass
class ThroughputPlanner:
    known: Profile
    period_s: float = 180.0

    def __post_init__(self) -> None:
        self._rates = _Rates()

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        tokens, _, output = self._rates.since(seen)
        return {
            Role.PREFILL: max(math.ceil(tokens / self.known.prompt_tokens_s), 1),
            Role.DECODE: max(math.ceil(output / self._output_tokens_s(seen)), 1),
        }

    def _output_tokens_s(self, seen: Look) -> float:
        """The best that a profile shows within the corrected target."""
        known, pool = self.known, seen.pools[Role.DECODE]
        batch = max(round(pool.running / max(pool.serving, 1)), 1)
        expected_s = known.perf.step_s(batch, batch * known.context)
        measured = sketch.mean_and_variation(seen.samples.tpot)
        correction = measured[0] / expected_s if measured else 1.0
        best = max(known.perf.most_within(known.tpot_s / correction, known.context), 1)
        filled = max(round(best * known.fill), 1)
        return filled / known.perf.step_s(filled, filled * known.context)
