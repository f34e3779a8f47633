"""How others scale inference workers, each as its own documentation describes it.

All keep pd_sim.scalers.Scaler's interface, see the same simulated cluster through
pd_sim.look, and are told what a well-informed operator would write into their settings:
`Profile` holds one worker's true capacity at the targets.
"""

from dataclasses import dataclass, replace

from pd_operator.api import Role
from pd_sim.look import Look
from pd_sim.perf import Perf
from pd_sim.scalers import Goal

PAIR = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Profile:
    """What one worker can do within the targets, for requests of these mean lengths. `fill`:
    the share of it that an operator lets a rival use, by whatever that rival calls it."""

    perf: Perf
    tpot_s: float
    context: float  # tokens of a sequence, halfway
    prompt_tokens_s: float  # of prefill, flat out
    batch: int  # of decode, within TPOT
    fill: float = 1.0

    def filled(self, fill: float) -> "Profile":
        return replace(
            self,
            prompt_tokens_s=self.prompt_tokens_s * fill,
            batch=max(round(self.batch * fill), 1),
            fill=fill,
        )

    @property
    def step_s(self) -> float:
        return self.perf.step_s(self.batch, self.batch * self.context)


def profile(perf: Perf, goal: Goal, prompt: float, output: float) -> Profile:
    context = prompt + output / 2
    batch = max(perf.most_within(goal.tpot_s, context), 1)
    tokens = max(round(prompt), 1)
    return Profile(perf, goal.tpot_s, context, tokens / perf.prompt_s(tokens), batch)


def load(seen: Look, role: Role) -> float:
    """Requests in a pool: those that wait and those that run."""
    pool = seen.pools[role]
    return pool.queue + (pool.running if role is Role.DECODE else 0)
