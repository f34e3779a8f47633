"""The simulator beside the engine: the same requests, asked of real workers and simulated.

For two pools and for one worker that does both: `pdcluster profile` measures the running
workers, then requests with random arrivals and lengths are sent to them as they would come,
and the simulator is given the same requests with the profile. Prefill has a core of its own
that router and client share, decode another one; the one worker has one core, too. Nobody
guesses tokens: what that brings depends on the text, which the simulator doesn't know.

Targets and rates follow from the profile alone: the TTFT target is twice what a prompt of
middle length takes alone, the TPOT target 1.5 times a step of one sequence; so many requests
come that prompts keep their worker busy for half of the time.

A profile is worth as much as the machine is steady: some of it is measured again after the
requests, and by how much that differs is reported as drift. Where it isn't well below the
goals, the errors are the machine's.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import Goal, arguments, percentile, pin, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from pd_cli import profiling, top
from pd_operator import api
from pd_sim import profile as profiles
from pd_sim import scenario
from pd_sim.advice import made_up
from pd_sim.profile import Profile
from pd_sim.scalers import Fixed
from pd_sim.simulation import Plan, run
from pd_sim.trace import Request, Trace
from tests.client import stream
from tests.cluster import Cluster, serving, spec

GOALS = {
    "ttft_p50_error": Goal("<=", 0.15),
    "tpot_p50_error": Goal("<=", 0.15),
    "attainment_error": Goal("<=", 0.10),
}
_PREFILL_CORE, _DECODE_CORE = {0}, {1}
_PROMPT = (64, 1024)
_OUTPUT = (16, 96)
_BUSY = 0.5
_TTFT_TIMES, _TPOT_TIMES = 2.0, 1.5
_MIDDLE_TOKENS = 256  # of lengths drawn evenly on a logarithmic scale
_ENGINE = {"threads": 1, "speculation": {"method": "none"}}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "pd": {
        "prefill": {"replicas": 1, "engine": {"threads": 1}},
        "decode": {"replicas": 1, "engine": _ENGINE},
        "router": {"routing": {"disaggregate": "always"}},
    },
    "colocated": {"colocated": {"replicas": 1, "engine": _ENGINE}},
}
_FULL = profiling.Plan(prompts=(64, 128, 256, 512, 1024), batches=(1, 2, 3, 4, 6, 8, 12))
_QUICK = profiling.Plan(prompts=(64, 256), repeats=1, batches=(1, 2), long_batches=())
_AGAIN = profiling.Plan(prompts=(64, _MIDDLE_TOKENS), repeats=3, batches=(1, 2), long_batches=())
_REQUESTS, _QUICK_REQUESTS = 200, 8


@dataclass(frozen=True, slots=True)
class Got:
    """What one request got, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """What all of them got, measured or simulated."""

    ttft_p50_s: float
    tpot_p50_s: float
    attainment: float

    @classmethod
    def of(cls, got: list[Got], ttft_s: float, tpot_s: float) -> "Side":
        kept = sum(one.ttft_s <= ttft_s and one.tpot_s <= tpot_s for one in got)
        return cls(
            percentile([one.ttft_s for one in got], 50),
            percentile([one.tpot_s for one in got], 50),
            kept / len(got),
        )


def trace_for(profile: Profile, requests: int) -> Trace:
    """As many a second as keep the one who computes prompts busy for the given share."""
    perf = profiles.perf(profile)
    draft = made_up(_PROMPT, _OUTPUT, 1.0, requests)
    mean_s = sum(perf.prompt_s(one.prompt_tokens) for one in draft.requests) / requests
    return made_up(_PROMPT, _OUTPUT, _BUSY / mean_s, requests)


