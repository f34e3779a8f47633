"""Measures what `pd_sim.profile` tells of a running PDCluster: prompts alone, and decode steps
at several batches and lengths. It asks as any client does, and reads the routers' admin port.
"""

import asyncio
import json
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pd_cli.chat import events
from pd_operator import httpget
from pd_sim.profile import Profile, Prompt, Step

_PATH = "/v1/completions"
_ANSWER_S = 600.0
_ADMIN_S = 10.0
_TEXT = (
    "The tide went out before dawn and the harbour lay quiet under a grey sky while Marta "
    "counted crates on the quay wrote the number down and looked for the ship that was to bring "
    "them north a gull took a crust from her hand"
)
_WARM_UP = (64, 512)
_SEEN_TOKENS = 24
"""Of each sequence, while a step is measured."""
_MOST_SHARE = 0.9  # of the KV cache that sequences may take
_FIRST_WORDS = 16
_PROMPT_MARGIN = 1.5  # by which a prompt may turn out longer than it was asked to be

Place = tuple[str, int]


class NotProfiled(Exception):
    """It can't be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The clients' port, the routers' admin ports, an API key where one is needed."""

    api: Place
    admins: Sequence[Place]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts of about these lengths, each so often; steps of these batches with short KV, and
    of some with long KV. What doesn't fit into the context or the KV cache is left out."""

    prompts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096)
    repeats: int = 3
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    short_tokens: int = 64
    long_tokens: int = 1024
    long_batches: tuple[int, ...] = (1, 4)


@dataclass(frozen=True, slots=True)
class _Workers:
    """What the pair's workers can take, of which the smaller counts."""

    model: str
    context_tokens: int
    pool_tokens: int
    kv_token_bytes: int
    kv_layers: int


async def measure(target: Target, plan: Plan, say: Callable[[str], None]) -> Profile:
    """Some minutes. Nobody else should ask meanwhile."""
    pair = await _Pair.found(target)
    workers = pair.workers
    longest = min(workers.context_tokens, workers.pool_tokens) // 2
    for tokens in (_FIRST_WORDS, *_WARM_UP):
        await pair.prompt(min(tokens, longest))
    prompts, overheads = [], []
    for tokens in sorted({min(tokens, longest) for tokens in plan.prompts}):
        seen = [await pair.prompt(tokens) for _ in range(plan.repeats)]
        prompts.append(_middle(seen))
        overheads += [one.overhead_s for one in seen]
        say(f"prompt of {prompts[-1].tokens:,} tokens: {prompts[-1].seconds * 1000:,.1f} ms")
    steps = []
    for batch, tokens in _step_plan(plan, workers):
        steps.append(await pair.step(batch, tokens))
        say(
            f"step of {batch}, {steps[-1].kv_tokens:,.0f} tokens of KV: "
            f"{steps[-1].seconds * 1000:,.1f} ms"
        )
    return Profile(
        model=workers.model,
        made=time.strftime("%Y-%m-%d"),
        kv_layers=workers.kv_layers,
        kv_token_bytes=workers.kv_token_bytes,
        kv_tokens=workers.pool_tokens,
        overhead_s=max(statistics.median(overheads), 0.0),
        prompts=tuple(prompts),
        steps=tuple(steps),
    )


