"""A tiny model through real processes for long, with faults: see `__main__`."""

from bench.common import Goal

GOALS = {
    "requests": Goal(">=", 1_000_000),
    "wrong_tokens": Goal("<=", 0),
    "failed": Goal("<=", 0),
    "leaked_blocks": Goal("<=", 0),
    "rss_growth": Goal("<=", 0.02),
    "fd_growth": Goal("<=", 0),
}
