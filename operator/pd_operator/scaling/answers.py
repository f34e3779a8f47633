"""PURE. How long answers will be, by how long their prompts are.

The last minute's mean answer is that of requests which ended, and those came with what has
arrived since only while the mix stays. When long prompts with short answers follow chats, they
wait for prefill while nothing but chats ends. So answers are known by the length of the
prompt, and those of the last minute say by how much all of them have become longer since.

Prompts of a length that nobody has seen answered promise nothing: what they really need shows
as soon as they run. A guess would start workers for whatever is new.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_operator.scaling.types import Answered

_MOST = 300.0
"""Sequences of each length that are remembered: what is older fades as new ones come."""


@dataclass(frozen=True, slots=True)
class Answers:
    """`known`: by the power of two that a prompt's tokens are below. `lately`: tokens that the
    last minute's answers had over what was to be expected."""

    known: Mapping[int, Answered] = field(default_factory=dict)
    lately: float = 1.0

    def learn(self, found: Mapping[int, Answered], share: float) -> "Answers":
        """`found`: what ended in the last minute; `share`: of it that is new, where some of
        this length had been known."""
        if not found:
            return self
        made = dict(self.known)
        for which, one in found.items():
            before = made.get(which)
            if before is None:
                made[which] = one
                continue
            keep = min(1.0, _MOST / before.sequences)
            made[which] = Answered(
                before.sequences * keep + one.sequences * share,
                before.tokens * keep + one.tokens * share,
            )
        learned = Answers(made)
        expected = sum(one.sequences * learned.mean(which) for which, one in found.items())
        tokens = sum(one.tokens for one in found.values())
        return Answers(made, tokens / expected if expected > 0 else self.lately)

    def mean(self, which: int) -> float:
        """Tokens of an answer to a prompt of this length; of its neighbours' longer ones where
        none is known, and 0 where theirs aren't either."""
        known = self.known.get(which)
        if known is not None:
            return known.tokens / known.sequences
        beside = [self.mean(one) for one in (which - 1, which + 1) if one in self.known]
        return max(beside, default=0.0)

    def tokens(self, lengths: Mapping[int, float]) -> float:
        """What these sequences will put out."""
        return self.lately * sum(count * self.mean(which) for which, count in lengths.items())
