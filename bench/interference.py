"""Four chats stream, then a long prompt arrives: what the chats feel of it.

Phases, interleaved and each with chats of its own: quiet; control (an unrelated process
computes the same prefill: only the hardware is shared); PD (the prompt goes to the prefill
worker). Decode has a core of its own; prefill worker, control, router and this client share
the other. Then one `both` worker on both cores, without chunks and with them.

Inter-token latencies are the gaps between a chat's events as the client sees them, while
the prompt is computed and handed over: from its arrival to its second token. Nobody guesses
tokens there. The same again with guesses, of PD alone: tokens that come at once count once.

Beside another long prompt, without chats, short prompts come to the same prefill worker: how
much longer than alone they wait for their first token.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.common import Goal, arguments, median, percentile, pin, report, table
from bench.interference_chart import draw
from bench.models import load_tokenizer, model_dir, prompt_of, story
from tests.client import Streamed, follow
from tests.cluster import Cluster, serving, spec

GOALS = {
    "pd_itl_p99_vs_control": Goal("<=", 1.1),
    "pd_long_ttft_ratio": Goal("<=", 1.15),
    "short_ttft_ratio": Goal("<=", 3),
}
CHATS = 4
CHUNK = 512
_BUSY_CORE, _DECODE_CORE = {0}, {1}
_CHAT_TOKENS = 1500
_NO_GUESSES = {"method": "none"}
_AT_ONCE_S = 0.002  # tokens closer than this came in one event
_ENOUGH = 500  # gaps a phase, all rounds together
_HEAD = ("phase", "gaps", "ITL p50 ms", "p99 ms", "max ms", "long TTFT s")


@dataclass(frozen=True, slots=True)
class Plan:
    long_tokens: int
    rounds: int
    both_rounds: int  # of each setting of the `both` worker
    quiet_s: float
    chunks: tuple[int, ...]
    short_rounds: int
    guess_rounds: int
    short_tokens: int = 100
    short_every_s: float = 1.0


FULL = Plan(
    6000,
    rounds=5,
    both_rounds=2,
    quiet_s=12.0,
    chunks=(512, 256, 128, 64),
    short_rounds=2,
    guess_rounds=2,
)
QUICK = Plan(
    600, rounds=1, both_rounds=1, quiet_s=2.0, chunks=(128,), short_rounds=1, guess_rounds=1
)


@dataclass(slots=True)
class Phase:
    """What the chats felt, and the long prompt's time to its first token."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the phase began, gap in seconds) of all chats."""
    ttft_s: float | None = None

    @property
    def gaps(self) -> list[float]:
        return [gap for _, gap in self.samples]

    def ms(self, percent: float) -> float:
        return percentile(self.gaps, percent) * 1000


