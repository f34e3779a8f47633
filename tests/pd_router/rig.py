"""A router's workers and sessions over real gRPC, with fake workers, and a recording sink."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pd_core.failures import Failure
from pd_proto.tls import Certificates
from pd_router.admission import Admission, AdmissionConfig
from pd_router.moves import WalkConfig
from pd_router.routing import Routing
from pd_router.session import RunningGeneration, Sessions
from pd_router.types import FinishReason, GenerateRequest, Sampling, Timeline
from pd_router.workers import Workers, WorkersConfig
from tests.pd_router.fake_worker import MODEL, FakeKv, FakeWorker, model_token

WAIT_S = 10.0
_ids = itertools.count(1)


async def until(condition: Callable[[], Any], what: str = "the condition") -> None:
    """Polls something that has no event of its own, within WAIT_S."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} did not come true within {WAIT_S} s") from None


class Recorder:
    """A sink that checks its contract while it records."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.logprobs: list[tuple[float | None, tuple[tuple[int, float], ...]]] = []
        self.failure: Failure | None = None
        self.done = False
        self.ended = asyncio.Event()
        self.progress = asyncio.Event()

    def on_token(
        self,
        choice: int,
        index: int,
        token: int,
        finish: FinishReason | None,
        logprob: float | None,
        top: tuple[tuple[int, float], ...],
    ) -> None:
        assert not self.ended.is_set(), "a token after the end"
        out = self.tokens.setdefault(choice, [])
        assert index == len(out), f"choice {choice}: index {index} after {len(out)} tokens"
        assert choice not in self.finish, "a token after the finish"
        out.append(token)
        self.logprobs.append((logprob, top))
        if finish is not None:
            self.finish[choice] = finish
        self.progress.set()

    def on_done(self) -> None:
        assert not self.ended.is_set(), "two ends"
        self.done = True
        self.ended.set()

    def on_failed(self, failure: Failure) -> None:
        assert not self.ended.is_set(), "two ends"
        self.failure = failure
        self.ended.set()

    async def wait(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.ended.wait()

    async def first_token(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.progress.wait()

    def assert_right(self, request: GenerateRequest) -> None:
        """Every choice has the model's tokens up to max_tokens."""
        assert self.failure is None, self.failure
        assert self.done
        for choice in range(request.choices):
            expected = [
                model_token(request.token_ids, choice, index)
                for index in range(request.sampling.max_tokens)
            ]
            assert self.tokens[choice] == expected


@dataclass
class Hooks:
    """Counts what sessions tell."""

    retries: list[Failure] = field(default_factory=list)
    hedges: list[bool] = field(default_factory=list)  # whether each was first
    ends: list[tuple[Timeline, Failure | None]] = field(default_factory=list)
    arrivals: list[GenerateRequest] = field(default_factory=list)

    def on_arrival(self, request: GenerateRequest) -> None:
        self.arrivals.append(request)

    def on_retry(self, failure: Failure) -> None:
        self.retries.append(failure)

    def on_hedge(self, *, won: bool) -> None:
        self.hedges.append(won)

    def on_end(self, timeline: Timeline, failure: Failure | None) -> None:
        self.ends.append((timeline, failure))


@dataclass
class Rig:
    workers: Workers
    sessions: Sessions
    hooks: Hooks
    control: str
    kv: FakeKv = field(default_factory=FakeKv)
    fakes: list[FakeWorker] = field(default_factory=list)

    async def add(self, role: str, name: str, *, port: int = 0, **options: Any) -> FakeWorker:
        """Starts a worker and waits until it is usable."""
        fake = await self.join(role, name, port=port, **options)
        await until(lambda: self.usable(fake), f"{name} is usable")
        return fake

    async def join(self, role: str, name: str, *, port: int = 0, **options: Any) -> FakeWorker:
        fake = FakeWorker(role, name, self.kv, **options)
        self.fakes.append(fake)
        return await fake.start(self.control, port)

    def usable(self, fake: FakeWorker) -> bool:
        return any(v.usable and v.id.epoch == fake.epoch for v in self.workers.views())

    def start(self, **options: Any) -> tuple[GenerateRequest, Recorder, RunningGeneration]:
        request, sink = ask(**options), Recorder()
        return request, sink, self.sessions.start(request, sink)

    async def complete(self, **options: Any) -> Timeline:
        """Runs a request to its right end."""
        request, sink, generation = self.start(**options)
        await sink.wait()
        sink.assert_right(request)
        return generation.timeline

    async def nothing_held(self) -> None:
        """All that was opened is closed, at both ends."""
        await until(lambda: all(fake.held == 0 for fake in self.fakes), "workers hold nothing")
        assert self.sessions.counts().running == 0
        assert all(entry["requests"] == 0 for entry in self.workers.snapshot())
        for view in self.workers.views():
            assert view.own_tokens == 0


def ask(
    prompt: tuple[int, ...] = tuple(range(1, 11)),
    max_tokens: int = 8,
    choices: int = 1,
    deadline_s: float = 30.0,
    **options: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"request-{next(_ids)}",
        token_ids=prompt,
        choices=choices,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
        deadline_s=deadline_s,
        **options,
    )


@asynccontextmanager
async def rig(
    walk: WalkConfig | None = None,
    admission: AdmissionConfig | None = None,
    certificates: Certificates | None = None,
    routing: Routing | None = None,
    **config: Any,
) -> AsyncIterator[Rig]:
    """A router without its HTTP side."""
    options = {"heartbeat_s": 0.1, "lapse_s": 0.6, "check_s": 0.05, "late_s": 0.5} | config
    workers = Workers(WorkersConfig(model=MODEL, router="router-0", **options), certificates)
    port = await workers.start("127.0.0.1", 0)
    hooks = Hooks()
    sessions = Sessions(workers, Admission(admission), walk, hooks, routing)
    made = Rig(workers, sessions, hooks, f"127.0.0.1:{port}")
    try:
        yield made
    finally:
        for fake in made.fakes:
            fake.thaw()
            await fake.die()
        sessions.close()
        await workers.close()
