"""`python -m bench.router`: our router before synthetic workers beside vllm-router and smg in
their modes for prefill and decode, before equally instant engines. One load generator; the
router has one core, everything that drives it the others.

Ours tokenizes prompts and turns tokens into text; the peers forward bytes. Prompts have 64
tokens. Measured, in turns (ours, theirs, ours, ...):
- tokens/s when engines offer far more (1,000 tokens/s a stream, 128 a request);
- CPU a token at a fixed rate (50 tokens/s a stream, streams that outlast the window);
- requests/s and CPU a request, 4 tokens each, 64 at a time;

Tokens/s and requests/s are those of a second of the router's CPU time: what it does with its
core when nothing keeps it waiting. By the clock (`wall_`) a router that is fast waits for
the engines and the load generator, and on a busy machine for its turn.

- TTFT at 1 and at 32 at a time, unsaturated;
- memory at 2,000 open streams, and what a killed decode worker does to 32 streams (two pairs).
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvloop

from bench.common import arguments, median, percentile, pin, report, table
from bench.models import load_tokenizer, model_dir, prompt_of
from bench.peers import install
from bench.router import GOALS
from bench.router.load import Load, Shape
from bench.router.sites import PEERS, Cores, Site, ours, peer

PROMPT_TOKENS = 64
PROMPTS = 64
LIVE = (32, 128, 256)
GOAL_LIVE = (128, 256)
FIXED_STEP_US = 20_000
LONG = 4096  # tokens that no stream reaches within a window
MEMORY_STREAMS = 2000


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often. Seconds."""

    rounds: int
    window_s: float
    settle_s: float
    memory_streams: int


WHOLE = Plan(rounds=5, window_s=3.0, settle_s=1.0, memory_streams=MEMORY_STREAMS)
QUICK = Plan(rounds=1, window_s=0.5, settle_s=0.3, memory_streams=100)


@dataclass(slots=True)
class Figures:
    """What was measured of each router, by kind: one figure a round."""

    of: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, kind: str, value: float) -> None:
        self.of.setdefault(name, {}).setdefault(kind, []).append(value)

    def median(self, name: str, kind: str) -> float | None:
        values = self.of.get(name, {}).get(kind)
        return median(values) if values else None

    def against_best(self, kind: str, *, most: bool) -> float | None:
        """Ours over the best peer's, round by round; None without peers."""
        peers = [of[kind] for name, of in self.of.items() if name != "ours" and kind in of]
        mine = self.of["ours"].get(kind)
        if not peers or not mine:
            return None
        best = [(max if most else min)(round) for round in zip(*peers, strict=True)]
        return median(a / b for a, b in zip(mine, best, strict=True))


@dataclass(frozen=True, slots=True)
class Window:
    """What one router did in a stretch of time."""

    seconds: float
    cpu_s: float
    tokens: int
    requests: int
    ttft_s: list[float]


async def watch(site: Site, shape: Shape, prompts: list[str], plan: Plan) -> Window:
    """Lets a load run, and counts once it has settled. Raises if an answer was wrong."""
    loop = asyncio.get_running_loop()
    async with Load(site.port, shape, prompts) as load:
        await load.answering()
        await asyncio.sleep(plan.settle_s)
        load.counts.reset()
        began, cpu = loop.time(), site.cpu_s()
        await asyncio.sleep(plan.window_s)
        counts, seconds, spent = load.counts, loop.time() - began, site.cpu_s() - cpu
        if counts.wrong:
            raise RuntimeError(f"{site.name}, {shape}: wrong answers: {counts.wrong[:3]}")
        window = Window(seconds, spent, counts.tokens, counts.requests, counts.ttft_s[:])
    await asyncio.sleep(plan.settle_s / 2)  # what was cut off is cleared away
    return window


async def one_round(serving: list[Site], prompts: list[str], plan: Plan, figures: Figures) -> None:
    """Every kind of figure once, of one router right after the other."""

    async def each(shape: Shape, *measures: tuple[str, Callable[[Window], float]]) -> None:
        for site in serving:
            window = await watch(site, shape, prompts, plan)
            for kind, measure in measures:
                figures.add(site.name, kind, measure(window))

    for live in LIVE:
        kinds = (f"tokens_s_{live}", _tokens_s), (f"wall_tokens_s_{live}", _wall_tokens_s)
        await each(Shape(live, 128, 1000), *kinds)
        await each(Shape(live, LONG, FIXED_STEP_US), (f"us_per_token_{live}", _us_per_token))
    await each(
        Shape(64, 4, 1000),
        ("requests_s", _requests_s),
        ("wall_requests_s", _wall_requests_s),
        ("us_per_request", _us_per_request),
    )
    for live, shape in ((1, Shape(1, 4, 1000)), (32, Shape(32, 16, 5000))):
        await each(
            shape,
            (f"ttft_p50_{live}", partial(_ttft_ms, 50)),
            (f"ttft_p99_{live}", partial(_ttft_ms, 99)),
        )


def _tokens_s(window: Window) -> float:
    return window.tokens / window.cpu_s


def _wall_tokens_s(window: Window) -> float:
    return window.tokens / window.seconds


def _us_per_token(window: Window) -> float:
    return window.cpu_s / window.tokens * 1e6


