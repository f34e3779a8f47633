"""The client port's application: routes, and a request's life from body to last byte.

Body -> `openai` checks it -> `text` makes tokens -> `answer.Run` starts it on the workers
-> text goes out. It ends in an answer or in one typed failure.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_router import openapi, tokens
from pd_router.answer import Run
from pd_router.classes import NO_PROMISES, Promises
from pd_router.errors import ApiError, invalid
from pd_router.exchange import Exchange, Receive, Scope, Send
from pd_router.journal import Journal, Record
from pd_router.keys import Keyring
from pd_router.metrics import Metrics
from pd_router.openai import Ask, parse_chat, parse_completion
from pd_router.prepare import sampling_for, tokenize
from pd_router.replies import DONE, Replies
from pd_router.text import TextStack
from pd_router.texts import Texts
from pd_router.types import SessionsApi, WorkersApi
from pd_router.who import who

log = logging.getLogger("pd_router.app")

_MIB = 1024 * 1024
# Workers keep a request's deadline. Where all of them fail to, the router does, later.
_DEADLINE_MARGIN_S = 5.0
# How long a client may take to read that its request failed.
_LAST_WORDS_S = 5.0
TRACE_HEADER = b"x-pdcluster-trace"
_LEAST_S = 0.001
_TRACED_PROMPTS = 4
_TRACED_CANDIDATES = 8
MAX_TOKENIZING = 64
MAX_HELD = 1024  # their bodies are in memory
_GENERATING: dict[str, Callable[[bytes], Ask]] = {
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
}


@dataclass(frozen=True, slots=True)
class AppSettings:
    """What the client port promises. Bytes and seconds."""

    model: str
    max_body_bytes: int = 8 * _MIB
    request_timeout_s: float = 600.0
    bundle_wait_s: float = 30.0
    hold_s: float = 0.0  # for a worker to come, where one is started for those who wait
    max_requests: int = 4096
    allow_trace: bool = False
    class_header: bool = False
    promises: Promises = NO_PROMISES


class RouterApp:
    """The ASGI application of the client port. Made in the event loop."""

    def __init__(
        self,
        settings: AppSettings,
        workers: WorkersApi,
        sessions: SessionsApi,
        texts: Texts,
        metrics: Metrics,
        journal: Journal,
        keyring: Keyring | None = None,
    ) -> None:
        """Without a keyring everybody may ask."""
        self._settings = settings
        self._keyring = keyring
        self._workers = workers
        self._sessions = sessions
        self._texts = texts
        self._metrics = metrics
        self._journal = journal
        self._created = int(time.time())
        self._running: set[_Stop] = set()
        self._draining = False
        self._closed = False
        self._arrived = 0
        self._tokenizing = 0
        self._held = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, closes=lambda: self._draining)
        if exchange.path in _GENERATING:
            record = Record(exchange.path, exchange.request_id, time.monotonic())
            with self._journal.keeping(record, exchange):
                await self._guarded(exchange, self._admit(exchange, record), record)
        else:
            await self._guarded(exchange, self._route(exchange), None)

    async def _guarded(self, exchange: Exchange, work: Any, record: Record | None) -> None:
        """Whatever happens, the client gets an answer of ours."""
        try:
            await work
            return
        except ApiError as error:
            answer = error
        except RequestFailure as error:
            answer = ApiError.of(error.failure)
        except Exception:
            log.exception("request=%s path=%.100r unexpected", exchange.request_id, exchange.path)
            answer = ApiError.of(Failure(FailureKind.INTERNAL, "The router failed; see its log."))
        if record is not None:
            record.failure = answer.failure
        await _answer_error(exchange, answer)

    # ---- drain ------------------------------------------------------------------------

    def drain(self) -> None:
        """From now on each answer ends its connection, so that clients go elsewhere.

        What they still send here is served: a node may learn late that this router goes,
        and where it was the only one, its successor may not be ready yet.
        """
        self._draining = True

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    async def wait_quiet(self, quiet_s: float) -> None:
        """Until all that ran has ended and nothing new came for a while."""
        arrived = -1
        while self._running or arrived != self._arrived:
            arrived = self._arrived
            await self._idle.wait()
            await asyncio.sleep(quiet_s)

    def fail_running(self) -> None:
        """Takes nothing more; ends what still runs, each with a typed failure."""
        self._closed = True
        failure = Failure(FailureKind.DRAINING, "The router is shutting down.")
        for stop in list(self._running):
            stop.now(failure)

    # ---- small routes -----------------------------------------------------------------

    async def _route(self, exchange: Exchange) -> None:
        path = exchange.path
        if path not in ("/health", "/ready"):
            self._check_key(exchange)
        if path in ("/tokenize", "/detokenize"):
            await self._tokens(exchange)
            return
        known = ("/health", "/ready", "/v1/models", openapi.PATH)
        if path not in known and not path.startswith("/v1/models/"):
            where = f"{exchange.method} {path[:200]}"
            raise ApiError(404, f"Unknown request URL: {where}.", code="unknown_url")
        exchange.allow("GET", "HEAD")
        if path == "/health":
            await exchange.reply(200, b'{"status":"ok"}')
        elif path == "/ready":
            if not self._workers.ready():
                raise RequestFailure(FailureKind.NO_WORKERS, "No usable pair of workers is there.")
            await exchange.reply(200, b'{"status":"ready"}')
        elif path == openapi.PATH:
            keyed = self._keyring is not None
            await exchange.reply(200, openapi.document(self._settings.model, keyed))
        else:
            model = self._model()
            if path == "/v1/models":
                answer = {"object": "list", "data": [model]}
            else:
                self._check_model(path.removeprefix("/v1/models/"))
                answer = model
            await exchange.reply(200, msgspec.json.encode(answer))

    def _check_key(self, exchange: Exchange) -> None:
        if self._keyring is not None:
            exchange.client = self._keyring.client(exchange.header(b"authorization"))

    async def _tokens(self, exchange: Exchange) -> None:
        """Text to tokens, or back, without any worker."""
        exchange.allow("POST")
        if self._tokenizing >= MAX_TOKENIZING:
            message = f"{self._tokenizing} requests of this kind are running."
            raise RequestFailure(FailureKind.OVERLOADED, message)
        self._tokenizing += 1
        try:
            body = await exchange.read_body(self._settings.max_body_bytes)
            stack = self._texts.current or await self._texts.get(self._settings.bundle_wait_s)
            if exchange.path == "/detokenize":
                answer = tokens.detokenize(body, stack, self._check_model)
            else:
                limits = self._workers.limits()
                context = limits.context_tokens if limits else None
                answer = await tokens.tokenize(
                    body, stack, self._texts.side_pool, context, self._check_model
                )
        finally:
            self._tokenizing -= 1
        await exchange.reply(200, msgspec.json.encode(answer))

    def _model(self) -> dict[str, Any]:
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "pdcluster",
        }
        limits = self._workers.limits()
        return model if limits is None else model | {"max_model_len": limits.context_tokens}

    def _check_model(self, name: str) -> None:
        if name != self._settings.model:
            message = (
                f"The model {name[:200]!r} does not exist; "
                f"this server has {self._settings.model!r}."
            )
            raise ApiError.of(Failure(FailureKind.MODEL_NOT_FOUND, message), "model")

    # ---- generating -------------------------------------------------------------------

    async def _admit(self, exchange: Exchange, record: Record) -> None:
        self._check_key(exchange)
        exchange.allow("POST")
        self._arrived += 1
        if self._closed:
            raise RequestFailure(FailureKind.DRAINING, "The router is shutting down; try again.")
        if len(self._running) >= self._settings.max_requests and not exchange.make_room():
            self._metrics.turned_away()
            message = f"{len(self._running)} requests are running, no more are taken."
            raise RequestFailure(FailureKind.OVERLOADED, message)
        stop = _Stop()
        self._running.add(stop)
        self._idle.clear()
        self._metrics.running.set(len(self._running))
        try:
            with stop.applying():
                await self._generate(exchange, record, stop)
        finally:
            self._running.discard(stop)
            self._metrics.running.set(len(self._running))
            if not self._running:
                self._idle.set()

    async def _generate(self, exchange: Exchange, record: Record, stop: "_Stop") -> None:
        body = await exchange.read_body(self._settings.max_body_bytes)
        ask = record.ask = _GENERATING[exchange.path](body)
        del body
        self._check_model(ask.model)
        exchange.when_gone(partial(_client_gone, exchange, stop))
        left_s = self._left(record) + _DEADLINE_MARGIN_S
        timer = asyncio.get_running_loop().call_later(left_s, self._too_late, stop)
        try:
            await self._run(exchange, ask, record)
        finally:
            timer.cancel()
            exchange.when_gone(None)
            if record.run is not None:
                record.run.cancel()

    def _too_late(self, stop: "_Stop") -> None:
        message = f"The request took longer than {self._settings.request_timeout_s:.0f} s."
        stop.now(Failure(FailureKind.DEADLINE, message))

    async def _run(self, exchange: Exchange, ask: Ask, record: Record) -> None:
        if ask.stream and exchange.http_version == "1.0":
            raise invalid("stream", "Streaming needs HTTP/1.1; this request came by HTTP/1.0.")
        asker = who(
            exchange, ask, self._settings.promises, class_header=self._settings.class_header
        )
        record.sla = self._settings.promises.label(asker.sla)
        stack = self._texts.current
        if stack is None or (self._settings.hold_s and self._workers.limits() is None):
            stack = await self._hold(record)
        await self._workers.settled()
        limits = self._workers.limits()
        started = time.monotonic()
        prompts = await tokenize(ask, stack, limits, self._texts.pool)
        record.tokenize_s = time.monotonic() - started
        samplings = [sampling_for(ask, stack, ids, limits) for ids in prompts]
        if self._settings.hold_s and self._workers.limits() is None:
            await self._hold(record)  # the worker that came has gone again, or takes one at a time
        run = record.run = Run(ask, stack, prompts, self._metrics, record.accepted, record.sla)
        run.inbox.on_gone = exchange.abort
        record.reply_id = f"{'chatcmpl' if ask.kind == 'chat' else 'cmpl'}-{exchange.own_id}"
        if self._settings.allow_trace and exchange.header(TRACE_HEADER) is not None:
            exchange.more_headers = lambda: _trace(run)
        run.start(self._sessions, record.reply_id, samplings, self._left(record), asker)
        replies = Replies(ask, record.reply_id, int(time.time()))
        if ask.stream:
            await _stream(exchange, ask, run, replies)
        else:
            while not run.done:
                await run.step()
            await exchange.reply(200, replies.body(run.whole(), run.usage(), prompts))

    async def _hold(self, record: Record) -> TextStack:
        """Waits for the model's tokenizer and, where workers are started for those who wait,
        for one that decodes: nobody is refused because a pool has gone to zero."""
        if self._held >= MAX_HELD:
            message = f"{self._held} requests wait for the first worker, no more are held."
            raise RequestFailure(FailureKind.NO_WORKERS, message)
        hold_s = self._settings.hold_s
        if hold_s:  # once more is no longer
            elapsed_s = time.monotonic() - record.accepted
            hold_s = max(min(hold_s - elapsed_s, self._left(record)), _LEAST_S)
        self._held += 1
        try:
            with self._metrics.holding():
                async with asyncio.timeout(hold_s or None):
                    stack = await self._texts.get(hold_s or self._settings.bundle_wait_s)
                    if hold_s:
                        await self._workers.decoding()
        except TimeoutError:
            message = f"No worker has come within {self._settings.hold_s:.0f} s."
            raise RequestFailure(FailureKind.NO_WORKERS, message) from None
        finally:
            self._held -= 1
        return stack

    def _left(self, record: Record) -> float:
        """Seconds until the request's deadline."""
        elapsed = time.monotonic() - record.accepted
        return max(self._settings.request_timeout_s - elapsed, 0.0)


