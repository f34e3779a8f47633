"""PURE. Whether to disaggregate: three ways to use the same GPUs, simulated, and why.

Prefill and decode apart (at the best split), together with prompts in chunks, together with
whole prompts: for each the fewest workers that meet the targets for 99% of requests, and what
all GPUs together attain. The answer follows the figures; two circumstances overrule them:
too few workers to survive a failure, a team that can't look after two pools for a small gain.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pd_core.estimate import Link, estimate
from pd_operator.api import Role
from pd_sim.chance import Chance
from pd_sim.perf import Perf
from pd_sim.pools import PoolPlan
from pd_sim.router import RouterPlan
from pd_sim.scalers import Fixed, Goal
from pd_sim.simulation import Fault, Plan, Result, run
from pd_sim.trace import Request, Trace

ATTAINMENT = 0.99
CHUNKS = (256, 512, 2048)
_FEWEST_WORKERS = 4
_REPLACED_S = 120.0
_SMALL_TEAM_GAIN = 0.7  # so few GPUs of the others' it has to take to be worth two pools


_Best = Callable[[int], tuple[float, str, "Result"]]


@dataclass(frozen=True, slots=True)
class Question:
    trace: Trace
    perf: Perf
    link: Link
    workers: int
    goal: Goal
    small_team: bool = False


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use the GPUs. `needs`: workers for 99%; None: all of them don't do."""

    name: str
    attainment: float  # with all workers
    needs: int | None
    setting: str  # split or chunk
    result: Result


@dataclass(frozen=True, slots=True)
class Advice:
    """`answer`: yes, no (together, whole prompts), or chunks."""

    answer: str
    reasons: tuple[str, ...]
    ways: tuple[Way, ...]
    exposed_s: float  # of a mean prompt's KV on this link
    failure_attainment: tuple[float, float]  # one worker dies: apart, together


def advise(asked: Question) -> Advice:
    ways = (_apart(asked), _together(asked, CHUNKS), _together(asked, (0,)))
    exposed_s = _exposed_s(asked)
    hurt = _hurt(asked, ways) if asked.workers >= 2 else (0.0, 0.0)
    answer, reasons = _judge(asked, ways, hurt)
    reasons += _facts(asked, exposed_s)
    return Advice(answer, tuple(reasons), ways, exposed_s, hurt)


@dataclass(frozen=True, slots=True)
class Bursts:
    """So many prompts at once, again and again, beside the others."""

    count: int
    prompt: tuple[int, int]
    every_s: float


def made_up(
    prompt: tuple[int, int],
    output: tuple[int, int],
    a_second: float,
    count: int,
    bursts: Bursts | None = None,
    seed: int = 8,
) -> Trace:
    """Poisson arrivals with lengths between bounds, evenly on a logarithmic scale: as many
    of 100 to 200 tokens as of 1,000 to 2,000."""
    chance, at_s, requests = Chance(seed), 0.0, []
    for _ in range(count):
        at_s += chance.exponential(1 / a_second)
        lengths = (_between(chance, *prompt), _between(chance, *output))
        requests.append(Request(at_s, *lengths))
    if bursts is not None:
        for number in range(1, int(at_s / bursts.every_s) + 1):
            for _ in range(bursts.count):
                lengths = (_between(chance, *bursts.prompt), _between(chance, *output))
                requests.append(Request(number * bursts.every_s, *lengths))
    return Trace(tuple(sorted(requests, key=lambda one: one.at_s)))


def split_plan(asked: Question, prefill: int, decode: int) -> Plan:
    pools = (
        PoolPlan(Role.PREFILL, asked.perf, prefill),
        PoolPlan(Role.DECODE, asked.perf, decode),
    )
    return Plan(pools, _router(asked), asked.goal)


def together_plan(asked: Question, workers: int, chunk_tokens: int) -> Plan:
    pool = PoolPlan(Role.COLOCATED, asked.perf, workers, chunk_tokens=chunk_tokens)
    return Plan((pool,), _router(asked), asked.goal)