def _step_plan(plan: Plan, workers: _Workers) -> list[tuple[int, int]]:
    """(batch, tokens a prompt), those that fit."""
    wanted = [(batch, plan.short_tokens) for batch in plan.batches]
    long_tokens = min(plan.long_tokens, workers.context_tokens // 4)
    if long_tokens >= 2 * plan.short_tokens:
        wanted += [(batch, long_tokens) for batch in plan.long_batches]
    room = workers.pool_tokens * _MOST_SHARE
    return [(batch, tokens) for batch, tokens in wanted if batch * tokens * 2 <= room]


@dataclass(frozen=True, slots=True)
class _Seen:
    tokens: int
    seconds: float
    exposed_s: float | None
    overhead_s: float


def _middle(seen: Sequence[_Seen]) -> Prompt:
    exposed = [one.exposed_s for one in seen if one.exposed_s is not None]
    return Prompt(
        round(statistics.median(one.tokens for one in seen)),
        statistics.median(one.seconds for one in seen),
        statistics.median(exposed) if exposed else None,
    )


@dataclass(slots=True)
class _Sequence:
    """One that decodes. `counts`: (when, tokens so far)."""

    counts: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.counts[-1][1] if self.counts else 0

    def at(self, moment: float) -> int:
        """Tokens that were out."""
        return max((count for when, count in self.counts if when <= moment), default=0)


class _Pair:
    """The cluster that is asked."""

    def __init__(self, target: Target, workers: _Workers) -> None:
        self._target = target
        self._word_tokens = 1.0  # until a prompt has told
        self.workers = workers

    @classmethod
    async def found(cls, target: Target) -> "_Pair":
        state = await _admin(target.admins[0], "/debug/state")
        workers = (await _admin(target.admins[0], "/debug/workers"))["workers"]
        usable = [one for one in workers if one["usable"]]
        roles = sorted(one["role"] for one in usable)
        if roles not in (["both"], ["decode", "prefill"]):
            raise NotProfiled(
                f"usable are {', '.join(roles) or 'none'}: one prefill and one decode worker, or "
                "one that does both, are needed; several would share what is asked"
            )
        return cls(
            target,
            _Workers(
                str(state["model"]),
                min(one["max_model_tokens"] for one in usable),
                min(one["pool_tokens"] for one in usable),
                round(max(one["kv_token_bytes"] for one in usable)),
                max(one["kv_layers"] for one in usable),
            ),
        )

    async def prompt(self, tokens: int) -> _Seen:
        """One prompt, computed alone, and a second token, for which its KV has to arrive."""
        reply_id = ""
        async with aclosing(self._ask(tokens, 2)) as answer:
            async for event in answer:
                reply_id = str(event["id"])
        line = await self._timeline(reply_id)
        self._word_tokens *= line["prompt_tokens"] / tokens
        waits_s = line["queue_s"] + line["grant_wait_s"] + line["prefill_queue_s"]
        computed = line["prompt_tokens"] - line["cached_tokens"]
        return _Seen(
            computed,
            line["prefill_s"],
            line["exposed_s"] if line["transport"] else None,
            line["ttft_s"] - line["prefill_s"] - waits_s,
        )

    async def step(self, batch: int, prompt_tokens: int) -> Step:
        """Sequences that decode together, until each has put out enough meanwhile."""
        sequences = [_Sequence() for _ in range(batch)]
        changed = asyncio.Event()
        tasks = [
            asyncio.create_task(self._follow(one, prompt_tokens, changed)) for one in sequences
        ]
        try:
            async with asyncio.timeout(_ANSWER_S):
                await _until(changed, tasks, lambda: all(one.tokens > 1 for one in sequences))
                began = time.perf_counter()
                start = [one.tokens for one in sequences]
                wanted = [count + _SEEN_TOKENS for count in start]
                await _until(
                    changed,
                    tasks,
                    lambda: all(
                        one.tokens >= due for one, due in zip(sequences, wanted, strict=True)
                    ),
                )
                ended = time.perf_counter()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        made = sum(one.at(ended) for one in sequences) - sum(start)
        middle = began + (ended - began) / 2
        kv_tokens = sum(one.prompt_tokens + one.at(middle) for one in sequences)
        return Step(batch, float(kv_tokens), (ended - began) * batch / made)

    async def _follow(self, one: _Sequence, tokens: int, changed: asyncio.Event) -> None:
        room = min(self.workers.context_tokens, self.workers.pool_tokens)
        room -= round(tokens * _PROMPT_MARGIN)
        count = 0
        async with aclosing(self._ask(tokens, room)) as answer:
            async for event in answer:
                usage = event.get("usage")
                if usage:
                    one.prompt_tokens = usage["prompt_tokens"]
                    count = usage["completion_tokens"]
                one.counts.append((time.perf_counter(), count))
                changed.set()

    def _ask(self, prompt_tokens: int, tokens: int) -> Any:
        """A prompt of about so many tokens that nobody has sent before."""
        words = max(round(prompt_tokens / self._word_tokens), 1)
        some = _TEXT.split()
        text = " ".join(some[i % len(some)] for i in range(words))
        body = {
            "model": self.workers.model,
            "prompt": f"{secrets.token_hex(4)} {text}",
            "max_tokens": max(tokens, 2),
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        target = self._target
        return events(*target.api, _PATH, body, timeout_s=_ANSWER_S, key=target.key)

    async def _timeline(self, reply_id: str) -> dict[str, Any]:
        """A router writes it down when the request has ended on its side too."""
        async with asyncio.timeout(_ADMIN_S):
            while True:
                for place in self._target.admins:
                    found = await _admin(place, f"/debug/requests?id={reply_id}")
                    for request in found["requests"]:
                        return dict(request["timelines"][0])
                await asyncio.sleep(0.02)


async def _until(
    changed: asyncio.Event, tasks: Sequence[asyncio.Task[None]], condition: Callable[[], bool]
) -> None:
    """Raises what a sequence failed with. One that has ended is too short to be measured."""
    while not condition():
        for task in tasks:
            if task.done():
                task.result()
                raise NotProfiled("an answer ended while it was measured: the context is too short")
        changed.clear()
        waiting = asyncio.create_task(changed.wait())
        await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()


async def _admin(place: Place, path: str) -> dict[str, Any]:
    try:
        answer = await httpget.get(*place, path, timeout_s=_ADMIN_S, max_bytes=1 << 24)
        found = json.loads(answer.body)
    except (httpget.GetFailed, ValueError) as error:
        raise NotProfiled(f"{place[0]}:{place[1]}{path}: {error}") from None
    if not answer.ok or not isinstance(found, dict):
        raise NotProfiled(f"{place[0]}:{place[1]}{path}: status {answer.status}")
    return found
