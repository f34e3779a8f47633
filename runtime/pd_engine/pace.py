"""How many tokens a step may have, so that it doesn't take too long. Pure.

A step can't be left half-way by one of its requests: what a request in it holds is freed
when it ends, whoever arrives meanwhile waits for it, and who decodes in it gets its next
token at its end. So prompts are cut not only by `chunk_tokens` but also by time, with the
speed that the last steps had: it falls with the context, and the pieces with it.
"""

_WEIGHT = 0.3  # of the newest step
_LEAST_TOKENS = 16  # smaller pieces say little of a prompt's speed, and cost more than they save
_LEAST_SHARE = 0.25  # of a step's time is its prompts', whatever decoding alone takes


class StepPace:
    """Learns tokens a second from steps; says how many make a step of `target_s`."""

    def __init__(self, target_s: float, tokens_per_s: float) -> None:
        """`tokens_per_s` is what to go by until steps have been seen; 0 when unknown."""
        self._target_s = target_s
        self._tokens_per_s = tokens_per_s
        self._decode_s = 0.0  # a step in which all sequences decode

    def observe(self, prompt_tokens: int, decodes: int, seconds: float) -> None:
        """A step computed so many tokens of prompts, and one of each of `decodes` sequences."""
        if seconds <= 0:
            return
        if not prompt_tokens:
            known = self._decode_s or seconds
            self._decode_s = _WEIGHT * seconds + (1 - _WEIGHT) * known
        if prompt_tokens < _LEAST_TOKENS:
            return
        if decodes:
            seconds = max(seconds - self._decode_s, seconds * _LEAST_SHARE)
        speed = prompt_tokens / seconds
        if self._tokens_per_s > 0:
            speed = _WEIGHT * speed + (1 - _WEIGHT) * self._tokens_per_s
        self._tokens_per_s = speed

    def prompt_tokens(self, decodes: bool, gap_s: float | None) -> int | None:
        """How many the next step may have; None while nothing is known. `decodes`: whether
        sequences decode in it, which want their tokens at most `gap_s` apart."""
        if self._tokens_per_s <= 0:
            return None
        left_s = self._target_s
        if decodes and gap_s is not None:
            left_s = min(left_s, gap_s) - self._decode_s
        return max(_LEAST_TOKENS, int(self._tokens_per_s * left_s))