def _router(asked: Question) -> RouterPlan:
    cache = max(asked.perf.kv_tokens // asked.trace.block_tokens, 1)
    return RouterPlan(asked.link, cache_blocks=cache)


def _between(chance: Chance, low: int, high: int) -> int:
    return round(math.exp(math.log(low) + chance.uniform() * (math.log(high) - math.log(low))))


def _apart(asked: Question) -> Way:
    def best(workers: int) -> tuple[float, str, Result]:
        prefill, tried = _first_split(asked, workers), dict[int, Result]()
        while 1 <= prefill < workers and prefill not in tried:
            result = run(split_plan(asked, prefill, workers - prefill), asked.trace, Fixed())
            tried[prefill] = result
            if result.attainment >= ATTAINMENT:
                break
            # Towards the pool whose target is missed more often.
            prefill += 1 if result.ttft_attainment < result.tpot_attainment else -1
        prefill, result = max(tried.items(), key=lambda one: one[1].attainment)
        return result.attainment, f"{prefill}:{workers - prefill}", result

    return _way("apart", asked, best, 2)


def _together(asked: Question, chunks: Sequence[int]) -> Way:
    def best(workers: int) -> tuple[float, str, Result]:
        found = [
            (run(together_plan(asked, workers, chunk), asked.trace, Fixed()), chunk)
            for chunk in chunks
        ]
        result, chunk = max(found, key=lambda one: one[0].attainment)
        return result.attainment, f"chunks of {chunk}" if chunk else "whole prompts", result

    return _way("chunks" if chunks[0] else "whole", asked, best, 1)


def _way(name: str, asked: Question, best: _Best, fewest: int) -> Way:
    """With all workers, and by halving the fewest that do."""
    if asked.workers < fewest:
        empty = Trace(())
        return Way(name, 0.0, None, "", run(together_plan(asked, 1, 0), empty, Fixed()))
    attainment, setting, result = best(asked.workers)
    if attainment < ATTAINMENT:
        return Way(name, attainment, None, setting, result)
    low, high = fewest, asked.workers
    while low < high:
        middle = (low + high) // 2
        share, found_setting, found = best(middle)
        if share >= ATTAINMENT:
            high, setting, result = middle, found_setting, found
        else:
            low = middle + 1
    return Way(name, attainment, high, setting, result)


def _first_split(asked: Question, workers: int) -> int:
    """Prefill workers by the share of the work that prompts are."""
    requests = asked.trace.requests
    prompt_s = sum(asked.perf.prompt_s(one.prompt_tokens) for one in requests)
    context = sum(one.prompt_tokens + one.output_tokens / 2 for one in requests) / len(requests)
    batch = max(asked.perf.most_within(asked.goal.tpot_s, context), 1)
    step_s = asked.perf.step_s(batch, batch * context)
    decode_s = sum(one.output_tokens for one in requests) * step_s / batch
    return min(max(round(workers * prompt_s / (prompt_s + decode_s)), 1), workers - 1)


def _exposed_s(asked: Question) -> float:
    requests = asked.trace.requests
    tokens = max(round(sum(one.prompt_tokens for one in requests) / len(requests)), 1)
    speed = tokens / asked.perf.prompt_s(tokens)
    return estimate(asked.perf.kv, tokens, asked.link, speed).exposed_s


def _hurt(asked: Question, ways: Sequence[Way]) -> tuple[float, float]:
    """All workers, of which one dies after a third and is back after two minutes: apart, one
    of the pool that suffers more."""
    prefill = min(max(int(ways[0].setting.partition(":")[0] or 1), 1), asked.workers - 1)
    apart = split_plan(asked, prefill, asked.workers - prefill)
    together = together_plan(asked, asked.workers, CHUNKS[1])
    return (
        min(_without_one(asked, apart, role) for role in (Role.PREFILL, Role.DECODE)),
        _without_one(asked, together, Role.COLOCATED),
    )


def _without_one(asked: Question, plan: Plan, role: Role) -> float:
    slow = tuple(replace(pool, start_s=_REPLACED_S) for pool in plan.pools)
    fault = Fault(asked.trace.seconds / 3, role, 0)
    return run(replace(plan, pools=slow, faults=(fault,)), asked.trace, Fixed()).attainment


def _judge(
    asked: Question, ways: Sequence[Way], hurt: tuple[float, float]
) -> tuple[str, list[str]]:
    apart, chunks, whole = ways
    simple = "chunks" if chunks.attainment > whole.attainment or _less(chunks, whole) else "no"
    better = min((chunks, whole), key=lambda way: (way.needs or math.inf, -way.attainment))
    if asked.workers < _FEWEST_WORKERS:
        return simple, [
            f"too few workers: with {asked.workers} a failure leaves one pool empty or alone; "
            f"when one dies {hurt[0]:.1%} are in time apart, {hurt[1]:.1%} together"
        ]
    if not _less(apart, better):
        return simple, [_compared(apart, better, "costs no less")]
    share = (apart.needs or math.inf) / (better.needs or math.inf) if better.needs else 0.0
    if asked.small_team and share > _SMALL_TEAM_GAIN:
        return simple, [
            f"two pools to look after for {1 - share:.0%} of the GPUs: not with a small team"
        ]
    what = "costs less" if apart.needs else "gets more in time"
    return "yes", [_compared(apart, better, what)]


def _less(one: Way, other: Way) -> bool:
    """Fewer workers; where neither or both need the same, clearly more in time."""
    if one.needs != other.needs:
        return (one.needs or math.inf) < (other.needs or math.inf)
    return one.needs is None and one.attainment > other.attainment + 0.01


def _compared(apart: Way, other: Way, what: str) -> str:
    def needs(way: Way) -> str:
        if way.needs is None:
            return f"{way.attainment:.1%} in time with all workers"
        return f"{way.needs} workers for 99%"

    return (
        f"prefill and decode apart {what}: {needs(apart)} ({apart.setting}) against "
        f"{needs(other)} ({other.setting})"
    )


def _facts(asked: Question, exposed_s: float) -> list[str]:
    """What about these requests speaks for or against it."""
    requests = asked.trace.requests
    prompts = sorted(one.prompt_tokens for one in requests)
    middle, late = prompts[len(prompts) // 2], prompts[int(len(prompts) * 0.99)]
    longest_s = asked.perf.prompt_s(late)
    outputs = sum(one.output_tokens for one in requests) / len(requests)
    facts = [
        f"a prompt of {late:,} tokens (1% are longer) is computed for {longest_s:.2g} s: whole, "
        f"it would stop those who decode for {longest_s / asked.goal.tpot_s:.0f} steps"
    ]
    if late > 4 * middle:
        facts.append(f"prompts differ widely: {middle:,} at the median, {late:,} at 99%")
    if longest_s < 2 * asked.goal.tpot_s:
        facts.append("prompts are all short: they hardly disturb who decodes")
    if sum(prompts) > 8 * outputs * len(requests):
        facts.append("prefill-heavy: pools of their own can differ in size")
    if exposed_s > asked.goal.tpot_s * max(outputs, 1) / 4:
        facts.append(f"the link is too slow: a mean prompt's KV is waited for {exposed_s:.2g} s")
    else:
        facts.append(f"the link is fast enough: {exposed_s * 1000:.2g} ms of a hand-over are seen")
    return facts
