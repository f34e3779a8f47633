"""PURE. How long a request waits for one of c workers: M/G/c, approximately.

Erlang's C gives the chance to wait at all; Allen and Cunneen's factor (1 + cv2) / 2 takes
the service times' variation into account; the wait of those who wait is taken as
exponential. The router sends each prompt to the worker with the least to do, which comes
close to one common queue.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """`chance` to wait at all, and the mean wait of those who do."""

    chance: float
    mean_s: float

    def longer_than(self, seconds: float) -> float:
        """The share of all requests that wait longer."""
        if seconds < 0 or self.chance >= 1.0:
            return 1.0
        return self.chance * math.exp(-seconds / self.mean_s) if self.mean_s > 0 else 0.0


def waiting(workers: int, load: float, service_s: float, variation: float) -> Waiting:
    """`variation` is the variance of service times over the square of their mean."""
    if load >= workers:
        return Waiting(1.0, math.inf)
    mean_s = service_s / (workers - load) * (1 + variation) / 2
    return Waiting(chance_to_wait(workers, load), mean_s)


def chance_to_wait(workers: int, load: float) -> float:
    """Erlang's C for `load` = arrivals x service time; 1 where it is too much."""
    if load >= workers:
        return 1.0
    if load <= 0:
        return 0.0
    blocked = 1.0
    for servers in range(1, workers + 1):
        blocked = load * blocked / (servers + load * blocked)
    return blocked / (1 - load / workers * (1 - blocked))
