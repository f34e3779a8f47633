"""Worlds of router and workers, all of the product's own code, in virtual time with faults at
every edge: tokens are right, contiguous and come once; blocks have one owner and come free;
every request ends in time. A world that goes wrong: `python -m tests.simulation SEED`."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.batch import one
from tests.simulation.plan import plan
from tests.simulation.world import run as run_world

pytestmark = pytest.mark.slow

SEEDS = 500
_EACH = 50


def test_a_few_worlds() -> None:
    ends = [one(seed) for seed in range(SEEDS, SEEDS + 15)]
    assert [end[:2] for end in ends if end[1]] == []
    assert sum(end[3] for end in ends) > 10  # transfers


@pytest.mark.parametrize("first", range(0, SEEDS, _EACH))
def test_worlds(first: int) -> None:
    problems = [one(seed)[:2] for seed in range(first, first + _EACH)]
    assert [found for found in problems if found[1]] == []


def test_worlds_differ_and_come_with_and_without_faults() -> None:
    plans = [plan(seed) for seed in range(100)]
    assert 5 < sum(not made.faults for made in plans) < 40
    upsets = {upset.what for made in plans for upset in made.upsets}
    assert upsets >= {"crash", "vanish", "pause", "cut", "fail", "drain"}
    assert len({made.describe() for made in plans}) == 100


def test_prefixes_go_from_worker_to_worker_in_some() -> None:
    """Back from decode to prefill, and to another decode worker, which takes a session over."""
    seeds = [seed for seed in range(300) if plan(seed).pulls]
    pairs = [pair for seed in seeds for pair in run_world(seed).pulled]
    ways = Counter(f"{holder[0]}->{target[0]}" for holder, target in pairs)
    assert ways["d->p"] > 3
    assert ways["d->d"] > 1


def test_a_seed_is_replayed_exactly(root: Path) -> None:
    """Also by another process, whose hashes and addresses differ."""
    seed = next(s for s in range(1000) if plan(s).kv_fault_rate > 0.1 and plan(s).upsets)
    first, second = run_world(seed), run_world(seed)
    assert first.digest == second.digest
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "tests.simulation", "--quiet", str(seed)]
    again = subprocess.run(
        command, cwd=root, env=env, capture_output=True, text=True, check=True, timeout=60
    )
    assert f"digest {first.digest:08x}" in again.stdout
