"""Runs requests: admission, then each request's walk, carried out over the workers' streams."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_proto.v1 import engine_pb2 as pb
from pd_router import wire
from pd_router.admission import UNKNOWN, Admission, Outlook, Ticket, Verdict, displaced_failure
from pd_router.costs import Need, outlook
from pd_router.fleet import Role, WorkerView
from pd_router.hedging import Hedging
from pd_router.hooks import MetricsHooks, NoHooks
from pd_router.moves import (
    Action,
    Blamed,
    CancelSide,
    CloseSide,
    Done,
    Fail,
    Hedged,
    OpenDecode,
    OpenPrefill,
    Placer,
    Retried,
    Side,
    Token,
    WalkConfig,
)
from pd_router.placing import RequestPlacer, first_need
from pd_router.pulling import Pulling
from pd_router.records import Promise, Work
from pd_router.routing import Chance, Routing
from pd_router.signals import Queued
from pd_router.types import GenerateRequest, Sink, Timeline
from pd_router.walk import GONE, Walk
from pd_router.workers import Workers

log = logging.getLogger("pd_router.session")

_LOOK_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class SessionCounts:
    running: int
    queued: int


class Sessions:
    """Starts requests (`types.SessionsApi`). Make it in the event loop."""

    def __init__(
        self,
        workers: Workers,
        admission: Admission | None = None,
        config: WalkConfig | None = None,
        hooks: MetricsHooks | None = None,
        routing: Routing | None = None,
        draw: Callable[[], int] = lambda: random.getrandbits(48),
    ) -> None:
        """`draw`: chance, for policies that need some."""
        self.workers = workers
        self.routing = routing or Routing()
        self.hedging = Hedging(self.routing.hedge)
        self._draw = draw
        self._choices = itertools.count()
        self._looking: asyncio.TimerHandle | None = None
        self.admission = admission or Admission()
        self.config = config or WalkConfig()
        self.hooks: MetricsHooks = hooks or NoHooks()
        self.loop = asyncio.get_running_loop()
        self._live: dict[str, RunningGeneration] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        workers.on_change(self._workers_changed)

    def start(self, request: GenerateRequest, sink: Sink) -> "RunningGeneration":
        """Raises RequestFailure when refused at once. Calls the sink only after returning."""
        self._refuse(request)
        placer = RequestPlacer(self.workers, self.routing, self.chance, request)
        ticket = self._ticket(request, placer)
        verdict = self.admission.offer(
            request.request_id,
            ticket=ticket,
            outlook=self._outlook(first_need(request)),
            now=time.monotonic(),
            routers=self.workers.routers,
        )
        if isinstance(verdict, Failure):
            raise RequestFailure(verdict.kind, verdict.message, verdict.retry_after_s)
        patience_s = self.admission.patience_s(ticket.sla)
        generation = RunningGeneration(self, request, sink, patience_s, placer)
        self._live[request.request_id] = generation
        self.hedging.in_flight = len(self._live)
        self._idle.clear()
        if verdict is Verdict.ADMITTED:
            self.loop.call_soon(generation.admitted)
        for key in self.admission.displaced():
            self._live[key].fail(displaced_failure())
        self._look_again()
        return generation

    def chance(self) -> Chance:
        """For one choice of workers."""
        return Chance(self._draw(), next(self._choices), self.workers.routers)

    def counts(self) -> SessionCounts:
        return SessionCounts(self.admission.running, self.admission.queued)

    def queued(self) -> Queued:
        """What waits in admission."""
        waiting = [one.request for one in self._live.values() if not one.started]
        return Queued(
            len(waiting),
            sum(len(request.token_ids) for request in waiting),
            sum(request.choices for request in waiting),
        )

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new; True when all that runs has ended in time."""
        self._stopping = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Fails whatever still runs."""
        self._stopping = True
        if self._looking is not None:
            self._looking.cancel()
        for generation in list(self._live.values()):
            generation.fail(Failure(FailureKind.DRAINING, "this router stops"))

    def ended(self, request_id: str, timeline: Timeline, failure: Failure | None) -> None:
        """A generation is over: its place goes to those who wait."""
        ended = self._live.pop(request_id, None)
        if ended is None:
            return
        self.admission.give_back(ended.request.tenant, ended.unused)
        self.hedging.in_flight = len(self._live)
        for admitted in self.admission.release(request_id):
            waiting = self._live.get(admitted)
            if waiting is not None:
                self.loop.call_soon(waiting.admitted)
        self._look_again()
        if not self._live:
            self._idle.set()
        self.hooks.on_end(timeline, failure)

    def _ticket(self, request: GenerateRequest, placer: RequestPlacer) -> Ticket:
        """What it is to admission. Raises for a class that there isn't."""
        promises = self.admission.config.promises
        sla = promises.named(request.sla)
        if sla is None:
            names = ", ".join(one.name for one in promises.classes)
            message = f"there is no class {request.sla!r}; there are {names}"
            raise RequestFailure(FailureKind.INVALID_REQUEST, message)
        prompt = len(request.token_ids)
        asked = prompt + request.sampling.max_tokens * request.choices
        # Without goals nobody asks how long computing takes: the prompt is weight enough.
        work = placer.uncached() if self.admission.holds_back else prompt
        return Ticket(
            *(request.request_id, sla, request.tenant, work, request.priority, asked),
            weight=promises.weight_of(request.tenant),
        )

    def tpot_s(self, sla: str | None) -> float | None:
        """What a class is promised; None for nothing."""
        named = self.admission.config.promises.named(sla)
        return None if named is None else named.tpot_s

    def _outlook(self, need: Need | None = None) -> Outlook:
        if not self.admission.holds_back:
            return UNKNOWN
        return Outlook(*outlook(self.workers.views(), need))

    def _look_again(self) -> None:
        """Requests are held back until the workers' queues are short: time changes that."""
        if self.admission.holds_back and self.admission.queued and self._looking is None:
            self._looking = self.loop.call_later(_LOOK_AGAIN_S, self._admit_more)

    def _admit_more(self) -> None:
        """One after the other: each makes the outlook worse for the next."""
        self._looking = None
        while admitted := self.admission.admit(self._outlook, time.monotonic(), at_most=1):
            self._live[admitted[0]].admitted()
        self._look_again()

    def _refuse(self, request: GenerateRequest) -> None:
        """Raises for what no worker could ever do, or cannot do now."""
        if self._stopping:
            raise RequestFailure(FailureKind.DRAINING, "this router stops: try again")
        if not request.token_ids or request.choices < 1 or request.sampling.max_tokens < 1:
            raise RequestFailure(
                FailureKind.INVALID_REQUEST,
                f"{len(request.token_ids)} prompt tokens, {request.choices} choices, "
                f"max_tokens = {request.sampling.max_tokens}: each must be at least 1",
            )
        if not request.deadline_s > 0:
            raise RequestFailure(FailureKind.DEADLINE, f"deadline_s = {request.deadline_s:g}")
        usable = [v for v in self.workers.views() if v.usable and v.role is not Role.PREFILL]
        if usable:
            _refuse_size(len(request.token_ids), usable)
        self.hooks.on_arrival(request)
        if not usable:
            raise RequestFailure(FailureKind.NO_WORKERS, "no decode worker is usable now")

    def _workers_changed(self) -> None:
        for generation in list(self._live.values()):
            generation.workers_changed()


