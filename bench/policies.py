"""How much each way of choosing workers serves in time, on two public traces.

Needs the traces and the table of GPU speeds; where they are and how to get them is said
when they are missing. Simulated workers: `replay`. Goals for latency are fixed here, per
trace, before anything was tuned to them.
"""

import argparse
import csv
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.common import Goal, Metrics, report, table
from bench.replay import Replay, Result, Site
from pd_core import known_models
from pd_core.estimate import LINKS
from pd_core.gpus import GPUS
from pd_core.policies import POLICIES, PolicyName
from pd_router.routing import Routing
from pd_sim import perf, trace

GOALS = {
    "goodput_vs_best_mooncake": Goal(">=", 0.97),
    "goodput_vs_best_azure": Goal(">=", 0.97),
}
DATA_VARIABLE = "PDCLUSTER_BENCH_DATA"
_PERF_FILE = "gpu_perf_model.csv"
_HOW = f"""bench.policies needs data that isn't part of this repository. Point {DATA_VARIABLE} or
--data to a folder with
  {_PERF_FILE}                   perf_model.csv of github.com/Mutinifni/splitwise-sim
  traces/azure_conv_2023.csv          AzureLLMInferenceTrace_conv of Azure/AzurePublicDataset
  traces/mooncake_conversation.jsonl  conversation of kvcache-ai/Mooncake, FAST25-release"""
_MODEL = "llama-2-70b"


@dataclass(frozen=True, slots=True)
class Case:
    """A trace, its goals in seconds, and what serves it. `speed`: its time runs so fast."""

    name: str
    file: str
    ttft_s: float
    tpot_s: float
    gpus: int  # a worker
    prefill: int
    decode: int
    speed: float
    requests: int


# Sized so that workers are busy to about nine tenths: with room to spare, or with none,
# every policy is as good as another.
CASES = (
    Case("mooncake", "traces/mooncake_conversation.jsonl", 10.0, 0.1, 8, 4, 4, 1.0, 3000),
    Case("azure", "traces/azure_conv_2023.csv", 2.0, 0.1, 4, 4, 6, 4.0, 6000),
)


def sites(case: Case, rows: list[dict[str, str]]) -> Iterator[tuple[str, Site]]:
    """Equal and mixed GPUs, with 1, 2 and 8 routers."""
    h100, a100 = (_perf(rows, gpu, case.gpus) for gpu in ("h100", "a100"))
    for label, slow in (("equal", 0), ("mixed", 2)):
        prefill = (h100,) * (case.prefill - slow) + (a100,) * 2 * slow
        decode = (h100,) * (case.decode - slow) + (a100,) * slow
        for routers in (1, 2, 8):
            name = f"{label} GPUs, {routers} router{'s' if routers > 1 else ''}"
            yield name, Site(prefill, decode, LINKS["rdma-400g"], routers)


def _perf(rows: list[dict[str, str]], gpu: str, gpus: int) -> perf.Perf:
    model = known_models.find(_MODEL)
    assert model is not None
    measured = perf.read_measured(rows, "llama2-70b", f"{gpu}-80gb", gpus)
    return perf.fit(model, GPUS[gpu], gpus, measured)


def read_case(case: Case, data: Path, quick: bool) -> trace.Trace:
    with (data / case.file).open() as lines:
        whole = trace.read(lines)
    head = whole.head(300 if quick else case.requests)
    requests = tuple(replace(one, at_s=one.at_s / case.speed) for one in head.requests)
    return replace(head, requests=requests)


def run_case(case: Case, data: Path, rows: list[dict[str, str]], quick: bool) -> float:
    """The default's goodput against the best single policy's, at the worst site."""
    replayed = read_case(case, data, quick)
    worst = float("inf")
    for where, site in sites(case, rows):
        results: dict[PolicyName, Result] = {
            policy: Replay(site, replayed, Routing(policy)).run() for policy in POLICIES
        }
        good = {name: made.goodput(case.ttft_s, case.tpot_s) for name, made in results.items()}
        best = max(value for name, value in good.items() if name != "cost")
        ratio = good["cost"] / best if best else float("nan")
        worst = min(worst, ratio)
        print(f"\n{case.name}, {where}: the default has {ratio:.3f} of the best single one")
        print(_table(results, good), flush=True)
        if quick:
            break
    return worst


def _table(results: Mapping[PolicyName, Result], good: Mapping[PolicyName, float]) -> str:
    head = ("policy", "goodput/s", "TTFT p50 s", "p99 s", "hit rate", "busiest/mean", "local")
    rows = [
        (name, good[name], r.ttft(50), r.ttft(99), r.hit_rate, r.imbalance, r.local)
        for name, r in results.items()
    ]
    return table(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shows only that the bench works")
    parser.add_argument("--data", type=Path, default=os.environ.get(DATA_VARIABLE))
    parser.add_argument("--only", choices=[case.name for case in CASES])
    given = parser.parse_args()
    data = Path(given.data) if given.data else None
    metrics: dict[str, float | None] = dict.fromkeys(GOALS)
    if data is None or not (data / _PERF_FILE).exists():
        print(_HOW, file=sys.stderr)
    else:
        with (data / _PERF_FILE).open() as lines:
            rows = list(csv.DictReader(lines))
        for case in CASES:
            if given.only in (None, case.name) and (data / case.file).exists():
                metrics[f"goodput_vs_best_{case.name}"] = run_case(case, data, rows, given.quick)
    shown: Metrics = metrics
    report("policies", shown, GOALS, given.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
