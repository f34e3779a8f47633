"""A tiny model through the real processes of `pdcluster up`, for long: many short requests
over kept connections, each answer held against transformers' `generate`, in parts:

    python -m bench.soak [--minutes 60] [--part NAME ...] [--requests N] [--quick]

`--minutes` is one round through the parts, each for its share of it, on a PDCluster of its
own; `--part` names the parts instead of all. What each part has found is kept in
bench/soak/runs.jsonl, and the last line adds all of it up; with `--requests` rounds follow
each other until so many are kept. `failed` are errors instead of answers, with at least one
pair of workers there at any moment. Memory and descriptors are those of each process, `up`
itself too (see `watch`); blocks are counted when nobody asks any more.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import uvloop

from bench.common import commit, report, table
from bench.soak import GOALS, kept
from bench.soak.cases import Case, make
from bench.soak.faults import trouble
from bench.soak.load import Tally, User
from bench.soak.parts import BY_NAME, QUICK, Part
from bench.soak.watch import PERIOD_S, Watch
from tests.cluster import Cluster, ClusterError, serving, spec
from tests.reference import Reference
from tests.tiny_model import tiny_model_dir

_MINUTES = 60.0
_QUICK_S = 15.0
_SETTLE_S = 30.0
_LAST_ANSWERS_S = 150.0


def main() -> None:
    given = _arguments()
    parts = [BY_NAME[name] for name in given.part or (QUICK if given.quick else BY_NAME)]
    kinds = {kind for part in parts for kind in part.mix.weights}
    folder = tiny_model_dir()
    cases = make(sorted(kinds), Reference(folder, threads=1), few=given.quick)
    found: list[kept.Found] = []
    for part, seconds in _rounds(parts, given):
        found.append(run(part, seconds, folder, cases))
        if not given.quick:
            kept.keep(found[-1])
    runs = found if given.quick else kept.all_kept()
    print("\n" + table(kept.HEAD, kept.rows(runs)))
    report("soak", kept.total(runs), GOALS, given.quick)
    if any(run["wrong_tokens"] or run["leaked_blocks"] for run in found):
        raise SystemExit("tokens were wrong, or blocks leaked")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--part", action="append", choices=sorted(BY_NAME))
    parser.add_argument("--requests", type=int, default=0, metavar="N")
    parser.add_argument("--quick", action="store_true", help="under a minute, and not kept")
    return parser.parse_args()


def _rounds(parts: Sequence[Part], given: argparse.Namespace) -> Iterator[tuple[Part, float]]:
    """One round, or as many as it takes until so many requests are kept."""
    shares = sum(part.share for part in parts)
    seconds = _QUICK_S if given.quick else given.minutes * 60
    while True:
        for part in parts:
            yield part, seconds * part.share / shares
            if given.requests and _kept_requests() >= given.requests:
                return
        if given.quick or not given.requests:
            return


def _kept_requests() -> float:
    return kept.total(kept.all_kept())["requests"] or 0


def run(
    part: Part, seconds: float, folder: Path, cases: Mapping[str, Sequence[Case]]
) -> kept.Found:
    """One part on a PDCluster of its own."""
    tally, watch, done = Tally(), Watch(), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as work,
        serving(spec(folder, **part.pools()), Path(work)) as cluster,
    ):
        cluster.until(cluster.all_ready, "all workers ready", 120)
        totals = {pod.name: sum(cluster.blocks(pod).values()) for pod in cluster.workers()}
        began = time.monotonic()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_load(cluster, part, seconds, cases, tally, watch, done))
        took = time.monotonic() - began
        leaked = leaked_blocks(cluster, totals)
    found = {
        "part": part.name,
        "day": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "seconds": round(took, 1),
        "requests": tally.requests,
        "wrong_tokens": tally.wrong,
        "failed": tally.failed,
        "leaked_blocks": leaked,
        "rss_growth": watch.rss_growth(),
        "fd_growth": watch.fd_growth(),
        "rss_mib": {one.name: one.rss_curve_mib() for one in watch.judged()},
        "left": tally.left,
        "faults": dict(done),
    }
    _show(part, tally, watch, found)
    return found


async def _load(
    cluster: Cluster,
    part: Part,
    seconds: float,
    cases: Mapping[str, Sequence[Case]],
    tally: Tally,
    watch: Watch,
    done: Counter[str],
) -> None:
    """Everybody asks, until the time is over and the last answers have come."""
    over = asyncio.Event()
    users = [User(n, cluster.port, part.mix, cases, tally) for n in range(part.users)]
    asyncio.get_running_loop().call_later(seconds, over.set)
    async with asyncio.timeout(seconds + _LAST_ANSWERS_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(_watching(cluster, watch, over))
        if part.faults:
            tasks.create_task(trouble(cluster, over, done))
        for user in users:
            tasks.create_task(user.run(over))


async def _watching(cluster: Cluster, watch: Watch, over: asyncio.Event) -> None:
    while not over.is_set():
        pods = {pod.pid: pod.name for pod in cluster.pods()}
        watch.sample({cluster.process.pid: "up", **pods})
        await asyncio.sleep(PERIOD_S)


def leaked_blocks(cluster: Cluster, totals: Mapping[str, int]) -> int:
    """Blocks that are held for nobody, or are no longer there, when nobody asks."""
    try:
        cluster.until_settled(_SETTLE_S)
    except ClusterError as error:
        print(error, file=sys.stderr)
    leaked = 0
    for pod in cluster.workers():
        blocks = cluster.blocks(pod)
        leaked += blocks["active"] + blocks["granted"] + blocks["quarantined"]
        leaked += abs(totals[pod.name] - sum(blocks.values()))
    return leaked


def _show(part: Part, tally: Tally, watch: Watch, found: kept.Found) -> None:
    rate = tally.requests / found["seconds"]
    print(f"\n{part.name}: {tally.requests:,} requests, {rate:,.0f}/s, {dict(tally.kinds)}")
    print(f"right {tally.right:,}, left {tally.left:,}, failed {tally.failed}, wrong {tally.wrong}")
    if found["faults"]:
        print(f"faults: {found['faults']}")
    rows = [
        (one.name, len(one.fds), one.rss_bytes[-1] / 2**20, one.rss_growth(), one.fds[-1],
         one.fd_growth())
        for one in watch.judged()
    ]  # fmt: skip
    print(table(("process", "samples", "RSS MiB", "grown", "descriptors", "more"), rows))
    for note in tally.notes:
        print(f"  {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
