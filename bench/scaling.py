"""Does decide() cost less than what others do? Two public traces through the simulator.

`python -m bench.scaling --data FOLDER [--cell NAME]… [--only POLICY,…] [--quick]`: FOLDER holds
azure_conv_2023.csv, mooncake_conversation.jsonl (or other files in those formats; also in
FOLDER/traces) and gpu_perf_model.csv (splitwise-sim's). Without it, the environment's
PDCLUSTER_BENCH_DATA. What was run before by the same code isn't run again (`scaling_kept`; after
a change of fills or searches in this module, remove bench/out/scaling), so cells can be run
apart, two at a time, and put together by a last call; `--kept` puts together what there is and
counts the runs that are missing.

What a worker is, loads and targets: `scaling_cells`. All begin at the size that the first five
minutes need. One set of defaults.

Ours is run as it comes. A rival whose usual setting doesn't reach the attainment is run again
with workers filled less and less (`FILLS`), as somebody would who watched it fail on this very
trace, until it does; what it costs then is what it is compared by. A run that has become too
late to reach it is given up. The best fixed size knows the trace; so it stands beside the
rivals, in `gpu_hours_vs_best_rival`, and is left out of `gpu_hours_vs_best_autoscaler`.
"""

import argparse
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench import common, scaling_chart
from bench.rivals import Profile, clairvoyant, hpa, planners, windows
from bench.scaling_cells import MOST_WORKERS, Cell, cells
from bench.scaling_kept import Kept, is_kept, kept, once
from pd_operator.api import Role
from pd_operator.scaling.types import PoolSpec
from pd_sim.scalers import Fixed, Scaler, Slo
from pd_sim.simulation import Plan, Result, run

ATTAINMENT = 0.99
GOALS = {
    "attainment": common.Goal(">=", ATTAINMENT),
    "gpu_hours_vs_optimum": common.Goal("<=", 1.10),
    "gpu_hours_vs_best_rival": common.Goal("<=", 0.90),
    "runs_missing": common.Goal("<=", 0),
}
FILLS = (1.0, 0.75, 0.5, 0.35)
"""How full a rival may have its workers, as a share of what it would by itself."""
_FIRST_S = 300.0
_LOADS = (0.95, 0.85, 0.75, 0.65, 0.55)
_MODULES = {
    "ours": "pd_operator.scaling",
    "hpa_queue": "bench.rivals.hpa",
    "hpa_utilization": "bench.rivals.hpa",
    "keda": "bench.rivals.hpa",
    "analyzer": "bench.rivals.planners",
    "planner": "bench.rivals.planners",
    "percentile": "bench.rivals.windows",
    "kpa": "bench.rivals.windows",
    "best_fixed": "bench.rivals.clairvoyant",
    "clairvoyant": "bench.rivals.clairvoyant",
}
"""Each policy, and where it is."""


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


def _tried(cell: Cell, plan: Plan, scaler: Scaler, goal: float = ATTAINMENT) -> Result:
    """A run that is given up once it can't reach the goal any more."""
    return run(plan, cell.trace, scaler, int((1 - goal) * len(cell.trace.requests)))


def rival(cell: Cell, plan: Plan, name: str) -> Kept:
    """Its first run that reaches the attainment, else the last one."""
    for fill in FILLS:
        result = _tried(cell, plan, rivals(cell.known().filled(fill))[name]())
        if result.whole and result.attainment >= ATTAINMENT:
            break
    return kept(result, fill)


