"""The router's own speed beside compiled ones: see `__main__`."""

from bench.common import Goal

GOALS = {
    "tokens_s_vs_best": Goal(">=", 1.2),
    "cpu_per_token_vs_best": Goal("<=", 0.7),
    "requests_s_vs_best": Goal(">=", 1),
    "ttft_p99_vs_best": Goal("<=", 1),
    "killed_worker_errors": Goal("<=", 0),
}
