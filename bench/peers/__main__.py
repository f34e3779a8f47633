"""`python -m bench.peers`: ours, vllm-router, smg and NVIDIA Dynamo with its mocker side by side:
the same load, the same faults, one report, and what each does better than ours.

Each has two pairs of workers, each worker a process that computes nothing: synthetic engines of
each system's protocol, at 10 ms a token (Dynamo's are its own). The router has a core, all else
the others. Prompts have 64 tokens.

- load: 32 streams of 100 tokens, again and again: TTFT, the router's CPU a token (Dynamo's and
  ours turn tokens into text, the other two forward bytes), requests/s of 4 tokens, 32 at a time;
- faults, under 32 streams of 300 tokens: a decode worker is killed, a prefill worker is killed,
  a decode worker is stopped; `_wrong` counts streams that didn't end whole, `_silence_s` is the
  longest time that a stream which ended whole had nothing; `after` are 32 requests that come when
  a decode worker has been dead for a second.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop

from bench.common import Metrics, arguments, percentile, pin, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from bench.peers import GOALS, install
from bench.peers.asking import Answer, Ask, Count, Crowd, by_events, by_words
from bench.peers.dynamo import dynamo
from bench.router.sites import Cores, Site, ours, peer

PROMPT_TOKENS = 64
STREAMS = 32
STEP_US = 10_000
PAIRS = 2
_BEGIN_S = 60.0
_END_S = 45.0
"""Nobody may take longer to end what takes 3 s: the rest is for what the fault costs."""
_STOPPED_S = 8.0
LESS_IS_BETTER = ("ttft_p50_ms", "ttft_p99_ms", "us_per_token", "us_per_request", "rss_mib")
_CLEARLY = 0.95

Serve = Callable[[], contextlib.AbstractContextManager[Site]]


@dataclass(frozen=True, slots=True)
class System:
    """One that is compared. `serve` starts it anew each time."""

    name: str
    serve: Serve
    count: Count
    figures: dict[str, float] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    tokens: int
    fault_tokens: int


WHOLE = Plan(rounds=8, tokens=100, fault_tokens=300)
QUICK = Plan(rounds=1, tokens=20, fault_tokens=60)


def systems(quick: bool, cores: Cores, model: Path) -> Iterator[System]:
    yield System("ours", partial(ours, cores, model, PAIRS, True), by_words)
    for name in ("vllm-router", "smg", "dynamo"):
        python = install(name, download=not quick)
        if python is None:
            continue
        if name == "dynamo":
            yield System(name, partial(dynamo, python, cores, model, PAIRS), by_events)
        else:
            yield System(name, partial(peer, name, python, cores, model, PAIRS, True), by_words)


async def crowd(site: Site, count: Count, prompts: list[str], tokens: int) -> list[Answer]:
    asks = [Ask(prompts[n % len(prompts)], tokens, STEP_US) for n in range(STREAMS)]
    return await (await Crowd.begun(site.port, asks)).ended(_END_S, count)


async def load(system: System, prompts: list[str], plan: Plan) -> None:
    """What it does while nothing goes wrong."""
    figures, count = system.figures, system.count
    with system.serve() as site:
        await crowd(site, count, prompts, plan.tokens)  # connections, caches
        cpu, answers = site.cpu_s(), []
        for _ in range(plan.rounds):
            answers += await crowd(site, count, prompts, plan.tokens)
        spent = site.cpu_s() - cpu
        wrong = [one.wrong for one in answers if one.wrong]
        figures["load_wrong"] = len(wrong)
        system.said.extend(wrong[:2])
        ttft = [one.ttft_s * 1000 for one in answers if not one.wrong] or [0.0]
        figures["ttft_p50_ms"], figures["ttft_p99_ms"] = percentile(ttft, 50), percentile(ttft, 99)
        figures["us_per_token"] = spent / max(sum(one.tokens for one in answers), 1) * 1e6
        cpu, asked = site.cpu_s(), 0
        for _ in range(plan.rounds):
            asked += len(await crowd(site, count, prompts, 4))
        figures["us_per_request"] = (site.cpu_s() - cpu) / asked * 1e6
        figures["rss_mib"] = site.rss_mib()


async def fault(
    system: System, prompts: list[str], plan: Plan, name: str, strike: Callable[[Site], None]
) -> None:
    with system.serve() as site:
        await crowd(site, system.count, prompts, 4)
        asks = [Ask(prompts[n % len(prompts)], plan.fault_tokens, STEP_US) for n in range(STREAMS)]
        streams = await Crowd.begun(site.port, asks)
        with contextlib.suppress(TimeoutError):  # who hasn't begun is counted at the end
            await streams.answering(_BEGIN_S)
        strike(site)
        if name == "kill_decode":
            await asyncio.sleep(1.0)
            after = await crowd(site, system.count, prompts, 4)
            system.figures["after_wrong"] = sum(bool(one.wrong) for one in after)
        answers = await streams.ended(_END_S, system.count)
    wrong = [one.wrong for one in answers if one.wrong]
    system.figures[f"{name}_wrong"] = len(wrong)
    silent = [one.silence_s for one in answers if not one.wrong]
    system.figures[f"{name}_silence_s"] = max(silent, default=0.0)
    system.said.extend(f"{name}: {one}" for one in wrong[:1])


def kill(role: int, site: Site) -> None:
    site.pairs[0][role].kill()


def stop(site: Site) -> None:
    """For so long that it is given up; then it goes on."""
    pid = site.pairs[0][1].pid
    os.kill(pid, signal.SIGSTOP)

    def resume() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    asyncio.get_running_loop().call_later(_STOPPED_S, resume)


FAULTS: dict[str, Callable[[Site], None]] = {
    "kill_decode": partial(kill, 1),
    "kill_prefill": partial(kill, 0),
    "stop_decode": stop,
}


async def measure(found: list[System], prompts: list[str], plan: Plan) -> None:
    for system in found:
        await load(system, prompts, plan)
        for name, strike in FAULTS.items():
            await fault(system, prompts, plan, name, strike)
        print(f"{system.name}: {system.figures}", flush=True)
        for line in system.said:
            print(f"  {line}", flush=True)


def better(mine: dict[str, float], other: dict[str, float]) -> list[str]:
    """What somebody clearly does better, by these figures."""
    found = []
    for key in sorted(mine.keys() & other.keys()):
        fault, _, _ = key.partition("_silence_s")
        if key.endswith("_wrong"):
            is_better = other[key] < mine[key]
        elif key in LESS_IS_BETTER or (key != fault and not other[f"{fault}_wrong"]):
            is_better = other[key] < _CLEARLY * mine[key]
        else:
            continue
        if is_better:
            found.append(f"{key} {other[key]:.3g} and not {mine[key]:.3g}")
    return found


BY_DESIGN = {
    "vllm-router": "engines are vLLM as it is (ours are our own); WebAssembly middleware; API keys "
    "and CORS at the router",
    "smg": "engines of SGLang, vLLM and others as they are; encode workers for images "
    "(--epd-disaggregation); many models behind one gateway; sticky sessions by any header",
    "dynamo": "engines of vLLM, SGLang and TensorRT-LLM as they are; TLS to clients; KServe's gRPC "
    "and Anthropic's API; KV offload to host memory simulated; planes by NATS, etcd or QUIC",
}
"""What their own command lines offer and ours doesn't."""


