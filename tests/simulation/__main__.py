"""Runs worlds by their numbers.

python -m tests.simulation 4711            one world, with all that happens in it
python -m tests.simulation --seeds 0-500   many; prints those that go wrong
"""

import argparse
import sys

from tests.simulation.batch import many
from tests.simulation.worker import Wrong
from tests.simulation.world import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", help="FROM-TO, the last one left out")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("-q", "--quiet", action="store_true")
    flags = parser.parse_args()
    if flags.seeds:
        first, _, end = flags.seeds.partition("-")
        return many(range(int(first), int(end)), flags.jobs)
    if flags.seed is None:
        parser.error("give a seed, or --seeds FROM-TO")
    try:
        world = run(flags.seed, None if flags.quiet else print)
    except Wrong as wrong:
        print(f"seed {flags.seed}: {wrong}")
        return 1
    print(f"seed {flags.seed}: right (digest {world.digest:08x})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
