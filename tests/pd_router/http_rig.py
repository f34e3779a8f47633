"""A router's HTTP side on real sockets, with workers and sessions that a test plays."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import uvloop
from openai import AsyncOpenAI

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_router.admin import AdminApp
from pd_router.app import AppSettings, RouterApp
from pd_router.http import HttpServer, bind
from pd_router.journal import Journal, Spans
from pd_router.keys import Keyring
from pd_router.metrics import Metrics
from pd_router.page import LivePage
from pd_router.settings import Address
from pd_router.texts import Texts
from pd_router.types import (
    Bundle,
    FinishReason,
    GenerateRequest,
    Limits,
    Sink,
    Timeline,
)
from tests.tiny_model import CHAT_TEMPLATE, EOS, tiny_model_dir

MODEL = "tiny"
DEADLINE_S = 30.0
T = TypeVar("T")


def go(work: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
    """Runs a scenario in a loop of the kind that the router runs in."""

    async def bounded() -> T:
        async with asyncio.timeout(deadline_s):
            return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


def tiny_bundle(**changes: Any) -> Bundle:
    fields: dict[str, Any] = {
        "bundle_hash": "tiny",
        "tokenizer_json": (tiny_model_dir() / "tokenizer.json").read_bytes(),
        "chat_template": CHAT_TEMPLATE,
        "special_tokens": {"bos_token": "<|im_start|>", "eos_token": EOS},
        "eos_token_ids": (2,),
        "vocab_size": 512,
    }
    return Bundle(**fields | changes)


def worker(name: str, role: str, **changes: Any) -> dict[str, Any]:
    """One of Workers.snapshot(), as far as pages read it."""
    load = dict.fromkeys(("queued", "running", "waiting_grants", "kv_blocks"), 0)
    known = {
        "worker": name, "role": role, "revision": "r", "usable": True, "why_unusable": None,
        "pending_tokens": 0, "kv_used": 0, "load": load | {"step_s": 0.0},
    }  # fmt: skip
    return known | changes


class PlayedWorkers:
    """types.WorkersApi as a test wants it."""

    def __init__(self, bundle: Bundle | None) -> None:
        self.is_ready = True
        self.is_expecting = True
        self.current = bundle
        self.given_limits: Limits | None = Limits(context_tokens=2048, pool_tokens=4096)
        self._callbacks: list[Callable[[Bundle], None]] = []
        self.settling = asyncio.Event()
        self.settling.set()
        self.came = asyncio.Event()

    def ready(self) -> bool:
        return self.is_ready

    def expecting(self) -> bool:
        return self.is_expecting

    async def settled(self) -> None:
        await self.settling.wait()

    async def decoding(self) -> None:
        await self.came.wait()

    def bundle(self) -> Bundle | None:
        return self.current

    def on_bundle(self, callback: Callable[[Bundle], None]) -> None:
        self._callbacks.append(callback)

    def bring(self, bundle: Bundle) -> None:
        self.current = bundle
        for callback in self._callbacks:
            callback(bundle)

    def limits(self) -> Limits | None:
        return self.given_limits

    def snapshot(self) -> list[dict[str, Any]]:
        return [worker("p-0", "prefill")]

    def signals(self) -> list[dict[str, Any]]:
        return [{"worker": "p-0", "epoch": "e", "running": 3}]


@dataclass
class PlayedGeneration:
    """types.Generation; the test (or the sessions' script) emits its tokens."""

    request: GenerateRequest
    sink: Sink
    timeline: Timeline
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    _next: dict[int, int] = field(default_factory=dict)

    def cancel(self) -> None:
        if not self.ended:
            self.ended = True
            self.cancelled.set()

    def emit(
        self,
        token: int,
        finish: FinishReason | None = None,
        *,
        choice: int = 0,
        logprob: float | None = None,
        top: tuple[tuple[int, float], ...] = (),
    ) -> None:
        if self.ended:
            return
        index = self._next.get(choice, 0)
        self._next[choice] = index + 1
        self.sink.on_token(choice, index, token, finish, logprob, top)

    def done(self) -> None:
        if not self.ended:
            self.ended = True
            self.sink.on_done()

    def fail(self, kind: FailureKind, message: str = "it broke") -> None:
        if not self.ended:
            self.ended = True
            self.sink.on_failed(Failure(kind, message))


Script = Callable[[PlayedGeneration], Awaitable[None]]


class PlayedSessions:
    """types.SessionsApi: runs the script for each request, or leaves it to the test."""

    def __init__(self) -> None:
        self.script: Script | None = None
        self.refusal: Failure | None = None
        self.refuse_from: int | None = None  # how many are started before it refuses
        self.bug: Exception | None = None
        self.started: list[PlayedGeneration] = []
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, request: GenerateRequest, sink: Sink) -> PlayedGeneration:
        if self.bug is not None:
            raise self.bug
        if self.refusal is not None:
            refusal = self.refusal
            raise RequestFailure(refusal.kind, refusal.message, refusal.retry_after_s)
        if self.refuse_from is not None and len(self.started) >= self.refuse_from:
            raise RequestFailure(FailureKind.OVERLOADED, "enough")
        loop = asyncio.get_running_loop()
        timeline = Timeline(request.request_id, loop.time(), len(request.token_ids))
        generation = PlayedGeneration(request, sink, timeline)
        self.started.append(generation)
        self._spawn(self._tell())
        if self.script is not None:
            self._spawn(self.script(generation))
        return generation

    async def generation(self, number: int = 0) -> PlayedGeneration:
        """The number-th that was started, once it is."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.started) > number)
        return self.started[number]

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def says(tokens: Sequence[int], finish: FinishReason = "stop") -> Script:
    """Emits the tokens in turn, a loop's round apart, then (for "stop") the end token."""
    whole = [*tokens, 2] if finish == "stop" else list(tokens)

    async def script(generation: PlayedGeneration) -> None:
        request = generation.request
        for number, token in enumerate(whole):
            last = number == len(whole) - 1
            for choice in range(request.choices):
                generation.emit(token, finish if last else None, choice=choice)
            await asyncio.sleep(0)
        generation.done()

    return script