def notes(found: list[System], load: float) -> list[str]:
    """`load`: the machine's load average when it began."""
    mine = found[0].figures
    lines = [f"Beside other work of the machine: a load average of {load:.1f}."]
    for one in found[1:]:
        measured = "; ".join(better(mine, one.figures)) or "nothing that was measured here"
        lines.append(
            f"{one.name} does better than ours: {measured}. By design: {BY_DESIGN[one.name]}."
        )
    return lines


def metrics(found: list[System], minutes: float) -> Metrics:
    """Those of a peer that isn't there are missing."""
    made: dict[str, float | None] = {}
    for name in ("ours", "vllm-router", "smg", "dynamo"):
        figures = next((one.figures for one in found if one.name == name), {})
        for key in found[0].figures:
            made[f"{name.replace('-', '_')}_{key}"] = figures.get(key)
    return {**made, "minutes": minutes}


def main(quick: bool) -> None:
    began, others = time.monotonic(), os.getloadavg()[0]
    model, plan = model_dir(), QUICK if quick else WHOLE
    tokenizer = load_tokenizer(model)
    prompts = [prompt_of(tokenizer, PROMPT_TOKENS, number) for number in range(STREAMS)]
    cores = Cores.split()
    found = list(systems(quick, cores, model))
    pin(os.getpid(), set(cores.driver))
    uvloop.run(measure(found, prompts, plan))
    rows = [(key, *(one.figures[key] for one in found)) for key in found[0].figures]
    print("\n" + table(("", *(one.name for one in found)), rows))
    minutes = (time.monotonic() - began) / 60
    report("peers", metrics(found, minutes), GOALS, quick, notes(found, others))


if __name__ == "__main__":
    main(arguments(__doc__))
