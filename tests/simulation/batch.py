"""Many worlds, in one process or several."""

import collections
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence

from tests.simulation.worker import Wrong
from tests.simulation.world import run

Outcome = tuple[int, str, list[str], int]
"""(seed, what went wrong or nothing, how its requests ended, transfers committed)."""


def one(seed: int) -> Outcome:
    try:
        world = run(seed)
    except Wrong as wrong:
        return seed, str(wrong), [], 0
    return seed, "", [client.end for client in world.clients], world.committed


def outcomes(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(one, seeds, chunksize=20)


def many(seeds: Sequence[int], jobs: int) -> int:
    """Prints the worlds that went wrong, and how all requests ended. Returns an exit code."""
    began = time.perf_counter()
    ends: collections.Counter[str] = collections.Counter()
    wrong = transfers = 0
    for seed, problem, found, committed in outcomes(seeds, jobs):
        ends.update(found)
        transfers += committed
        if problem:
            wrong += 1
            print(f"seed {seed}: {problem}", flush=True)
    took_s = time.perf_counter() - began
    total = max(1, sum(ends.values()))
    shares = ", ".join(f"{n / total:.1%} {how}" for how, n in ends.most_common())
    print(
        f"{len(seeds)} worlds in {took_s:.0f} s, {wrong} went wrong; {total} requests "
        f"({transfers} transfers committed): {shares}"
    )
    return 1 if wrong else 0


def failing(seeds: Iterable[int]) -> int | None:
    """The first seed whose world goes wrong."""
    return next((seed for seed in seeds if one(seed)[1]), None)
