"""Kubernetes' HorizontalPodAutoscaler (autoscaling/v2), and KEDA, which drives one.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale: every 15 s desired =
ceil(current x value / target), nothing within a tolerance of 10%; up at once by at most
the larger of 4 pods and 100% in 15 s, down to the highest recommendation of 300 s.

KEDA's settings: https://docs.vllm.ai/projects/production-stack/en/latest/use_cases/autoscaling-keda.html
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.rivals import PAIR, Profile, load
from pd_operator.api import Role
from pd_sim.look import Look

TOLERANCE = 0.1
STABILIZATION_S = 300.0

Metric = Callable[[Look, Role], float]
"""The sum over a pool's pods."""


@dataclass
class Hpa:
    """`targets`: the metric's average a pod."""

    metric: Metric
    targets: Mapping[Role, float]
    period_s: float = 15.0
    down_s: float = STABILIZATION_S
    wishes: dict[Role, list[tuple[float, int]]] = field(default_factory=dict)

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        return {role: self._size(seen, role) for role in PAIR}

    def _size(self, seen: Look, role: Role) -> int:
        pool = seen.pools[role]
        ratio = self.metric(seen, role) / max(pool.serving, 1) / self.targets[role]
        want = pool.asked if abs(ratio - 1) <= TOLERANCE else math.ceil(pool.serving * ratio)
        if want > pool.serving and pool.asked > pool.serving:
            # Pods that aren't ready yet count as if they had nothing to do.
            want = max(pool.asked, want) if want > pool.asked else pool.asked
        want = min(want, pool.asked + max(4, pool.asked))
        kept = [one for one in self.wishes.get(role, []) if one[0] > seen.now - self.down_s]
        self.wishes[role] = [*kept, (seen.now, want)]
        return max(want, min(pool.asked, max(size for _, size in self.wishes[role])))


def queue_length(known: Profile) -> Hpa:
    """On requests that wait; 3 a pod, where GKE's guide for LLM servers begins (3 to 5)."""
    return Hpa(lambda seen, role: seen.pools[role].queue, dict.fromkeys(PAIR, 3.0 * known.fill))


@dataclass
class _Busy:
    """The share of time in which a pod computes anything: a GPU's duty cycle."""

    before: dict[Role, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, seen: Look, role: Role) -> float:
        pool = seen.pools[role]
        at, busy_s = self.before.get(role, (0.0, 0.0))
        self.before[role] = (seen.now, pool.busy_s)
        return (pool.busy_s - busy_s) / max(seen.now - at, 1e-9)


def utilization(known: Profile) -> Hpa:
    """On the GPUs' duty cycle, 70%. A decode worker with one sequence is at 100%."""
    return Hpa(_Busy(), dict.fromkeys(PAIR, 0.70 * known.fill))


def keda(known: Profile) -> Hpa:
    """A prometheus trigger a pool: prompts with the threshold 5 of vLLM's production stack,
    running sequences with the batch that meets TPOT. KEDA drives an HPA; its cooldown (360 s
    there) is for the last pod alone, so the way down is the HPA's own."""
    targets = {Role.PREFILL: 5.0 * known.fill, Role.DECODE: float(known.batch)}
    return Hpa(load, targets)
