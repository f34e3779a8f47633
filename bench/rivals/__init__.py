"""How others scale inference workers, each as its own documentation describes it.

All keep pd_sim.scalers.Scaler's interface, see the same simulated cluster through
pd_sim.look, and are told what a well-informed operator would write into their settings:
`Profile` holds one worker's true capacity at the targets.
"""

from dataclasses import dataclass

from pd_operator.api import Role
from pd_sim.look import Look
from pd_sim.perf import Perf
from pd_sim.scalers import Goal

PAIR = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class Profile:
    """What one worker can do within the targets, for requests of these mean lengths."""

    prompt_tokens_s: float  # of prefill, flat out
    batch: int  # of decode, within TPOT
    step_s: float  # at that batch

    @property
    def output_tokens_s(self) -> float:
        return self.batch / self.step_s


def profile(perf: Perf, goal: Goal, prompt: float, output: float) -> Profile:
    context = prompt + output / 2
    batch = max(perf.most_within(goal.tpot_s, context), 1)
    tokens = max(round(prompt), 1)
    return Profile(tokens / perf.prompt_s(tokens), batch, perf.step_s(batch, batch * context))


def load(seen: Look, role: Role) -> float:
    """Requests in a pool: those that wait and those that run."""
    pool = seen.pools[role]
    return pool.queue + (pool.running if role is Role.DECODE else 0)