class Chats:
    """Chats that stream without an end; a phase takes the gaps that fall into it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._number = 0
        self._times: list[list[float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Chats"]:
        """Starts them afresh, waits until all of them stream, ends them afterwards."""
        self._times = [[] for _ in range(CHATS)]
        self._tasks = [asyncio.create_task(self._chat(times)) for times in self._times]
        try:
            async with asyncio.timeout(120):
                while any(len(times) < 3 for times in self._times):
                    self._raise_failures()
                    await asyncio.sleep(0.01)
            yield self
            self._raise_failures()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _raise_failures(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _chat(self, times: list[float]) -> None:
        while True:
            self._number += 1
            result = Streamed()
            body = {**_options(story(self._number, 1)), "max_tokens": _CHAT_TOKENS}
            async for at in follow("127.0.0.1", self._port, "/v1/completions", body, result):
                times.append(at)
            if not result.done:
                raise RuntimeError(f"a chat ended with {result.status} {result.error}")

    def samples(self, start: float, end: float) -> list[tuple[float, float]]:
        """The gaps that overlap the span, in full: also the one that is open at its end."""
        return [
            (b - start, b - a)
            for times in self._times
            for a, b in pairwise(times)
            if b > start and a < end and b - a > _AT_ONCE_S
        ]

    async def until_past(self, moment: float) -> None:
        """Waits until every chat has a token after the moment."""
        async with asyncio.timeout(180):
            while any(times[-1] <= moment for times in self._times):
                self._raise_failures()
                await asyncio.sleep(0.01)


def _options(prompt: str) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True}


async def measure(chats: Chats, work: Callable[[], Awaitable[float | None]]) -> Phase:
    """One phase: the chats run, `work` begins, the gaps until it ends are taken."""
    async with chats.running():
        start = time.perf_counter()
        ttft_s = await work()
        end = time.perf_counter()
        await chats.until_past(end)
        return Phase(chats.samples(start, end), ttft_s)


async def long_prompt(port: int, prompt: str) -> float:
    """Sends it and waits for its second token, which needs the KV at decode. TTFT in s."""
    result = Streamed()
    body = {**_options(prompt), "max_tokens": 2}
    async for _ in follow("127.0.0.1", port, "/v1/completions", body, result):
        pass
    if not result.done:
        raise RuntimeError(f"the long prompt ended with {result.status} {result.error}")
    return result.ttft_s


@contextmanager
def control_process(folder: Path, tokens: int) -> Iterator[Callable[[], Awaitable[None]]]:
    """The unrelated process; calling what is yielded makes it compute one prompt."""
    command = [sys.executable, "-m", "bench.prefill_load", str(folder), str(tokens), str(CHUNK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        assert p.stdin is not None
        assert p.stdout is not None
        if p.stdout.readline().strip() != "ready":
            raise RuntimeError("the control process did not start")
        pin(p.pid, _BUSY_CORE)
        stdin, stdout = p.stdin, p.stdout

        async def compute() -> None:
            stdin.write("go\n")
            stdin.flush()
            if not await asyncio.to_thread(stdout.readline):
                raise RuntimeError("the control process ended")

        try:
            yield compute
        finally:
            stdin.close()


def pin_cluster(cluster: Cluster) -> None:
    """Decode on a core of its own, everything else and this process on the other."""
    for pid in (0, cluster.process.pid, *(p.pid for p in cluster.pods() if p.pool != "decode")):
        pin(pid, _BUSY_CORE)
    pin(cluster.pod("decode").pid, _DECODE_CORE)


async def pd_rounds(
    cluster: Cluster,
    plan: Plan,
    rounds: int,
    prompts: Iterator[str],
    control: Callable[[], Awaitable[None]],
) -> dict[str, list[Phase]]:
    """Interleaved rounds of each phase, and the long prompt alone."""
    chats = Chats(cluster.port)
    found: dict[str, list[Phase]] = {"alone": [], "quiet": [], "control": [], "PD": []}

    for _ in range(rounds):
        found["alone"].append(Phase(ttft_s=await long_prompt(cluster.port, next(prompts))))
        found["quiet"].append(await measure(chats, partial(asyncio.sleep, plan.quiet_s)))
        found["control"].append(await measure(chats, control))
        ask = partial(long_prompt, cluster.port, next(prompts))
        found["PD"].append(await measure(chats, ask))
    return found


@dataclass(slots=True)
class Shorts:
    """Seconds to the first token of short prompts."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


async def short_rounds(cluster: Cluster, plan: Plan, prompts: Iterator[str]) -> Shorts:
    tokenizer, found = load_tokenizer(model_dir()), Shorts()
    shorts = (prompt_of(tokenizer, plan.short_tokens, 20_000 + i) for i in range(10_000))
    for _ in range(plan.short_rounds):
        found.alone += [await long_prompt(cluster.port, next(shorts)) for _ in range(8)]
        long = asyncio.create_task(long_prompt(cluster.port, next(prompts)))
        asked: list[asyncio.Task[float]] = []
        while True:
            await asyncio.wait({long}, timeout=plan.short_every_s)
            if long.done():
                break
            asked.append(asyncio.create_task(long_prompt(cluster.port, next(shorts))))
        await long
        found.beside += await asyncio.gather(*asked)
    return found


async def both_rounds(
    cluster: Cluster, plan: Plan, prompts: Iterator[str]
) -> dict[str, list[Phase]]:
    chats = Chats(cluster.port)
    found: dict[str, list[Phase]] = {"quiet": [], "during": []}
    for _ in range(plan.both_rounds):
        found["quiet"].append(await measure(chats, partial(asyncio.sleep, plan.quiet_s)))
        ask = partial(long_prompt, cluster.port, next(prompts))
        found["during"].append(await measure(chats, ask))
    return found


def run_pd(
    folder: Path, plan: Plan, prompts: Iterator[str], guesses: bool
) -> tuple[dict[str, list[Phase]], Shorts]:
    decode = {"threads": 1} | ({} if guesses else {"speculation": _NO_GUESSES})
    pools = {
        "prefill": {"replicas": 1, "engine": {"threads": 1, "chunkTokens": CHUNK}},
        "decode": {"replicas": 1, "engine": decode},
    }
    with (
        tempfile.TemporaryDirectory() as work,
        control_process(folder, plan.long_tokens) as control,
        serving(spec(folder, dtype="auto", **pools), Path(work)) as cluster,
    ):
        pin_cluster(cluster)
        rounds = plan.guess_rounds if guesses else plan.rounds
        found = asyncio.run(pd_rounds(cluster, plan, rounds, prompts, control))
        shorts = Shorts() if guesses else asyncio.run(short_rounds(cluster, plan, prompts))
        pin(0, _BUSY_CORE | _DECODE_CORE)
        return found, shorts


def run_both(
    folder: Path, plan: Plan, prompts: Iterator[str], chunk: int
) -> dict[str, list[Phase]]:
    engine = {"chunkTokens": chunk, "speculation": _NO_GUESSES}
    pools = {"colocated": {"replicas": 1, "engine": engine}}
    with (
        tempfile.TemporaryDirectory() as work,
        serving(spec(folder, dtype="auto", **pools), Path(work)) as cluster,
    ):
        return asyncio.run(both_rounds(cluster, plan, prompts))


