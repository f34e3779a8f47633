"""How many tokens a step may have, so that it doesn't take too long. Pure.

A step can't be left half-way by one of its requests: what a request in it holds is freed
when it ends, and whoever arrives meanwhile waits for it. So prompts are cut not only by
`chunk_tokens` but also by time, with the speed that the last steps had.
"""

_WEIGHT = 0.3  # of the newest step
_LEAST_TOKENS = 16  # smaller steps say little of a prompt's speed, and cost more than they save


class StepPace:
    """Learns tokens a second from steps; says how many make a step of `target_s`."""

    def __init__(self, target_s: float, tokens_per_s: float) -> None:
        """`tokens_per_s` is what to go by until steps have been seen; 0 when unknown."""
        self._target_s = target_s
        self._tokens_per_s = tokens_per_s

    def observe(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        if tokens < _LEAST_TOKENS or seconds <= 0:
            return
        speed = tokens / seconds
        if self._tokens_per_s > 0:
            speed = _WEIGHT * speed + (1 - _WEIGHT) * self._tokens_per_s
        self._tokens_per_s = speed

    def budget_tokens(self) -> int | None:
        """Tokens of the next step; None while nothing is known."""
        if self._tokens_per_s <= 0:
            return None
        return max(_LEAST_TOKENS, int(self._tokens_per_s * self._target_s))
