"""PURE. How long a request waits for one of c workers: M/G/c, approximately.

Erlang's C gives the chance to wait at all; Allen and Cunneen's factor (1 + cv2) / 2 takes
the service times' variation into account; the wait of those who wait is taken as
exponential. The router sends each prompt to the worker with the least to do, which comes
close to one common queue.
"""

import math


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


def wait_quantile_s(
    quantile: float, workers: int, load: float, service_s: float, variation: float
) -> float:
    """The wait that so many (0..1) of all requests stay below; infinite when overloaded.

    `variation` is the variance of service times over the square of their mean.
    """
    if load >= workers:
        return math.inf
    waiting = chance_to_wait(workers, load)
    allowed = 1 - quantile
    if waiting <= allowed:
        return 0.0
    mean_s = service_s / (workers - load) * (1 + variation) / 2
    return mean_s * math.log(waiting / allowed)