def _trace(run: Run) -> list[tuple[bytes, bytes]]:
    """Why these workers, of each prompt: candidates with their predictions, and the reason."""
    timelines = run.timelines()[:_TRACED_PROMPTS]
    traces = [
        {
            "prefill": timeline.prefill_worker,
            "decode": timeline.decode_worker,
            "attempts": timeline.attempts,
            "reason": timeline.reason,
            "considered": [one.document() for one in timeline.considered[:_TRACED_CANDIDATES]],
        }
        for timeline in timelines
    ]
    return [(TRACE_HEADER, msgspec.json.encode(traces))]


async def _stream(exchange: Exchange, ask: Ask, run: Run, replies: Replies) -> None:
    """Sends what there is after each step. Nothing goes out before there is text."""
    while True:
        parts = run.take_parts()
        usage = run.usage() if parts and ask.usage_in_each_chunk else None
        events = b"".join([replies.chunk(part, usage) for part in parts])
        if run.done:
            break
        if events:
            first = not exchange.status
            await exchange.stream(events)
            if first:
                run.pass_on(replies, exchange.pipe())
        await run.step()
    if ask.include_usage:
        events += replies.usage_chunk(run.usage())
    await exchange.end_stream(events + DONE)


class _Stop:
    """Ends what the current task does, at whatever it waits, with a failure."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._failure: Failure | None = None
        self._applies = False

    def now(self, failure: Failure) -> None:
        if self._applies and self._failure is None and self._task is not None:
            self._failure = failure
            self._task.cancel()

    @contextmanager
    def applying(self) -> Iterator[None]:
        self._applies = True
        try:
            yield
        except asyncio.CancelledError:
            failure, task = self._failure, self._task
            if failure is None or task is None or task.uncancel() > 0:
                raise  # somebody else cancelled
            raise RequestFailure(failure.kind, failure.message) from None
        finally:
            self._applies = False


def _client_gone(exchange: Exchange, stop: _Stop) -> None:
    if not exchange.complete:
        stop.now(Failure(FailureKind.CLIENT_GONE, exchange.why_gone))


async def _answer_error(exchange: Exchange, error: ApiError) -> None:
    """The last thing that a client hears; one that doesn't listen is cut off."""
    if error.failure.kind is FailureKind.CLIENT_GONE:
        exchange.status = exchange.status or error.status
        return
    if exchange.complete:
        return
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            if exchange.status:
                await exchange.end_stream(error.event())
            else:
                await exchange.reply_error(error)
    except TimeoutError:
        exchange.abort()