def _refuse_size(prompt_tokens: int, usable: list[WorkerView]) -> None:
    """A prompt and one token must fit somewhere."""
    if any(view.holds(prompt_tokens) for view in usable):
        return
    context = max(view.max_model_tokens for view in usable)
    if prompt_tokens >= context:
        raise RequestFailure(
            FailureKind.CONTEXT_TOO_LONG,
            f"the prompt has {prompt_tokens} tokens; with at least one token of output it must "
            f"fit the model's context of {context} tokens: shorten it",
        )
    pool = max(view.pool_tokens for view in usable)
    raise RequestFailure(
        FailureKind.POOL_TOO_SMALL,
        f"the prompt has {prompt_tokens} tokens, but the workers' KV pools hold at most {pool}: "
        "shorten it, or give them larger ones",
    )


class RunningGeneration:
    """One request that runs (`types.Generation`)."""

    def __init__(
        self,
        sessions: Sessions,
        request: GenerateRequest,
        sink: Sink,
        patience_s: float,
        placer: Placer,
    ) -> None:
        """`patience_s`: how long it may wait in admission."""
        self._sessions = sessions
        self._request = request
        self._patience_s = patience_s
        self.sink: Sink | None = sink  # None: it has had its last word
        self._timeline = Timeline(
            request_id=request.request_id,
            accepted=time.monotonic(),
            prompt_tokens=len(request.token_ids),
            choices=request.choices,
        )
        self.walk = Walk(request, placer, self._timeline, sessions.config, sessions.hedging)
        self.works: dict[Side, Work] = {}
        self._pulling = Pulling(sessions.workers, request, self._timeline)
        self._sampling: pb.Sampling = wire.sampling_to_pb(request.sampling)
        self._started = False
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._promised: dict[int, Promise] = {}  # by attempt
        self._arm(self._timeline.accepted + min(patience_s, request.deadline_s))

    # ---- types.Generation ---------------------------------------------------------------

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    @property
    def request(self) -> GenerateRequest:
        return self._request

    @property
    def started(self) -> bool:
        """Its turn has come; before that it waits in admission."""
        return self._started

    @property
    def unused(self) -> int:
        """Tokens that it could have had computed or put out, and hasn't."""
        request = self._request
        out = sum(len(self.walk.emitted(choice)) for choice in range(request.choices))
        prompt = 0 if self._started else len(request.token_ids)
        return prompt + request.sampling.max_tokens * request.choices - out

    def cancel(self) -> None:
        if not self._over:
            self._carry_out(self.walk.cancel())
            self._end(Failure(FailureKind.CLIENT_GONE, "cancelled"), tell=False)

    # ---- for Sessions ----------------------------------------------------------------------

    def admitted(self) -> None:
        """Its turn has come."""
        if self._over or self._started:
            return
        now = time.monotonic()
        self._started = True
        self._timeline.queue_s = now - self._timeline.accepted
        self.feed(self.walk.start(now))

    def workers_changed(self) -> None:
        if self._started and not self._over and self.walk.waiting:
            self.feed(self.walk.workers_changed(time.monotonic()))

    def fail(self, failure: Failure) -> None:
        """Ends it from outside the walk, with a word to the client."""
        if not self._over:
            self._carry_out(self.walk.cancel())
            self._end(failure, tell=True)

    # ---- the walk's actions -------------------------------------------------------------------

    def feed(self, actions: list[Action]) -> None:
        """Carries out what an event led to; sees to the timer."""
        self._carry_out(actions)
        if not self._over:
            self._arm(self.walk.next_deadline)

    def deliver(self, token: Token) -> None:
        if self.sink is not None:
            self.sink.on_token(
                token.choice, token.index, token.token, token.finish, token.logprob, token.top
            )

    def answered(self, work: Work | None) -> None:
        if work is not None:
            self._sessions.workers.answered(work)

    def computed(self, work: Work | None) -> None:
        """A worker has computed something for it."""
        if work is not None:
            self._sessions.workers.computed(work)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Token():
                    self.deliver(action)
                case OpenDecode():
                    self._open_decode(action)
                case OpenPrefill():
                    self._open_prefill(action)
                case CancelSide(side=side):
                    self._release(side, cancel=True)
                case CloseSide(side=side):
                    self._release(side, cancel=False)
                case Retried(failure=failure):
                    self._note_retry(failure)
                case Blamed(workers=suspects, failure=failure, at=at):
                    self._sessions.workers.blame(suspects, failure, at)
                case Hedged(won=won):
                    self._sessions.hooks.on_hedge(won=won)
                case Done():
                    self._end(None, tell=True)
                case Fail(failure=failure):
                    self._end(failure, tell=True)

    def _open_decode(self, action: OpenDecode) -> None:
        work = self._sessions.workers.open(
            action.worker,
            SideHandler(self, action.side),
            tokens=action.compute_tokens,
            blocks=action.blocks,
            sequences=len(action.choices),
        )
        if work is None:
            self._lost_at_once(action.side, action.worker.name)
            return
        self.works[action.side] = work
        self._promise(action)
        tpot_s = self._sessions.tpot_s(self._request.sla)

        def send() -> None:
            if action.prefill_here:
                work.expect_steps()
            request, sampling = self._request, self._sampling
            work.send(wire.generate_to_pb(action, work.handle, request, sampling, tpot_s))

        self._pulling.then(action, send, self.fail)

    def _promise(self, action: OpenDecode) -> None:
        if action.prefill is not None:
            promise = self._sessions.workers.promise(action.prefill, action.prefill_tokens)
            if promise is not None:
                self._promised[action.side.attempt] = promise

    def redeem(self, attempt: int) -> None:
        """Decode has granted: its prefill worker may be chosen anew."""
        if promise := self._promised.pop(attempt, None):
            self._sessions.workers.redeem(promise)

    def _open_prefill(self, action: OpenPrefill) -> None:
        target = self._sessions.workers.hello(action.decode)
        if target is None:  # D's own loss is told by its link
            self._lost_at_once(action.side, action.decode.name)
            return
        work = self._sessions.workers.open(
            action.worker,
            SideHandler(self, action.side),
            tokens=action.compute_tokens,
            blocks=0,
            sequences=0,
        )
        if work is None:
            self._lost_at_once(action.side, action.worker.name)
            return
        self.works[action.side] = work

        def send() -> None:
            work.expect_steps()
            request, sampling = self._request, self._sampling
            work.send(wire.prefill_to_pb(action, work.handle, request, sampling, target))

        self._pulling.then(action, send, self.fail)

    def _release(self, side: Side, *, cancel: bool) -> None:
        if not side.prefill and (promise := self._promised.pop(side.attempt, None)):
            promise.over()
        self._pulling.drop(side)
        work = self.works.pop(side, None)
        if work is not None:
            work.release(cancel=cancel)

    def _lost_at_once(self, side: Side, name: str) -> None:
        """The stream broke between the choice and the command. Told after this event."""
        failure = Failure(FailureKind.WORKER_LOST, f"worker {name} is gone")
        handler = SideHandler(self, side)
        self._sessions.loop.call_soon(lambda: handler.failed(failure, time.monotonic()))

    def _note_retry(self, failure: Failure) -> None:
        log.info(
            "request=%s attempts=%d the last one failed: %s: %s",
            self._request.request_id,
            self._timeline.attempts,
            failure.kind,
            failure.message,
        )
        self._sessions.hooks.on_retry(failure)

    # ---- time and the end ---------------------------------------------------------------------

    def _arm(self, when: float) -> None:
        """Sets the timer, unless it fires earlier anyway: it looks again then."""
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._sessions.loop.call_later(max(0.0, when - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._over:
            return
        now = time.monotonic()
        if self._started or now >= self.walk.deadline:
            self.feed(self.walk.tick(now))
            return
        waited_s = now - self._timeline.accepted
        failure = self._sessions.admission.overdue(waited_s, self._patience_s)
        if failure is not None:
            self.fail(failure)
        else:  # the timer came a moment early
            self._arm(now + 0.01)

    def _end(self, failure: Failure | None, *, tell: bool) -> None:
        """Once: frees all, and has the sink's last word said."""
        if self._over:
            return
        self._over = True
        # Whoever made the sink holds this generation: without the way back neither
        # waits for the garbage collector.
        sink, self.sink = self.sink, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for side in list(self.works):
            self._release(side, cancel=True)
        self._sessions.ended(self._request.request_id, self._timeline, failure)
        if sink is None or not tell:
            return
        if failure is None:
            sink.on_done()
        else:
            sink.on_failed(failure)


class SideHandler:
    """Takes one side's events from its link to the walk (`link.Handler`).

    A mistake in here or in the sink fails this request, not all those on the stream.
    """

    __slots__ = ("_generation", "_logprobs", "_side", "_unproven")

    def __init__(self, generation: RunningGeneration, side: Side) -> None:
        self._generation = generation
        self._logprobs = generation.request.sampling.logprobs
        self._side = side
        self._unproven = True  # no step for it has been seen to end well

    def granted(self, event: pb.Granted, now: float) -> None:
        generation = self._generation
        try:
            work = generation.works.get(self._side)
            if work is not None:
                work.holds(now)
            generation.redeem(self._side.attempt)
            generation.answered(work)
            granted = wire.granted_from_pb(event)
            generation.feed(generation.walk.granted(self._side, granted, now))
        except Exception as error:
            self._broken(error)

    def prefilled(self, event: pb.Prefilled, now: float) -> None:
        generation = self._generation
        try:
            work = generation.works.get(self._side)
            generation.answered(work)
            if work is not None:
                work.prefill_over()
                if self._side.prefill:
                    work.expect_no_steps()  # whether it is any good is seen when KV has come
                else:
                    self._prove(work)
                    work.holds(now)
            prefilled = wire.prefilled_from_pb(event)
            generation.feed(generation.walk.prefilled(self._side, prefilled, now))
        except Exception as error:
            self._broken(error)

    def committed(self, event: pb.Committed, now: float) -> None:
        generation = self._generation
        try:
            work = generation.works.get(self._side)
            if work is not None:
                work.expect_steps()
                work.carried(event.kv_bytes, event.transfer_s)
                self._prove(work)
                generation.computed(generation.works.get(self._side._replace(prefill=True)))
            committed = wire.committed_from_pb(event)
            generation.feed(generation.walk.committed(self._side, committed, now))
        except Exception as error:
            self._broken(error)

    def token(self, out: pb.TokenOut, now: float) -> None:
        """The hot path: mostly a token that ends nothing, and no timer to set."""
        generation = self._generation
        try:
            if self._unproven:
                self._prove(generation.works.get(self._side))
            if not (out.finish or self._logprobs):
                choice, index, token = out.choice, out.index, out.token
                if generation.walk.plain_token(self._side, choice, index, token, now):
                    sink = generation.sink
                    if sink is not None:
                        sink.on_token(choice, index, token, None, None, ())
                    return
            actions = generation.walk.token(self._side, wire.token_from_pb(out), now)
            if len(actions) == 1 and type(actions[0]) is Token:
                generation.deliver(actions[0])
            else:
                generation.feed(actions)
        except Exception as error:
            self._broken(error)

    def _prove(self, work: Work | None) -> None:
        """Its worker has computed something. Once a side, however much it is."""
        self._unproven = False
        self._generation.computed(work)

    def failed(self, failure: Failure, now: float) -> None:
        generation = self._generation
        try:
            if failure.kind not in GONE:
                generation.answered(generation.works.get(self._side))
            generation.feed(generation.walk.failed(self._side, failure, now))
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        log.exception("a request's own handling failed")
        failure = Failure(FailureKind.INTERNAL, f"{type(error).__name__} in the router")
        try:
            self._generation.fail(failure)
        except Exception:
            log.exception("its sink failed as well")
