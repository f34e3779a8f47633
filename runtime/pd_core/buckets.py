"""The bounds of latency histograms: routers count by them, alerts and dashboards read them."""

from bisect import bisect_left

# Seconds: 1 ms to 120 s, each about 1.5 times the one before.
SECONDS = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0),
)


def shares(seconds: float) -> list[tuple[float, float]]:
    """(share, bound): the counts of these bounds, by these shares, make the count of what took
    at most so long, by a straight line between two bounds. What lies beyond the last bound
    can't be told apart."""
    at = bisect_left(SECONDS, seconds)
    if at == len(SECONDS):
        return [(1.0, SECONDS[-1])]
    above = SECONDS[at]
    below = SECONDS[at - 1] if at else 0.0
    share = (seconds - below) / (above - below)
    made = [(1 - share, below), (share, above)]
    return [(round(one, 6), bound) for one, bound in made if one > 1e-6 and bound]
