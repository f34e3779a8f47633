"""Carries a request's pulls out over the workers' streams: what waits for one is sent then."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from pd_core.failures import Failure, FailureKind
from pd_proto.v1 import engine_pb2 as pb
from pd_router import wire
from pd_router.fleet import WorkerId
from pd_router.moves import Granted, Side
from pd_router.prefixes import PromptHashes
from pd_router.pulls import Pull
from pd_router.pullwalk import AskHolder, AskTarget, Close, Over, PullAction, PullWalk
from pd_router.records import Work
from pd_router.types import GenerateRequest, Timeline
from pd_router.workers import Workers

log = logging.getLogger("pd_router.pulling")


class Opener(Protocol):
    """An action that has a prompt computed (`moves.OpenDecode`, `moves.OpenPrefill`)."""

    @property
    def side(self) -> Side: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def pull(self) -> Pull | None: ...


class Pulling:
    """Of one request."""

    def __init__(
        self,
        workers: Workers,
        request: GenerateRequest,
        timeline: Timeline,
    ) -> None:
        self._workers = workers
        self._request = request
        self._timeline = timeline
        self._running: dict[Side, _Running] = {}

    def then(
        self, opener: Opener, send: Callable[[], None], fail: Callable[[Failure], None]
    ) -> None:
        """Sends at once, or when the pull that the choice of workers asks for is over. `fail`
        ends the request, where a mistake of ours would leave it waiting."""
        pull, side = opener.pull, opener.side
        if pull is None:
            send()
            return

        def over(end: Over) -> None:
            if self._running.pop(side, None) is not None:
                self._note(pull, end)
                send()

        prompt = PromptHashes(opener.token_ids, self._request.cache_salt)
        found = (prompt.at(pull.block_tokens, block) for block in range(pull.blocks))
        hashes = tuple(one for one in found if one is not None)
        of = pb.TransferId(request=self._request.request_id, attempt=side.attempt)
        running = _Running(self._workers, pull, of, hashes, over, fail)
        self._running[side] = running
        running.start()

    def drop(self, side: Side) -> None:
        """The side is over: nothing is sent to it any more."""
        running = self._running.pop(side, None)
        if running is not None:
            running.cancel()
            self._timeline.pulls_cancelled += 1

    def _note(self, pull: Pull, end: Over) -> None:
        line = self._timeline
        line.pull_s += end.took_s
        if not end.why:
            # Of what was to be copied, all or some may have come there by another way meanwhile.
            copied = pull.tokens - max(end.had_tokens, pull.tokens - pull.new_tokens)
            line.pulled_tokens += max(0, copied)
            line.pulled_bytes += end.kv_bytes
            if copied > 0:
                line.pulled_from = pull.holder.name
            else:
                line.reason += "; nothing was copied: all of it was there already"
            return
        line.pulled_from = pull.holder.name
        line.pulls_failed += 1
        if end.broken:
            self._workers.broken.failed(pull.holder, pull.target, time.monotonic())
        line.reason += f"; computed after all: the pull failed, {end.why}"
        log.info("request=%s pull failed: %s", self._request.request_id, end.why)


class _Running:
    """One pull: its walk, carried out at two workers, with a timer."""

    def __init__(
        self,
        workers: Workers,
        pull: Pull,
        of: pb.TransferId,
        hashes: tuple[bytes, ...],
        over: Callable[[Over], None],
        fail: Callable[[Failure], None],
    ) -> None:
        self._workers = workers
        self._pull = pull
        self._of = of
        self._hashes = hashes
        self._over = over
        self._fail = fail
        self.walk = PullWalk(pull, time.monotonic())
        self._works: dict[bool, Work] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._arm()
        self.feed(self.walk.start)

    def cancel(self) -> None:
        self.feed(self.walk.cancel)
        self._disarm()

    def feed(self, event: Callable[[], list[PullAction]]) -> None:
        """A mistake in here fails this request, not all those on the stream."""
        try:
            for action in event():
                self._carry_out(action)
        except Exception as error:
            log.exception("a pull's own handling failed")
            self._disarm()
            name = type(error).__name__
            self._fail(Failure(FailureKind.INTERNAL, f"{name} in the router"))

    def arrived(self, kv_bytes: int, transfer_s: float) -> None:
        """How fast the target's link is."""
        work = self._works.get(True)
        if work is not None:
            work.carried(kv_bytes, transfer_s)

    def _carry_out(self, action: PullAction) -> None:
        match action:
            case AskTarget():
                self._ask_target()
            case AskHolder(grant=grant):
                self._ask_holder(grant)
            case Close(target=target, cancel=cancel):
                work = self._works.pop(target, None)
                if work is not None:
                    work.release(cancel=cancel)
            case Over():
                self._disarm()
                self._over(action)

    def _ask_target(self) -> None:
        work = self._open(self._pull.target, target=True)
        if work is not None:
            work.send(wire.pull_to_pb(work.handle, self._of, self._hashes))

    def _ask_holder(self, grant: Granted) -> None:
        target = self._workers.hello(self._pull.target)
        work = self._open(self._pull.holder, target=False) if target is not None else None
        if work is not None and target is not None:
            work.send(wire.share_to_pb(work.handle, self._of, self._hashes, grant, target))

    def _open(self, worker: WorkerId, *, target: bool) -> Work | None:
        """None: it's gone, and the walk has been told."""
        work = self._workers.open(worker, _Ear(self, target), tokens=0, blocks=0, sequences=0)
        if work is None:
            failure = Failure(FailureKind.WORKER_LOST, f"worker {worker.name} is gone")
            now = time.monotonic()
            self.feed(lambda: self.walk.failed(target=target, failure=failure, now=now))
        else:
            self._works[target] = work
        return work

    def _arm(self) -> None:
        after_s = max(0.0, self.walk.due - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(after_s, self._tick)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = time.monotonic()
        self.feed(lambda: self.walk.tick(now))
        if not self.walk.ended:  # the timer came a moment early
            self._arm()


class _Ear:
    """Takes one side's events from its link (`link.Handler`)."""

    __slots__ = ("_running", "_target")

    def __init__(self, running: _Running, target: bool) -> None:
        self._running = running
        self._target = target

    def granted(self, event: pb.Granted, now: float) -> None:
        del now
        running = self._running
        running.feed(lambda: running.walk.granted(wire.granted_from_pb(event)))

    def committed(self, event: pb.Committed, now: float) -> None:
        running = self._running
        running.arrived(event.kv_bytes, event.transfer_s)
        running.feed(lambda: running.walk.committed(wire.committed_from_pb(event), now))

    def failed(self, failure: Failure, now: float) -> None:
        walk, target = self._running.walk, self._target
        self._running.feed(lambda: walk.failed(target=target, failure=failure, now=now))

    def prefilled(self, event: pb.Prefilled, now: float) -> None:
        """Nothing is computed for it."""

    def token(self, out: pb.TokenOut, now: float) -> None:
        """Nor written."""
