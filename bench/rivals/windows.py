"""Autoscalers on concurrency over windows: Knative's KPA, and one on a percentile.

KPA (https://knative.dev/docs/serving/autoscaling/kpa-specific, with windows of 180 and 60 s, not
60 and 6: an LLM's requests last longer): the mean concurrency of a stable window of 180 s over
the target; in panic, that of 60 s, when it asks for twice what there is; no scale-down in
panic, which lasts one stable window; at most 1,000% up, half down; target utilization 70%.

Percentile window (of no one product: the usual cure for a mean that hides bursts): every 15 s
the P95 of the last 60 s, nothing within 10%, at once up to it when it is at 200% of what there
is; down after 300 s of calm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.rivals import PAIR, load
from pd_operator.api import Role
from pd_sim.look import Look


@dataclass
class _Samples:
    kept: dict[Role, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, seen: Look, role: Role, window_s: float) -> list[tuple[float, float]]:
        kept = [one for one in self.kept.get(role, []) if one[0] > seen.now - window_s]
        self.kept[role] = [*kept, (seen.now, load(seen, role))]
        return self.kept[role]


@dataclass
class Kpa:
    """`targets`: concurrency a pod."""

    targets: Mapping[Role, float]
    period_s: float = 10.0
    stable_s: float = 180.0
    panic_s: float = 60.0
    samples: _Samples = field(default_factory=_Samples)
    panic_until: dict[Role, float] = field(default_factory=dict)
    panic_size: dict[Role, int] = field(default_factory=dict)

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        return {role: self._size(seen, role) for role in PAIR}

    def _size(self, seen: Look, role: Role) -> int:
        pool, target = seen.pools[role], self.targets[role] * 0.7
        samples = self.samples.add(seen, role, self.stable_s)
        recent = [value for at, value in samples if at > seen.now - self.panic_s]
        stable = math.ceil(sum(value for _, value in samples) / len(samples) / target)
        panic = math.ceil(sum(recent) / len(recent) / target)
        if panic >= 2 * max(pool.serving, 1):
            self.panic_until[role] = seen.now + self.stable_s
        if seen.now < self.panic_until.get(role, 0.0):
            size = max(panic, stable, self.panic_size.get(role, pool.asked), pool.asked)
            self.panic_size[role] = size
            return size
        self.panic_size.pop(role, None)
        return max(stable, pool.asked // 2, 1)


@dataclass
class PercentileWindow:
    """`targets`: concurrency a pod."""

    targets: Mapping[Role, float]
    period_s: float = 15.0
    window_s: float = 60.0
    down_s: float = 300.0
    samples: _Samples = field(default_factory=_Samples)
    high_at: dict[Role, float] = field(default_factory=dict)

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        return {role: self._size(seen, role) for role in PAIR}

    def _size(self, seen: Look, role: Role) -> int:
        pool, target = seen.pools[role], self.targets[role]
        values = sorted(value for _, value in self.samples.add(seen, role, self.window_s))
        p95 = values[max(math.ceil(0.95 * len(values)) - 1, 0)]
        now = load(seen, role) / target
        if now >= 2 * pool.asked:
            return math.ceil(now)
        want = max(math.ceil(p95 / target), 1)
        if p95 / target >= pool.asked * 0.9:
            self.high_at[role] = seen.now
        if want > pool.asked * 1.1:
            return want
        calm = seen.now - self.high_at.get(role, 0.0) >= self.down_s
        return max(want, pool.asked - 1) if calm and want < pool.asked * 0.9 else pool.asked