def targets(profile: Profile) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds."""
    perf = profiles.perf(profile)
    ttft_s = _TTFT_TIMES * (profile.overhead_s + perf.prompt_s(_MIDDLE_TOKENS))
    return ttft_s, _TPOT_TIMES * perf.step_s(1, _MIDDLE_TOKENS)


async def replay(cluster: Cluster, trace: Trace, prompts: list[str]) -> list[Got]:
    """Each request at its time."""
    began = time.perf_counter()

    async def one(request: Request, prompt: str) -> Got:
        await asyncio.sleep(max(began + request.at_s - time.perf_counter(), 0.0))
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        sent = time.perf_counter()
        answer = await stream("127.0.0.1", cluster.port, "/v1/completions", body)
        if not answer.done:
            raise RuntimeError(f"a request ended with {answer.status} {answer.error}")
        first, last = answer.times[0], answer.times[-1]
        return Got(first - sent, (last - first) / (request.output_tokens - 1))

    pairs = zip(trace.requests, prompts, strict=True)
    return list(await asyncio.gather(*(one(*pair) for pair in pairs)))


def simulated(document: dict[str, Any], profile: Profile, trace: Trace) -> list[Got]:
    """The same PDCluster and requests."""
    known = {"profile": profile}
    plan: Plan = scenario.plan(api.parse(document), {"profile": "profile"}, known=known)
    result = run(plan, trace, Fixed())
    return [
        Got(one.ttft_s, one.tpot_s)
        for one in result.outcomes
        if one.ttft_s is not None and one.tpot_s is not None
    ]


def pin_cluster(cluster: Cluster) -> None:
    for pid in (0, cluster.process.pid, *(pod.pid for pod in cluster.pods())):
        pin(pid, _PREFILL_CORE)
    for pool in ("decode", "colocated"):
        for pod in cluster.pods(pool):
            pin(pod.pid, _DECODE_CORE)


def drift(before: Profile, after: Profile) -> float:
    """By what share a prompt or a step took longer or shorter after the requests."""
    old, new = profiles.perf(before), profiles.perf(after)
    ratios = (
        new.prompt_s(_MIDDLE_TOKENS) / old.prompt_s(_MIDDLE_TOKENS),
        new.step_s(1, _MIDDLE_TOKENS) / old.step_s(1, _MIDDLE_TOKENS),
    )
    return max(abs(one - 1) for one in ratios)


def compare(folder: Path, kind: str, quick: bool) -> tuple[Side, Side, float]:
    """(measured, simulated, drift)."""
    made = spec(folder, dtype="auto", **_KINDS[kind])
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as work, serving(made, Path(work)) as cluster:
        cluster.until(cluster.all_ready, "all workers ready", 120)
        pin_cluster(cluster)
        admin = top.place(f"http://{cluster.pod('router').ip}:9090")
        target = profiling.Target(("127.0.0.1", cluster.port), [admin])
        plan = _QUICK if quick else _FULL
        profile = asyncio.run(profiling.measure(target, plan, lambda line: print(f"  {line}")))
        trace = trace_for(profile, _QUICK_REQUESTS if quick else _REQUESTS)
        prompts = [
            prompt_of(tokenizer, one.prompt_tokens, 5000 + number)
            for number, one in enumerate(trace.requests)
        ]
        print(f"{kind}: {len(prompts)} requests over {trace.seconds:.0f} s", flush=True)
        got = asyncio.run(replay(cluster, trace, prompts))
        again = asyncio.run(profiling.measure(target, _AGAIN, lambda line: print(f"  {line}")))
        pin(0, _PREFILL_CORE | _DECODE_CORE)
    ttft_s, tpot_s = targets(profile)
    return (
        Side.of(got, ttft_s, tpot_s),
        Side.of(simulated(made, profile, trace), ttft_s, tpot_s),
        drift(profile, again),
    )


def errors(real: Side, model: Side) -> dict[str, float]:
    """Of what is simulated, against what was measured; attainment in points of a hundredth."""
    return {
        "ttft_p50_error": abs(model.ttft_p50_s / real.ttft_p50_s - 1),
        "tpot_p50_error": abs(model.tpot_p50_s / real.tpot_p50_s - 1),
        "attainment_error": abs(model.attainment - real.attainment),
    }


def main(quick: bool) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two cores are needed: one for decode, one for the rest")
    folder = model_dir()
    found: dict[str, dict[str, float]] = {}
    drifts: dict[str, float] = {}
    rows = []
    for kind in _KINDS:
        real, model, drifts[kind] = compare(folder, kind, quick)
        found[kind] = errors(real, model)
        for name, side in (("measured", real), ("simulated", model)):
            figures = (side.ttft_p50_s * 1000, side.tpot_p50_s * 1000, side.attainment)
            rows.append((f"{kind}, {name}", *figures))
            print("{}: TTFT {:.0f} ms, TPOT {:.1f} ms, {:.0%}".format(*rows[-1]), flush=True)
        print(f"{kind}: the machine drifted by {drifts[kind]:.0%}", flush=True)
    print(table(("", "TTFT p50 ms", "TPOT p50 ms", "attainment"), rows))
    metrics = {key: max(one[key] for one in found.values()) for key in GOALS}
    metrics |= {f"{kind}_{key}": value for kind in found for key, value in found[kind].items()}
    metrics |= {f"{kind}_drift": value for kind, value in drifts.items()}
    report("simfit", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