def ratio(during: list[Phase], base: list[Phase], percent: float) -> float:
    """The median over rounds of the percentile's ratio."""
    return median(d.ms(percent) / b.ms(percent) for d, b in zip(during, base, strict=True))


def check_samples(name: str, phases: list[Phase], quick: bool) -> None:
    found = sum(len(p.gaps) for p in phases)
    if not quick and found < _ENOUGH:
        raise RuntimeError(f"{name}: {found} gaps in all rounds, {_ENOUGH} are needed")


def row(name: str, phases: list[Phase]) -> tuple[object, ...]:
    whole = Phase([sample for phase in phases for sample in phase.samples])
    gaps = whole.gaps
    times = [p.ttft_s for p in phases if p.ttft_s is not None]
    ttft = median(times) if times else None
    if not gaps:
        return (name, 0, None, None, None, ttft)
    return (name, len(gaps), whole.ms(50), whole.ms(99), max(gaps) * 1000, ttft)


def rounds_of(found: dict[str, list[Phase]]) -> list[tuple[object, ...]]:
    """The 99th percentile of each phase of each round, in milliseconds."""
    each = zip(found["quiet"], found["control"], found["PD"], strict=True)
    return [(n, *(phase.ms(99) for phase in phases)) for n, phases in enumerate(each, 1)]


def main(quick: bool) -> None:
    plan = QUICK if quick else FULL
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("two cores are needed: one for decode, one for the rest")
    folder = model_dir()
    tokenizer = load_tokenizer(folder)
    prompts = (prompt_of(tokenizer, plan.long_tokens, 1000 + i) for i in range(10_000))

    print(f"about {1 if quick else 35} minutes; nothing else should run meanwhile", flush=True)
    pd, shorts = run_pd(folder, plan, prompts, guesses=False)
    for name in ("quiet", "control", "PD"):
        check_samples(name, pd[name], quick)
    # Shown at once: the rest takes minutes more. A round that stands out was disturbed.
    rows = [row(name, phases) for name, phases in pd.items()]
    print(table(_HEAD, rows), flush=True)
    print(table(("p99 ms, round", "quiet", "control", "PD"), rounds_of(pd)), flush=True)
    waits = [
        (n, len(t), median(t), max(t))
        for n, t in (("alone", shorts.alone), ("beside", shorts.beside))
    ]
    print(table(("short prompts", "count", "TTFT s, median", "max"), waits), flush=True)
    guessing, _ = run_pd(folder, plan, prompts, guesses=True)
    rows += [row(f"guesses, {name}", phases) for name, phases in guessing.items()]
    both = run_both(folder, plan, prompts, chunk=0)
    chunked = {chunk: run_both(folder, plan, prompts, chunk) for chunk in plan.chunks}
    best = min(chunked, key=lambda c: ratio(chunked[c]["during"], chunked[c]["quiet"], 99))
    rows += [row(f"both, {name}", phases) for name, phases in both.items()]
    for chunk, phases in chunked.items():
        rows += [row(f"both, chunks of {chunk}, {name}", p) for name, p in phases.items()]
    print(table(_HEAD, rows))
    series = {
        "one worker, whole prompts": both["during"][0].samples,
        f"one worker, chunks of {best}": chunked[best]["during"][0].samples,
        "prefill and decode apart": pd["PD"][0].samples,
        "nothing but the chats": pd["quiet"][0].samples,
    }
    title = f"Four chats while a prompt of {plan.long_tokens:,} tokens is computed"
    draw("interference.png", series, title, quick)
    series = {name: guessing[name][0].samples for name in ("PD", "control", "quiet")}
    draw("interference-guesses.png", series, f"{title}, with guesses", quick)

    ttft = [p.ttft_s or 0.0 for p in pd["PD"]]
    alone = [p.ttft_s or 1.0 for p in pd["alone"]]
    metrics = {
        "pd_itl_p50_ratio": ratio(pd["PD"], pd["quiet"], 50),
        "pd_itl_p99_ratio": ratio(pd["PD"], pd["quiet"], 99),
        "pd_itl_p99_vs_control": ratio(pd["PD"], pd["control"], 99),
        "guessing_itl_p99_vs_control": ratio(guessing["PD"], guessing["control"], 99),
        "short_ttft_ratio": median(shorts.beside) / median(shorts.alone),
        "both_itl_p99_ratio": ratio(both["during"], both["quiet"], 99),
        "chunked_itl_p99_ratio": ratio(chunked[best]["during"], chunked[best]["quiet"], 99),
        "pd_long_ttft_ratio": median(t / a for t, a in zip(ttft, alone, strict=True)),
    }
    report("interference", metrics, GOALS, quick)


if __name__ == "__main__":
    main(arguments(__doc__))