@dataclass
class Rig:
    """What a test holds of a running router."""

    workers: PlayedWorkers
    sessions: PlayedSessions
    app: RouterApp
    texts: Texts
    metrics: Metrics
    journal: Journal
    http: Address
    admin: Address

    def tokens(self, text: str) -> list[int]:
        stack = self.texts.current
        assert stack is not None
        return list(stack.encode_now(text, add_special_tokens=False))

    def client(self, **options: Any) -> AsyncOpenAI:
        url = f"http://{self.http}/v1"
        return AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10, **options)


@asynccontextmanager
async def rig(
    *,
    bundle: Bundle | None = None,
    bundled: bool = True,
    keyring: Keyring | None = None,
    live_page: bool = True,
    spans: Spans | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A running router, with the tiny model's bundle unless another is given."""
    if bundled and bundle is None:
        bundle = tiny_bundle()
    workers, sessions = PlayedWorkers(bundle), PlayedSessions()
    texts, metrics = Texts(workers), Metrics(MODEL)
    journal = Journal(metrics, spans)
    app = RouterApp(
        AppSettings(model=MODEL, **settings),
        workers,
        sessions,
        texts,
        metrics,
        journal,
        keyring,
    )
    client = HttpServer(app, bind(Address("127.0.0.1", 0)))
    page = LivePage(app) if live_page else None
    told = (lambda: None) if keyring is None else (lambda: keyring.clients)
    pages = AdminApp("router-0", workers, metrics, journal, live_page=page, clients=told)
    admin = HttpServer(pages, bind(Address("127.0.0.1", 0)))
    try:
        async with admin.serving(), client.serving():
            if bundle is not None:
                await texts.get(10)
            yield Rig(
                workers, sessions, app, texts, metrics, journal, client.address, admin.address
            )
    finally:
        await texts.close()
