"""Does decide() cost less than what others do? Two public traces through the simulator.

`python -m bench.scaling --data FOLDER [--cell NAME]… [--quick]`: FOLDER holds
azure_conv_2023.csv, mooncake_conversation.jsonl (or other files in those formats) and
gpu_perf_model.csv (splitwise-sim's). Without it, the environment's PDCLUSTER_BENCH_DATA.

One worker is a Llama-2-70B on four H100s, a roofline fitted to the table (pd_sim.perf says
what is extrapolated). All begin at the size that the first five minutes need. Targets are
fixed here, before any tuning: Azure TTFT 2 s and TPOT 50 ms, inside the batches that were
measured; Mooncake 30 s and 100 ms, those of its paper; both at p99. One set of defaults.

Ours is run as it comes. A rival whose usual setting doesn't reach the attainment is run again
with workers filled less and less (`FILLS`), as somebody would who watched it fail on this very
trace, until it does; what it costs then is what it is compared by.
"""

import argparse
import csv
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import common, days
from bench.rivals import Profile, clairvoyant, hpa, planners, profile, windows
from pd_core.estimate import LINKS
from pd_core.gpus import GPUS
from pd_core.known_models import KNOWN_MODELS
from pd_operator.api import Role
from pd_operator.scaling.types import PoolSpec
from pd_sim import perf, trace
from pd_sim.pools import PoolPlan
from pd_sim.router import RouterPlan
from pd_sim.scalers import Fixed, Goal, Scaler, Slo
from pd_sim.simulation import Plan, Result, run

ATTAINMENT = 0.99
GOALS = {
    "attainment": common.Goal(">=", ATTAINMENT),
    "gpu_hours_vs_optimum": common.Goal("<=", 1.10),
    "gpu_hours_vs_best_rival": common.Goal("<=", 0.90),
}
STARTS_S = (60.0, 180.0, 300.0)
FILLS = (1.0, 0.75, 0.5, 0.35)
"""How full a rival may have its workers, as a share of what it would by itself."""
_MOST = 24
_FIRST_S = 300.0


@dataclass(frozen=True, slots=True)
class Source:
    """`times`: the trace's load, so often; as a day it is halved on average."""

    file: str
    goal: Goal
    times: int
    day_times: int


