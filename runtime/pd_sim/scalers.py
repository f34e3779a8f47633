"""PURE. Who decides the pools' sizes: the operator's own decide(), or nobody.

Others (bench/rivals) keep the same interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pd_operator.api import Role
from pd_operator.scaling.decide import State, decide
from pd_operator.scaling.rates import History, extend, observe
from pd_operator.scaling.types import Decision, PoolSpec, Spec, Target
from pd_sim.look import Look
from pd_sim.pools import PoolPlan


@dataclass(frozen=True, slots=True)
class Goal:
    """What users are promised: so many percent of requests within both."""

    ttft_s: float
    tpot_s: float
    percentile: float = 99.0


class Scaler(Protocol):
    """`period_s`: between two looks. `sizes` says what is to change, and nothing else."""

    @property
    def period_s(self) -> float: ...

    def sizes(self, seen: Look) -> Mapping[Role, int]: ...


@dataclass
class Fixed:
    """Nothing ever changes."""

    period_s: float = 3600.0

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        del seen
        return {}


@dataclass
class Slo:
    """The operator's decide(), with what it remembers."""

    plans: tuple[PoolPlan, ...]
    goal: Goal
    gpus: int | None = None
    period_s: float = 5.0
    history: History = field(default_factory=History)
    state: State = field(default_factory=State)
    decisions: Mapping[Role, Decision] = field(default_factory=dict)

    def sizes(self, seen: Look) -> Mapping[Role, int]:
        spec = self.spec(seen)
        window_s = max(pool.window_s for pool in spec.pools)
        self.history = extend(self.history, seen.samples, window_s)
        found = observe(self.history, spec)
        self.state, self.decisions = decide(spec, found, self.state, seen.now)
        return {role: one.replicas for role, one in self.decisions.items()}

    def spec(self, seen: Look) -> Spec:
        return Spec(tuple(self._pool(plan, seen) for plan in self.plans), self.gpus)

    def _pool(self, plan: PoolPlan, seen: Look) -> PoolSpec:
        ttft = Target(self.goal.percentile, self.goal.ttft_s)
        tpot = Target(self.goal.percentile, self.goal.tpot_s)
        return PoolSpec(
            plan.role,
            seen.pools[plan.role].asked,
            minimum=plan.minimum,
            maximum=plan.maximum,
            gpus_each=plan.perf.gpus,
            ttft=ttft,
            tpot=None if plan.role is Role.PREFILL else tpot,
        )