def _requests_s(window: Window) -> float:
    return window.requests / window.cpu_s


def _wall_requests_s(window: Window) -> float:
    return window.requests / window.seconds


def _us_per_request(window: Window) -> float:
    return window.cpu_s / window.requests * 1e6


def _ttft_ms(percent: float, window: Window) -> float:
    return percentile(window.ttft_s, percent) * 1000


async def memory(site: Site, prompts: list[str], plan: Plan, figures: Figures) -> None:
    """MiB with so many streams open that get a token from time to time."""
    shape = Shape(plan.memory_streams, LONG, 500_000)
    async with Load(site.port, shape, prompts) as load:
        await load.answering()
        await asyncio.sleep(plan.settle_s)
        figures.add(site.name, "mb_at_2000", site.rss_mib())


async def killed(site: Site, prompts: list[str], figures: Figures) -> None:
    """Streams that end wrong when a decode worker of two is killed under 32 of them."""
    async with Load(site.port, Shape(32, 300, 10_000), prompts) as load:
        await load.answering()
        await asyncio.sleep(1.0)
        site.pairs[0][-1].kill()
        await load.finish()
        figures.add(site.name, "killed_worker_errors", len(load.counts.wrong))


@contextlib.contextmanager
def sites(
    pythons: dict[str, Path], cores: Cores, model: Path, *, faults: bool = False
) -> Iterator[list[Site]]:
    """All routers, ours first. `faults`: two pairs, each worker a process."""
    pairs = 2 if faults else 1
    with contextlib.ExitStack() as closing:
        enter = closing.enter_context
        yield [
            enter(ours(cores, model, pairs, faults)),
            *(enter(peer(n, p, cores, model, pairs, faults)) for n, p in pythons.items()),
        ]


async def measure(
    pythons: dict[str, Path], cores: Cores, model: Path, prompts: list[str], plan: Plan
) -> Figures:
    figures = Figures()
    with sites(pythons, cores, model) as serving:
        for number in range(plan.rounds):
            await one_round(serving, prompts, plan, figures)
            print(f"round {number + 1} of {plan.rounds}", flush=True)
        for site in serving:
            await memory(site, prompts, plan, figures)
    show(figures)
    with sites(pythons, cores, model, faults=True) as serving:
        for site in serving:
            await killed(site, prompts, figures)
    return figures


def _worst(values: list[float | None], *, most: bool) -> float | None:
    known = [value for value in values if value is not None]
    return (max if most else min)(known) if len(known) == len(values) else None


def summary(figures: Figures) -> dict[str, float | None]:
    """The keys of the report. Of several loads, the least favourable counts."""

    def against(kind: str, loads: tuple[int, ...], *, most: bool) -> dict[int, float | None]:
        return {live: figures.against_best(f"{kind}_{live}", most=most) for live in loads}

    tokens = against("tokens_s", LIVE, most=True)
    wall = against("wall_tokens_s", LIVE, most=True)
    cpu = against("us_per_token", LIVE, most=False)
    ttft = against("ttft_p99", (1, 32), most=False)
    kills = {n: figures.median(n, "killed_worker_errors") for n in figures.of}
    others = [errors for name, errors in kills.items() if name != "ours" and errors is not None]
    return {
        "tokens_s_vs_best": _worst([tokens[live] for live in GOAL_LIVE], most=False),
        "cpu_per_token_vs_best": _worst([cpu[live] for live in GOAL_LIVE], most=True),
        "requests_s_vs_best": figures.against_best("requests_s", most=True),
        "ttft_p99_vs_best": _worst(list(ttft.values()), most=True),
        "us_per_token": figures.median("ours", "us_per_token_128"),
        "us_per_request": figures.median("ours", "us_per_request"),
        "mb_at_2000": figures.median("ours", "mb_at_2000"),
        "killed_worker_errors": kills["ours"],
        "killed_worker_errors_best_peer": min(others, default=None),
        **{f"tokens_s_vs_best_{live}": ratio for live, ratio in tokens.items()},
        **{f"wall_tokens_s_vs_best_{live}": ratio for live, ratio in wall.items()},
        "wall_requests_s_vs_best": figures.against_best("wall_requests_s", most=True),
        **{f"cpu_per_token_vs_best_{live}": ratio for live, ratio in cpu.items()},
        **{f"ttft_p99_vs_best_{live}": ratio for live, ratio in ttft.items()},
    }


def show(figures: Figures) -> None:
    names = list(figures.of)
    rows = [(kind, *(figures.median(name, kind) for name in names)) for kind in figures.of["ours"]]
    print("\n" + table(("median", *names), rows))


def main(quick: bool) -> None:
    plan = QUICK if quick else WHOLE
    found = {name: install(name, download=not quick) for name in PEERS}
    pythons = {name: python for name, python in found.items() if python is not None}
    model = model_dir()
    tokenizer = load_tokenizer(model)
    prompts = [prompt_of(tokenizer, PROMPT_TOKENS, number) for number in range(PROMPTS)]
    cores = Cores.split()
    pin(os.getpid(), set(cores.driver))
    gc.disable()  # of the load generator: nothing that it makes is in cycles
    figures = uvloop.run(measure(pythons, cores, model, prompts, plan))
    show(figures)
    report("router", summary(figures), GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