def best_fixed(cell: Cell, found: clairvoyant.Demand) -> Kept | None:
    """The smallest sizes that reach the goal: each pool alone, the other one ample."""
    peak = {role: max(math.ceil(max(found.workers[role])), 1) for role in found.workers}
    ample = {role: min(2 * size + 2, MOST_WORKERS) for role, size in peak.items()}
    # Decode without room makes prompts wait for it: both targets count for both.
    goal = ATTAINMENT + (1 - ATTAINMENT) / 4
    sizes: dict[Role, int] = {}
    for role in (Role.PREFILL, Role.DECODE):
        for size in range(max(peak[role] * 2 // 3, 1), ample[role] + 1):
            beside = {**ample, role: size}
            plan = cell.plan(beside[Role.PREFILL], beside[Role.DECODE])
            result = _tried(cell, plan, Fixed(), goal)
            if result.whole and result.attainment >= goal:
                sizes[role] = size
                break
    if len(sizes) < 2:
        return None
    found_sizes = (sizes[Role.PREFILL], sizes[Role.DECODE])
    result = run(cell.plan(*found_sizes), cell.trace, Fixed())
    while result.attainment < ATTAINMENT and max(found_sizes) < MOST_WORKERS:
        # Each was enough beside plenty of the other: one more of which helps more?
        prefill, decode = found_sizes
        more = ((prefill + 1, decode), (prefill, decode + 1))
        tried = [run(cell.plan(*one), cell.trace, Fixed()) for one in more]
        better = 0 if tried[0].attainment >= tried[1].attainment else 1
        found_sizes, result = more[better], tried[better]
    return kept(result)


def best_clairvoyant(cell: Cell, plan: Plan, found: clairvoyant.Demand) -> Kept | None:
    """The fullest that workers may be for the goal still to be reached."""
    for load in _LOADS:
        result = _tried(cell, plan, clairvoyant.Clairvoyant(found, cell.start_s, load))
        if result.whole and result.attainment >= ATTAINMENT:
            return kept(result, load)
    return None


def _made(cell: Cell, name: str) -> Kept | None:
    found = clairvoyant.demand(cell.trace, cell.perf, cell.goal)
    plan = cell.plan(*first_sizes(found))
    if name == "ours":
        return kept(run(plan, cell.trace, Slo(plan.pools, plan.goal)))
    if name == "best_fixed":
        return best_fixed(cell, found)
    if name == "clairvoyant":
        return best_clairvoyant(cell, plan, found)
    return rival(cell, plan, name)


def compare(cell: Cell, only: tuple[str, ...], kept_alone: bool) -> dict[str, Kept | None]:
    results: dict[str, Kept | None] = {}
    for name, module in _MODULES.items():
        if kept_alone and not is_kept(cell.name, name, module):
            continue
        if not only or name in only:
            results[name] = once(cell.name, name, module, partial(_made, cell, name))
    return results


def bound(cell: Cell) -> float:
    found = clairvoyant.demand(cell.trace, cell.perf, cell.goal)
    return clairvoyant.bound_gpu_hours(found, cell.perf, cell.start_s)


def _show(name: str, results: Mapping[str, Kept | None], bound: float) -> None:
    head = (name, "attainment", "TTFT", "TPOT", "GPU-h", "of the bound", "changes", "fill")
    rows: list[tuple[object, ...]] = []
    for policy, r in results.items():
        if r is None or not r.whole:
            rows.append((policy, f"< {ATTAINMENT:.0%}", "", "", "", "", "", ""))
            continue
        shares = (f"{100 * x:.2f}%" for x in (r.attainment, r.ttft_attainment, r.tpot_attainment))
        rows.append((policy, *shares, r.gpu_hours, r.gpu_hours / bound, r.changes, r.fill or ""))
    print("\n" + common.table(head, rows))
    print(f"bound: {bound:.1f} GPU-hours", flush=True)


def _reached(results: Mapping[str, Kept | None], without: tuple[str, ...]) -> list[float]:
    """GPU-hours of those who reach the attainment."""
    return [
        r.gpu_hours
        for key, r in results.items()
        if key not in without and r is not None and r.whole and r.attainment >= ATTAINMENT
    ]


def figures(done: Mapping[str, tuple[Mapping[str, Kept | None], float]]) -> common.Metrics:
    """The worst over all cells, and each alone."""
    metrics: dict[str, float | None] = {}
    for name, (results, bound) in done.items():
        ours = results.get("ours")
        if ours is None:
            continue
        metrics[f"attainment_{name}"] = ours.attainment
        metrics[f"gpu_hours_{name}"] = ours.gpu_hours
        metrics[f"gpu_hours_vs_optimum_{name}"] = ours.gpu_hours / bound
        for key, without in (
            ("rival", ("ours", "clairvoyant")),
            ("autoscaler", ("ours", "clairvoyant", "best_fixed")),
        ):
            others = _reached(results, without)
            best = ours.gpu_hours / min(others) if others else None
            metrics[f"gpu_hours_vs_best_{key}_{name}"] = best
    metrics["runs_missing"] = sum(len(_MODULES) - len(found) for found, _ in done.values())
    for key, worst in (
        ("attainment", min),
        ("gpu_hours_vs_optimum", max),
        ("gpu_hours_vs_best_rival", max),
        ("gpu_hours_vs_best_autoscaler", max),
    ):
        values = [v for k, v in metrics.items() if k.startswith(key + "_") and v is not None]
        metrics[key] = worst(values) if values else None
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell of 4,000 requests")
    parser.add_argument("--data", type=Path, default=os.environ.get("PDCLUSTER_BENCH_DATA"))
    parser.add_argument("--cell", action="append", help="only cells whose name begins so")
    parser.add_argument("--only", help="only these policies, with commas")
    parser.add_argument("--kept", action="store_true", help="run nothing anew")
    found = parser.parse_args()
    if found.data is None or not Path(found.data).is_dir():
        print("bench.scaling needs traces: see its docstring for which, and --data; not run")
        metrics: common.Metrics = dict.fromkeys(GOALS)
        common.report("scaling", metrics, GOALS, found.quick)
        return 0
    print(f"defaults: {PoolSpec(Role.PREFILL, 1)}")
    only = tuple(found.only.split(",")) if found.only else ()
    done: dict[str, tuple[Mapping[str, Kept | None], float]] = {}
    for cell in cells(Path(found.data), found.quick, tuple(found.cell or ("",))):
        done[cell.name] = (compare(cell, only, found.kept), bound(cell))
        _show(cell.name, *done[cell.name])
    if not only:
        made = figures(done)
        scaling_chart.draw(done, not (found.quick or found.cell or made["runs_missing"]))
        common.report("scaling", made, GOALS, found.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
