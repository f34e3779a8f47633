"""The real scheduler over the real runner with the tiny model, without sockets."""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from pd_engine.blocks import BlockPool
from pd_engine.guide import Guides
from pd_engine.runner import Runner
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.sequence import Sequence as Chain
from pd_engine.speculate import Drafter, ModelGuesses, PromptLookup
from pd_engine.types import (
    Granted,
    Mode,
    Prefilled,
    Request,
    RequestKey,
    Sampling,
    SchedulerEvent,
    TokenOut,
    Tokens,
)
from tests.tiny_model import tiny_model_dir

_BLOCK_TOKENS = 16
PROMPT = [5, 9, 200, 9, 31, 77, 9, 5, 140, 12, 12, 480, 7, 9, 5, 33, 18, 9]


class Counting(Scheduler):
    """Says how often it has preempted."""

    preempted = 0

    def _preempt(self, seq: Chain) -> None:
        self.preempted += 1
        super()._preempt(seq)


class Worker:
    """What it was given to write lies in `out`."""

    def __init__(
        self,
        draft_tokens: int = 0,
        guides: Guides | None = None,
        folder: Path | None = None,
        prompt: Sequence[int] = PROMPT,
        chunk_tokens: int = 7,
        blocks: int = 128,
        dtype: str = "float32",
        block_tokens: int = _BLOCK_TOKENS,
        draft_model: Path | None = None,
        making: float = 0.01,
    ) -> None:
        self.runner = Runner(
            folder or tiny_model_dir(),
            dtype=dtype,
            block_tokens=block_tokens,
            kv_cache_tokens=blocks * block_tokens,
            draft_model_dir=draft_model or "",
        )
        config = SchedulerConfig(
            max_batch_tokens=64,
            chunk_tokens=chunk_tokens,
            max_running=16,
            max_queued=16,
            max_model_tokens=1000,
            recompute_max_tokens=1000,
            decode_reserve_tokens=block_tokens,
            draft_tokens=draft_tokens,
            draft_price=0.01,
        )
        pool = BlockPool(self.runner.num_blocks, block_tokens)
        drafter: Callable[[list[int]], Drafter] = PromptLookup
        if draft_model:
            drafter = partial(ModelGuesses, making=making)
        self.scheduler = Counting(config, pool, drafter)
        self._guides = guides
        self.out: dict[RequestKey, list[TokenOut]] = {}
        self.grants: dict[RequestKey, Granted] = {}
        self.drafted = self.guessed = self.last_cached_tokens = self.steps = 0
        self._prompt = tuple(prompt)
        self._added = 0

    def add(
        self,
        sampling: Sampling,
        written: Sequence[int] = (),
        mode: Mode = Mode.LOCAL,
        choices: tuple[int, ...] = (0,),
        prompt: Sequence[int] = (),
    ) -> RequestKey:
        self._added += 1
        key = (1, self._added)
        asked = tuple(prompt) or self._prompt
        tokens = (*asked, *written)
        guide = None
        if self._guides is not None and sampling.grammar:
            guide = asyncio.run(self._guides.make(sampling.grammar))
        self.scheduler.add(
            Request(key, "r", 1, tokens, len(asked), choices, sampling, mode, math.inf, math.inf),
            0.0,
            guide=guide,
        )
        self.out[key] = []
        return key

    def run(self) -> None:
        """Until nothing is left to compute."""
        self._see(self.scheduler.poll(0.0))
        while (batch := self.scheduler.schedule(0.0)) is not None:
            self.steps += 1
            self.drafted += sum(row.drafts for row in batch.rows)
            self._see(self.scheduler.absorb(batch, self.runner.step(batch), 0.0))
            self._see(self.scheduler.poll(0.0))

    def _see(self, events: Sequence[SchedulerEvent]) -> None:
        for event in events:
            match event:
                case Prefilled(first=outs) | Tokens(tokens=outs):
                    self.out[event.key] += outs
                    self.guessed += event.guessed if isinstance(event, Tokens) else 0
            match event:
                case Prefilled(cached_tokens=cached):
                    self.last_cached_tokens = cached
                case Granted():
                    self.grants[event.key] = event

    def tokens(self, key: RequestKey, choice: int = 0) -> list[int]:
        return [out.token for out in self.out[key] if out.choice == choice]

    def write(self, sampling: Sampling, written: Sequence[int] = ()) -> list[int]:
        key = self.add(sampling, written)
        self.run()
        return self.tokens(key)


def write_the_same(plain: Worker, guessing: Worker, sampling: Sampling) -> list[TokenOut]:
    """Both write, and nothing of it differs; returns it."""
    a, b = plain.add(sampling), guessing.add(sampling)
    plain.run()
    guessing.run()
    assert [(t.token, t.finish, t.index) for t in plain.out[a]] == [
        (t.token, t.finish, t.index) for t in guessing.out[b]
    ]
    for one, other in zip(plain.out[a], guessing.out[b], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t for t, _ in one.top] == [t for t, _ in other.top]
    return plain.out[a]


def handed_over(
    prefill: Worker, decode: Worker, sampling: Sampling, written: Sequence[int] = ()
) -> list[int]:
    """The tokens of a request whose first one the prefill worker draws."""
    exported = prefill.add(sampling, written, Mode.EXPORT)
    imported = decode.add(sampling, written, Mode.IMPORT)
    prefill.run()
    decode.run()
    source, target = prefill.scheduler._held.exports[exported], decode.grants[imported].block_ids
    size = prefill.runner.layout.block_bytes
    for a, b in zip(source, target, strict=True):
        kv = prefill.runner.kv_buffer[a * size : (a + 1) * size]
        decode.runner.kv_buffer[b * size : (b + 1) * size] = kv
    first = tuple(prefill.out[exported])
    assert len(first) == 1
    decode.scheduler.attach(imported, first, 0.0)
    decode.run()
    return [*prefill.tokens(exported), *decode.tokens(imported)]
