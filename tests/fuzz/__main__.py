"""Fuzzes what takes bytes from others, with atheris: each target in a process of its own.

    python -m tests.fuzz [TARGET ...] [--seconds 20] [--jobs 2]

What a fuzzer learns stays in build/fuzz and is where the next run starts from. An input that
goes wrong lies in build/fuzz/findings: fix it, and put the input into tests/fuzz/corpus.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from tests.fuzz import targets
from tests.fuzz.corpus import BUILD, HERE

_START_S = 180
"""For imports, and for inputs of earlier runs."""
_TAIL_LINES = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a target's run ended. `inputs`: how many were tried."""

    target: str
    code: int
    inputs: int
    took_s: float
    tail: str


def fuzz(target: str, seconds: int) -> Outcome:
    command = [sys.executable, "-m", "tests.fuzz.one", target, "--seconds", str(seconds)]
    began = time.monotonic()
    log = BUILD / f"{target}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, TemporaryDirectory(prefix="pdcluster-fuzz-") as folder:
        done = subprocess.run(
            command,
            cwd=HERE.parent.parent,
            env={**os.environ, "TMPDIR": folder},  # a fuzzer ends without tidying up
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds + _START_S,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(
        target,
        done.returncode,
        _tried(lines),
        time.monotonic() - began,
        "\n".join(lines[-_TAIL_LINES:]),
    )


def run(names: Sequence[str], seconds: int, jobs: int) -> Iterator[Outcome]:
    """Fuzzes these targets, so many at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda name: fuzz(name, seconds), names)


def _tried(lines: Iterable[str]) -> int:
    name = "stat::number_of_executed_units:"
    return next((int(line.split()[-1]) for line in lines if line.startswith(name)), 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(targets.NAMES))
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(targets.NAMES):
        parser.error(f"no target is called {', '.join(sorted(unknown))}")
    failed = []
    for outcome in run(given.targets or targets.NAMES, given.seconds, given.jobs):
        tried = f"{outcome.inputs:>10,} inputs {outcome.took_s:6.0f} s"
        print(f"{outcome.target:12} {tried}", flush=True)
        if outcome.code != 0:
            failed.append(outcome.target)
            print(outcome.tail, flush=True)
    if failed:
        print(f"went wrong: {', '.join(failed)}; inputs: {BUILD / 'findings'}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