SOURCES = {
    "azure": Source("azure_conv_2023.csv", Goal(2.0, 0.050), 4, 1),
    "mooncake": Source("mooncake_conversation.jsonl", Goal(30.0, 0.100), 1, 1),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A trace at a start-up time."""

    name: str
    trace: trace.Trace
    goal: Goal
    perf: perf.Perf
    start_s: float

    def plan(self, prefill: int, decode: int) -> Plan:
        pools = tuple(
            PoolPlan(role, self.perf, count, maximum=_MOST, start_s=self.start_s)
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        )
        cache = self.perf.kv_tokens // self.trace.block_tokens
        return Plan(pools, RouterPlan(LINKS["rdma-400g"], cache_blocks=cache), self.goal)

    def known(self) -> Profile:
        requests = self.trace.requests
        prompt = sum(one.prompt_tokens for one in requests) / len(requests)
        output = sum(one.output_tokens for one in requests) / len(requests)
        return profile(self.perf, self.goal, prompt, output)


def first_sizes(found: clairvoyant.Demand) -> tuple[int, int]:
    """For the first five minutes, 80% busy."""
    slots = max(int(_FIRST_S / found.slot_s), 1)
    prefill, decode = (
        max(math.ceil(max(found.workers[role][:slots]) / 0.8), 1)
        for role in (Role.PREFILL, Role.DECODE)
    )
    return prefill, decode


def rivals(known: Profile) -> Mapping[str, Callable[[], Scaler]]:
    seats = {Role.PREFILL: 3.0 * known.fill, Role.DECODE: float(known.batch)}
    return {
        "hpa_queue": lambda: hpa.queue_length(known),
        "hpa_utilization": lambda: hpa.utilization(known),
        "keda": lambda: hpa.keda(known),
        "analyzer": lambda: planners.Analyzer(known),
        "percentile": lambda: windows.PercentileWindow(seats),
        "kpa": lambda: windows.Kpa(seats),
        "planner": lambda: planners.ThroughputPlanner(known),
    }


def rival(cell: Cell, plan: Plan, name: str, fills: Sequence[float]) -> tuple[Result, float]:
    """Its first run that reaches the attainment, else the best, and how full that was."""
    tried: list[tuple[Result, float]] = []
    for fill in fills:
        result = run(plan, cell.trace, rivals(cell.known().filled(fill))[name]())
        tried.append((result, fill))
        if result.attainment >= ATTAINMENT:
            return tried[-1]
    return max(tried, key=lambda one: one[0].attainment)


def best_fixed(cell: Cell, found: clairvoyant.Demand) -> Result | None:
    """The smallest sizes that reach the goal: each pool alone, the other one ample."""
    peak = {role: max(math.ceil(max(found.workers[role])), 1) for role in found.workers}
    ample = {role: min(2 * size + 2, _MOST) for role, size in peak.items()}
    sizes: dict[Role, int] = {}
    for role in (Role.PREFILL, Role.DECODE):
        for size in range(max(peak[role] * 2 // 3, 1), ample[role] + 1):
            tried = {**ample, role: size}
            result = run(cell.plan(tried[Role.PREFILL], tried[Role.DECODE]), cell.trace, Fixed())
            # Decode without room makes prompts wait for it: both targets count for both.
            if result.attainment >= ATTAINMENT + (1 - ATTAINMENT) / 4:
                sizes[role] = size
                break
    if len(sizes) < 2:
        return None
    return run(cell.plan(sizes[Role.PREFILL], sizes[Role.DECODE]), cell.trace, Fixed())


def best_clairvoyant(cell: Cell, plan: Plan, found: clairvoyant.Demand) -> Result | None:
    """The fullest that workers may be for the goal still to be reached."""
    for load in (0.95, 0.85, 0.75, 0.65, 0.55):
        result = run(plan, cell.trace, clairvoyant.Clairvoyant(found, cell.start_s, load))
        if result.attainment >= ATTAINMENT:
            return result
    return None


def compare(
    cell: Cell, only: str | None = None, fills: Sequence[float] = FILLS
) -> dict[str, Result | None]:
    found = clairvoyant.demand(cell.trace, cell.perf, cell.goal)
    plan = cell.plan(*first_sizes(found))
    results: dict[str, Result | None] = {}
    if only is None or "ours" in only.split(","):
        results["ours"] = run(plan, cell.trace, Slo(plan.pools, plan.goal))
    notes: dict[str, float] = {}
    for name in rivals(cell.known()):
        if only is None or name in only.split(","):
            results[name], notes[name] = rival(cell, plan, name, fills)
    if only is None or "best_fixed" in only:
        results["best_fixed"] = best_fixed(cell, found)
    if only is None or "clairvoyant" in only:
        results["clairvoyant"] = best_clairvoyant(cell, plan, found)
    _show(cell, results, notes, clairvoyant.bound_gpu_hours(found, cell.perf, cell.start_s))
    return results


def _show(
    cell: Cell, results: Mapping[str, Result | None], fills: Mapping[str, float], bound: float
) -> None:
    rows = [
        (name, r.attainment, r.ttft_attainment, r.tpot_attainment, r.gpu_hours, r.gpu_hours / bound,
         r.changes, fills.get(name, ""))
        for name, r in results.items() if r is not None
    ]  # fmt: skip
    head = (cell.name, "attainment", "TTFT", "TPOT", "GPU-h", "of the bound", "changes", "fill")
    shown = [(n, *(f"{100 * x:.2f}%" for x in rest[:3]), *rest[3:]) for n, *rest in rows]
    print("\n" + common.table(head, shown))
    print(f"bound: {bound:.1f} GPU-hours", flush=True)
    line = {"cell": cell.name, "bound": bound} | {
        name: None if r is None else [r.attainment, r.gpu_hours, fills.get(name)]
        for name, r in results.items()
    }
    common.OUT.mkdir(parents=True, exist_ok=True)
    with (common.OUT / "scaling.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def figures(done: Mapping[str, tuple[Mapping[str, Result | None], float]]) -> common.Metrics:
    """The worst over all cells, and each alone."""
    metrics: dict[str, float | None] = {}
    for name, (results, bound) in done.items():
        ours = results["ours"]
        assert ours is not None
        rivals = [
            r.gpu_hours
            for key, r in results.items()
            if key not in ("ours", "clairvoyant") and r is not None and r.attainment >= ATTAINMENT
        ]
        metrics[f"attainment_{name}"] = ours.attainment
        metrics[f"gpu_hours_vs_optimum_{name}"] = ours.gpu_hours / bound
        best = ours.gpu_hours / min(rivals) if rivals else None
        metrics[f"gpu_hours_vs_best_rival_{name}"] = best
    for key, worst in (
        ("attainment", min),
        ("gpu_hours_vs_optimum", max),
        ("gpu_hours_vs_best_rival", max),
    ):
        values = [v for k, v in metrics.items() if k.startswith(key + "_") and v is not None]
        metrics[key] = worst(values) if values else None
    return metrics


def cells(data: Path, quick: bool) -> list[Cell]:
    with (data / "gpu_perf_model.csv").open(newline="") as lines:
        measured = perf.read_measured(csv.DictReader(lines), "llama2-70b", "h100-80gb", 4)
    engine = perf.fit(KNOWN_MODELS["llama-2-70b"], GPUS["h100"], 4, measured)
    made: list[Cell] = []
    for name, source in SOURCES.items():
        path = data / source.file
        if not path.exists():
            print(f"{path} is missing: skipped")
            continue
        with path.open() as lines:
            whole = trace.read(lines)
        shapes = {
            "hour": trace.faster(whole, 1 if quick else source.times),
            "day": days.day(trace.faster(whole, source.day_times)),
        }
        for shape, start_s in ((s, t) for s in shapes for t in STARTS_S):
            cut = shapes[shape].head(4000) if quick else shapes[shape]
            made.append(Cell(f"{name}_{shape}_{start_s:g}", cut, source.goal, engine, start_s))
    return made[:1] if quick else made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell of 4,000 requests")
    parser.add_argument("--data", type=Path, default=os.environ.get("PDCLUSTER_BENCH_DATA"))
    parser.add_argument("--cell", action="append", help="only cells whose name begins so")
    parser.add_argument("--only", help="only these policies, with commas")
    parser.add_argument("--as-usual", action="store_true", help="rivals at their usual fill alone")
    found = parser.parse_args()
    if found.data is None or not Path(found.data).is_dir():
        print("bench.scaling needs traces: see its docstring for which, and --data; not run")
        metrics: common.Metrics = dict.fromkeys(GOALS)
        common.report("scaling", metrics, GOALS, found.quick)
        return 0
    print(f"defaults: {PoolSpec(Role.PREFILL, 1)}")
    done: dict[str, tuple[Mapping[str, Result | None], float]] = {}
    for cell in cells(Path(found.data), found.quick):
        if found.cell and not any(cell.name.startswith(one) for one in found.cell):
            continue
        bound = clairvoyant.bound_gpu_hours(
            clairvoyant.demand(cell.trace, cell.perf, cell.goal), cell.perf, cell.start_s
        )
        fills = FILLS[:1] if found.as_usual else FILLS
        done[cell.name] = (compare(cell, found.only, fills), bound)
    if all("ours" in results for results, _ in done.values()):
        common.report("scaling", figures(done), GOALS, found.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
