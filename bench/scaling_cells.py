"""What bench.scaling runs: traces, loads, targets and start-up times, fixed before any tuning.

One worker is a Llama-2-70B on four H100s, a roofline fitted to a table of measurements
(pd_sim.perf says what is extrapolated). Targets: Azure TTFT 2 s and TPOT 50 ms, inside the
batches that were measured; Mooncake 30 s and 100 ms, those of its paper; both at p99.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

from bench import days
from bench.rivals import Profile, profile
from pd_core.estimate import LINKS
from pd_core.gpus import GPUS
from pd_core.known_models import KNOWN_MODELS
from pd_operator.api import Role
from pd_sim import perf, trace
from pd_sim.pools import PoolPlan
from pd_sim.router import RouterPlan
from pd_sim.scalers import Goal
from pd_sim.simulation import Plan

STARTS_S = (60.0, 180.0, 300.0)
MOST_WORKERS = 24
QUICK_REQUESTS = 4000


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
            PoolPlan(role, self.perf, count, maximum=MOST_WORKERS, start_s=self.start_s)
            for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        )
        cache = self.perf.kv_tokens // self.trace.block_tokens
        return Plan(pools, RouterPlan(LINKS["rdma-400g"], cache_blocks=cache), self.goal)

    def known(self) -> Profile:
        requests = self.trace.requests
        prompt = sum(one.prompt_tokens for one in requests) / len(requests)
        output = sum(one.output_tokens for one in requests) / len(requests)
        return profile(self.perf, self.goal, prompt, output)


def cells(data: Path, quick: bool, begins: tuple[str, ...] = ("",)) -> list[Cell]:
    """Those whose names begin so. `data` holds the files, traces perhaps in traces/."""
    with (data / "gpu_perf_model.csv").open(newline="") as lines:
        measured = perf.read_measured(csv.DictReader(lines), "llama2-70b", "h100-80gb", 4)
    engine = perf.fit(KNOWN_MODELS["llama-2-70b"], GPUS["h100"], 4, measured)
    made: list[Cell] = []
    for name, source in SOURCES.items():
        found = [path for path in (data / source.file, data / "traces" / source.file)
                 if path.exists()]  # fmt: skip
        if not found:
            print(f"{data / source.file} is missing: skipped")
            continue
        with found[0].open() as lines:
            whole = trace.read(lines)
        for shape in ("hour", "day"):
            mark = "quick_" if quick else ""
            names = {start_s: f"{mark}{name}_{shape}_{start_s:g}" for start_s in STARTS_S}
            wanted = {s: n for s, n in names.items() if n.startswith(begins)}
            if wanted:
                shaped = _shaped(whole, source, shape, quick)
                made += [Cell(n, shaped, source.goal, engine, s) for s, n in wanted.items()]
        if quick:
            return made[:1]
    return made


def _shaped(whole: trace.Trace, source: Source, shape: str, quick: bool) -> trace.Trace:
    if quick:
        return whole.head(QUICK_REQUESTS)
    if shape == "hour":
        return trace.faster(whole, source.times)
    return days.day(trace.faster(whole, source.day_times))
