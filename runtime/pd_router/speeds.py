"""How long a worker computes prompts: learned from its heartbeats, with priors. Pure.

    seconds = token_s x tokens + pair_s x pairs

Matrix products go with tokens, attention with pairs (`pd_core.work`), so the time of
a prompt grows faster than its length, by how much differs between products.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from pd_core.gpus import Gpu, of_product

UNKNOWN_TOKENS_PER_S = 1000.0
UNKNOWN_STEP_S = 0.02
_MEMORY = 0.98  # of what was measured before, a heartbeat with news
_MOST_PAIR_SHARE = 0.01  # of a token's time, a pair's: models that there are stay far below
_LEAST_TOKEN_SHARE = 0.1  # of the time measured, that of matrix products
_APART = 0.01  # lengths must differ by so much for attention to be told from the rest
_MOST_S = 10.0  # of one report, which may tell of hours: a router has just come
_SETTLED_S = 1.0  # of computing: then a worker's own figures count alone


@dataclass(frozen=True, slots=True)
class PromptSpeed:
    token_s: float
    pair_s: float = 0.0

    def seconds(self, tokens: float, pairs: float) -> float:
        return self.token_s * tokens + self.pair_s * pairs


class Fit:
    """Least squares over heartbeats, the older the less; errors count by time's root.

    While all prompts are of one length, what attention takes can't be told from the rest:
    the last known proportion stays, at first none.
    """

    __slots__ = ("_nn", "_np", "_nt", "_pp", "_pt", "_seconds", "_share", "speed")

    def __init__(self) -> None:
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0
        self._seconds = 0.0
        self._share = 0.0  # a pair's time, in tokens
        self.speed: PromptSpeed | None = None

    @property
    def settled(self) -> bool:
        return self.speed is not None and self._seconds >= _SETTLED_S

    def add(self, tokens: float, pairs: float, seconds: float) -> None:
        """What was computed between two heartbeats, and how long that took; all above 0."""
        weight = min(_MOST_S / seconds, 1.0)
        tokens, pairs, seconds = tokens * weight, pairs * weight, seconds * weight
        self._nn = _MEMORY * self._nn + tokens * tokens / seconds
        self._np = _MEMORY * self._np + tokens * pairs / seconds
        self._pp = _MEMORY * self._pp + pairs * pairs / seconds
        self._nt = _MEMORY * self._nt + tokens
        self._pt = _MEMORY * self._pt + pairs
        self._seconds = _MEMORY * self._seconds + seconds
        self._share = self._told_share()
        share = self._share
        size = self._nn + 2 * share * self._np + share * share * self._pp
        token_s = (self._nt + share * self._pt) / size
        self.speed = PromptSpeed(token_s, share * token_s)

    def _told_share(self) -> float:
        """A pair's time in tokens, within bounds; the last one where lengths don't tell."""
        apart = self._nn * self._pp - self._np * self._np
        if apart <= _APART * self._nn * self._pp:
            return self._share
        token_s = (self._nt * self._pp - self._pt * self._np) / apart
        pair_s = (self._pt * self._nn - self._nt * self._np) / apart
        if pair_s <= 0:
            return 0.0
        least_s = _LEAST_TOKEN_SHARE * self._nt / self._nn
        return min(pair_s / max(token_s, least_s), _MOST_PAIR_SHARE)


class Measured(Protocol):
    """What of a worker is asked here."""

    @property
    def product(self) -> str: ...

    @property
    def only_prompts(self) -> bool: ...

    @property
    def tokens_per_s(self) -> float: ...

    @property
    def step_s(self) -> float: ...

    @property
    def fit(self) -> Fit: ...


class Speeds:
    """Of all workers together: who hasn't been measured is taken for those of its product,
    else for what it said of itself when it started, else for the others by data sheets."""

    def __init__(self, workers: Iterable[Measured]) -> None:
        self._workers = tuple(workers)
        self._prompts: dict[str, PromptSpeed | None] = {}
        self._steps: dict[str, float] = {}

    def prompt(self, worker: Measured) -> PromptSpeed:
        fit = worker.fit
        if fit.speed is not None and fit.settled:
            return fit.speed
        alike = self._of_product(worker.product)
        if alike is not None and (worker.only_prompts or not worker.tokens_per_s):
            return alike
        # Who decodes too computes prompts beside that, in smaller parts: its own word counts.
        token_s = 1.0 / (worker.tokens_per_s or self._usual_tokens_per_s(worker))
        return PromptSpeed(token_s, alike.pair_s if alike is not None else 0.0)

    def tokens_per_s(self, worker: Measured) -> float:
        """At the lengths that it has had of late."""
        return worker.tokens_per_s or 1.0 / self.prompt(worker).token_s

    def step_s(self, worker: Measured) -> float:
        """Of a decode step."""
        if worker.step_s:
            return worker.step_s
        known = self._steps.get(worker.product)
        if known is None:
            known = self._steps[worker.product] = self._usual_step_s(worker.product)
        return known

    def _of_product(self, product: str) -> PromptSpeed | None:
        if not product:
            return None
        if product not in self._prompts:
            same = [w.fit for w in self._workers if w.product == product and w.fit.settled]
            speeds = [fit.speed for fit in same if fit.speed is not None]
            self._prompts[product] = (
                PromptSpeed(median(s.token_s for s in speeds), median(s.pair_s for s in speeds))
                if speeds
                else None
            )
        return self._prompts[product]

    def _usual_tokens_per_s(self, worker: Measured) -> float:
        """Prompts are bound by computing."""
        known = [(w.product, w.tokens_per_s) for w in self._workers if w.tokens_per_s > 0]
        return _scaled(known, worker.product, lambda gpu: gpu.flops, UNKNOWN_TOKENS_PER_S)

    def _usual_step_s(self, product: str) -> float:
        """Decode steps are bound by memory."""
        known = [(w.product, w.step_s) for w in self._workers if w.step_s > 0]
        same = [step_s for other, step_s in known if product and other == product]
        if same:
            return median(same)
        return _scaled(known, product, lambda gpu: 1.0 / gpu.bandwidth_bytes_s, UNKNOWN_STEP_S)


def _scaled(
    known: list[tuple[str, float]], product: str, sheet: Callable[[Gpu], float], otherwise: float
) -> float:
    """The median of what others measured, each by its data sheet made this product's where
    both have one."""
    own = of_product(product)
    found = []
    for other, value in known:
        gpu = of_product(other) if own is not None else None
        found.append(value * sheet(own) / sheet(gpu) if own is not None and gpu else value)
    return median(found) if found else otherwise
