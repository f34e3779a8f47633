"""One request's walk: reserve -> prefill -> commit -> decode, with its retries. Pure.

Events go in with the time, actions come out. Whatever the workers do, the walk ends
exactly once (Done, Fail, or silently after `cancel`), within the request's deadline; each
token index of a choice comes out once and in order; and every side that was opened is
cancelled unless it ended by itself.

A *leg* carries some of the request's choices; there is one until tokens are out and an
attempt fails with several choices unfinished: then each goes on in a leg of its own.
"""

from dataclasses import dataclass, field
from enum import Enum

from pd_core.failures import Failure, FailureKind
from pd_router.fleet import WorkerId
from pd_router.moves import (
    Action,
    CancelSide,
    CloseSide,
    Committed,
    Done,
    Fail,
    Granted,
    OpenDecode,
    OpenPrefill,
    Placer,
    Prefilled,
    Retried,
    Side,
    Token,
    WalkConfig,
)
from pd_router.policy import Exclusions, Need, Placement, Unplaced
from pd_router.types import GenerateRequest, Timeline

_GONE = (FailureKind.WORKER_LOST, FailureKind.WORKER_LATE)
_REFUSED = (FailureKind.NO_CAPACITY, FailureKind.DRAINING)
_LEAST_DEADLINE_S = 0.001  # an event may come just before the tick that ends the request
_BOTH_TO_BLAME = (FailureKind.TRANSFER_FAILED, FailureKind.LEASE_EXPIRED)


class _State(Enum):
    WAITING = "waiting"  # for its next attempt: back-off, or no worker is there
    RESERVING = "reserving"  # Generate sent
    PREFILLING = "prefilling"  # granted, Prefill sent
    COMMITTING = "committing"  # token 0 is here from P, D is still to commit
    VERDICT = "verdict"  # P failed but may have sealed: D knows
    LOCAL = "local"  # D computes the prompt
    DECODING = "decoding"


@dataclass(slots=True)
class _Leg:
    """Some choices on their way. `due`: when the present state has lasted too long."""

    choices: tuple[int, ...]
    exclusions: Exclusions = field(default_factory=Exclusions)
    state: _State = _State.WAITING
    due: float = 0.0
    tries: int = 0
    attempt: int = 0
    began: float = 0.0  # of the attempt
    prefilled: float | None = None  # when P's token 0 came, of this attempt
    step_failures: int = 0
    token_ids: tuple[int, ...] = ()
    placement: Placement | None = None
    decode: Side | None = None  # open sides
    prefill: Side | None = None
    failure: Failure | None = None  # the last attempt's; in VERDICT: P's
    give_up: float | None = None  # when waiting for a worker ends


class _Misbehaved(Exception):
    """A worker sent what the protocol doesn't allow here."""


class Walk:
    """See the module. Feed events until `ended`; call `tick` at `next_deadline`."""

    def __init__(
        self,
        request: GenerateRequest,
        place: Placer,
        timeline: Timeline,
        config: WalkConfig,
    ) -> None:
        self._request = request
        self._place = place
        self._config = config
        self.timeline = timeline
        self.deadline = timeline.accepted + request.deadline_s
        self.ended = False
        self._legs = [_Leg(choices=tuple(range(request.choices)))]
        self._sides: dict[Side, _Leg] = {}
        self._out: dict[int, list[int]] = {choice: [] for choice in range(request.choices)}
        self._finished: set[int] = set()
        self._attempts = 0
        self._counted_cached = False
        self._actions: list[Action] = []

    # ---- what the caller may ask ---------------------------------------------------

    @property
    def waiting(self) -> bool:
        """A leg waits for a worker: `workers_changed` may help."""
        return any(leg.give_up is not None for leg in self._legs)

    @property
    def next_deadline(self) -> float:
        """When `tick` is due at the latest. Later frames may move it on."""
        return min([self.deadline, *(leg.due for leg in self._legs)])

    def emitted(self, choice: int) -> list[int]:
        """Tokens of a choice that are out."""
        return self._out[choice]

    # ---- events ----------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """The first event. With no workers the first action is Fail."""
        self._begin(self._legs[0], now)
        return self._take()

    def granted(self, side: Side, event: Granted, now: float) -> list[Action]:
        leg = self._leg(side)
        if leg is None or leg.placement is None or leg.state is not _State.RESERVING:
            return []
        self.timeline.grant_wait_s += event.wait_s
        if now - leg.began > self._config.stale_choice_s:
            self._choose_prefill_anew(leg, leg.placement)
        prefill = leg.placement.prefill
        if prefill is None:
            failure = Failure(FailureKind.WORKER_LOST, "no prefill worker is left for the grant")
            self._attempt_failed(leg, failure, now, blamed=None)
            return self._take()
        leg.prefill = Side(leg.attempt, prefill=True)
        self._sides[leg.prefill] = leg
        self._enter(leg, _State.PREFILLING, now + self._config.prefill_wait_s)
        self._actions.append(
            OpenPrefill(
                side=leg.prefill,
                worker=prefill,
                token_ids=leg.token_ids,
                choices=leg.choices,
                deadline_s=max(self.deadline - now, _LEAST_DEADLINE_S),
                decode=leg.placement.decode,
                grant=event,
                compute_tokens=leg.placement.compute_tokens,
                pull=leg.placement.pull,
            )
        )
        return self._take()

    def prefilled(self, side: Side, event: Prefilled, now: float) -> list[Action]:
        """Token 0, from P or from a D that computes the prompt itself."""
        leg = self._leg(side)
        if leg is None:
            return []
        if side.prefill and leg.state is _State.DECODING:  # D's commit was faster
            self._note_prefill(event, from_prefill=True)
            self._close(leg, side)
            return self._take()
        expected = _State.PREFILLING if side.prefill else _State.LOCAL
        if leg.state is not expected:
            return []
        self._note_prefill(event, from_prefill=side.prefill)
        if side.prefill:
            leg.prefilled = now
            self._enter(leg, _State.COMMITTING, now + self._config.commit_wait_s)
        else:
            self._enter(leg, _State.DECODING, now + self._config.decode_wait_s)
        self._accept_first(leg, side, event.first, now)
        return self._take()

    def committed(self, side: Side, event: Committed, now: float) -> list[Action]:
        leg = self._leg(side)
        if leg is None or leg.state not in (
            _State.PREFILLING,
            _State.COMMITTING,
            _State.VERDICT,
        ):
            return []
        # P's Prefilled may still come, on the other stream: its times are wanted, its
        # failure isn't.
        if leg.state is not _State.PREFILLING and leg.prefill is not None:
            self._close(leg, leg.prefill)
        self.timeline.kv_bytes += event.kv_bytes
        self.timeline.transfer_s += event.transfer_s
        self.timeline.transport = event.transport or self.timeline.transport
        if leg.prefilled is not None:
            self.timeline.exposed_s += now - leg.prefilled
        self._note_cached(event.cached_tokens)
        self._enter(leg, _State.DECODING, now + self._config.decode_wait_s)
        self._accept_first(leg, side, event.first, now)
        return self._take()

    def token(self, side: Side, token: Token, now: float) -> list[Action]:
        """A later token from D."""
        leg = self._sides.get(side)
        if leg is None:
            return []
        try:
            if leg.state is not _State.DECODING or side.prefill:
                raise _Misbehaved("sent tokens before it had the KV")
            leg.due = now + self._config.decode_wait_s
            if self._accept(leg, token) and token.finish is not None:
                self._end_if_finished(leg)
        except _Misbehaved as error:
            self._misbehaved(leg, side, error, now)
        return self._take()

    def plain_token(self, side: Side, choice: int, index: int, token: int, now: float) -> bool:
        """The hottest path: True for a token that ends nothing, is the choice's next, and so
        goes out. False changes nothing: `token` then says what it means."""
        leg = self._sides.get(side)
        if leg is None or leg.state is not _State.DECODING or side.prefill:
            return False
        out = self._out.get(choice)
        if out is None or len(out) != index:
            return False
        if choice in self._finished or choice not in leg.choices:
            return False
        out.append(token)
        leg.due = now + self._config.decode_wait_s
        return True

    def failed(self, side: Side, failure: Failure, now: float) -> list[Action]:
        """A side ended: the worker said so, or it was lost or late."""
        leg = self._leg(side)
        if leg is None:
            return []
        # A late worker may wake up: it is told. A lost one has nobody to tell.
        self._end_side(leg, side, cancel=failure.kind is FailureKind.WORKER_LATE)
        if not side.prefill:
            self._attempt_failed(leg, failure, now, blamed=self._decode_of(leg))
        elif leg.state is _State.COMMITTING:
            leg.failure = failure
            self._enter(leg, _State.VERDICT, now + self._config.verdict_wait_s)
        elif leg.state is _State.PREFILLING and failure.kind in _GONE:
            leg.failure = failure
            self._enter(leg, _State.VERDICT, now + self._config.lost_wait_s)
        elif leg.state is _State.PREFILLING:
            self._attempt_failed(leg, failure, now, blamed=self._prefill_of(leg))
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """Time has passed: acts on what is overdue."""
        if self.ended:
            return []
        if now >= self.deadline:
            self._fail(
                Failure(
                    FailureKind.DEADLINE,
                    f"not finished within {self._request.deadline_s:g} s",
                )
            )
            return self._take()
        for leg in list(self._legs):
            if not self.ended and now >= leg.due:
                self._overdue(leg, now)
        return self._take()

    def workers_changed(self, now: float) -> list[Action]:
        """A worker may have become usable."""
        for leg in list(self._legs):
            if not self.ended and leg.give_up is not None:
                self._begin(leg, now)
        return self._take()

    def cancel(self) -> list[Action]:
        """The client is gone: cancels whatever is open, says nothing more."""
        if not self.ended:
            self._cancel_open()
            self.ended = True
        return self._take()

    # ---- attempts ----------------------------------------------------------------------

    def _begin(self, leg: _Leg, now: float) -> None:
        """Starts the leg's next attempt, or waits for a worker."""
        leg.token_ids = self._request.token_ids
        out = self._out[leg.choices[0]] if len(leg.choices) == 1 else []
        if out:
            leg.token_ids = (*leg.token_ids, *out)
        placement = self._place(self._need(leg), leg.exclusions, leg.token_ids, None)
        if isinstance(placement, Unplaced):
            self._unplaced(leg, placement, now)
            return
        leg.give_up = None
        leg.tries += 1
        self._attempts += 1
        leg.attempt = self._attempts
        leg.began = now
        leg.prefilled = None
        leg.placement = placement
        self._note_placement(leg, placement)
        leg.decode = Side(leg.attempt, prefill=False)
        self._sides[leg.decode] = leg
        here = placement.prefill is None
        config = self._config
        if here:
            self._enter(leg, _State.LOCAL, now + config.grant_wait_s + config.prefill_wait_s)
        else:
            wait_s = config.grant_wait_s + config.reserve_margin_s
            self._enter(leg, _State.RESERVING, now + wait_s)
        self._actions.append(
            OpenDecode(
                side=leg.decode,
                worker=placement.decode,
                token_ids=leg.token_ids,
                choices=leg.choices,
                deadline_s=max(self.deadline - now, _LEAST_DEADLINE_S),
                grant_wait_s=config.grant_wait_s,
                prefill_here=here,
                blocks=placement.blocks,
                compute_tokens=placement.compute_tokens if here else 0,
                prefill=placement.prefill,
                prefill_tokens=0 if here else placement.compute_tokens,
                pull=placement.pull if here else None,
            )
        )

    def _need(self, leg: _Leg) -> Need:
        written = len(leg.token_ids) - len(self._request.token_ids)
        return Need(
            tokens=len(leg.token_ids),
            output_tokens=self._request.sampling.max_tokens - written,
            choices=len(leg.choices),
            session=self._request.session,
        )

    def _choose_prefill_anew(self, leg: _Leg, old: Placement) -> None:
        """The grant took its time: the worker chosen before may be busy now, or gone."""
        new = self._place(self._need(leg), leg.exclusions, leg.token_ids, old.decode)
        if isinstance(new, Placement):  # else decode takes nothing new, but keeps its grant
            leg.placement = new
            self._note_placement(leg, new)

    def _unplaced(self, leg: _Leg, unplaced: Unplaced, now: float) -> None:
        if leg.failure is None:
            self._fail(Failure(FailureKind.NO_WORKERS, unplaced.reason))
            return
        if unplaced.barred and leg.failure.kind is FailureKind.NO_CAPACITY:
            self._fail(leg.failure)
            return
        if leg.give_up is None:
            leg.give_up = now + self._config.worker_wait_s
        if now >= leg.give_up:
            self._fail(
                Failure(
                    FailureKind.NO_WORKERS,
                    f"{unplaced.reason}, for {self._config.worker_wait_s:g} s; "
                    f"before that: {leg.failure.message}",
                )
            )
            return
        self._enter(leg, _State.WAITING, min(leg.give_up, now + self._config.replace_every_s))

    def _attempt_failed(
        self, leg: _Leg, failure: Failure, now: float, blamed: WorkerId | None
    ) -> None:
        """Cancels what is left of the attempt, then retries or fails the request."""
        self._cancel_leg(leg)
        if failure.kind is FailureKind.STEP_FAILED:
            leg.step_failures += 1
        spent = leg.tries > self._config.max_retries or leg.step_failures > 1
        if not failure.traits.retryable or spent:
            self._fail(failure)
            return
        self._learn(leg, failure, blamed)
        leg.failure = failure
        leg.placement = None
        self._actions.append(Retried(failure))
        pause_s = min(self._config.backoff_s * 4 ** (leg.tries - 1), self._config.backoff_max_s)
        for part in self._split(leg):
            self._enter(part, _State.WAITING, now + pause_s)

    def _learn(self, leg: _Leg, failure: Failure, blamed: WorkerId | None) -> None:
        """What the next attempt should keep away from."""
        exclusions, placement = leg.exclusions, leg.placement
        if placement is None or blamed is None:
            return
        if failure.kind in _REFUSED:
            exclusions.barred.add(blamed)
        elif failure.kind is FailureKind.LAYOUT_MISMATCH and placement.prefill is not None:
            exclusions.pairs.add((placement.decode, placement.prefill))
        elif failure.kind in _BOTH_TO_BLAME and placement.prefill is not None:
            exclusions.disliked.update((placement.decode, placement.prefill))
        else:
            exclusions.disliked.add(blamed)

    def _split(self, leg: _Leg) -> list[_Leg]:
        """A failed leg's unfinished choices: together while nothing is out, else each alone."""
        unfinished = tuple(c for c in leg.choices if c not in self._finished)
        if not any(self._out[c] for c in leg.choices):
            leg.choices = unfinished
            return [leg]
        parts = [
            _Leg(
                choices=(choice,),
                exclusions=leg.exclusions.copy(),
                tries=leg.tries,
                step_failures=leg.step_failures,
                failure=leg.failure,
            )
            for choice in unfinished
        ]
        self._legs.remove(leg)
        self._legs.extend(parts)
        return parts

    def _overdue(self, leg: _Leg, now: float) -> None:
        decode, prefill = self._decode_of(leg), self._prefill_of(leg)
        if leg.state is _State.WAITING:
            self._begin(leg, now)
        elif leg.state is _State.VERDICT and leg.failure is not None:
            self._attempt_failed(leg, leg.failure, now, blamed=prefill)
        elif leg.state is _State.PREFILLING:
            self._attempt_failed(leg, _late(prefill, "the prompt's end"), now, blamed=prefill)
        elif leg.state is _State.COMMITTING:
            name = decode.name if decode else ""
            message = f"{name} didn't commit within {self._config.commit_wait_s:g} s"
            failure = Failure(FailureKind.TRANSFER_FAILED, message)
            self._attempt_failed(leg, failure, now, blamed=decode)
        else:
            self._attempt_failed(leg, _late(decode, leg.state.value), now, blamed=decode)

    # ---- tokens ------------------------------------------------------------------------

    def _accept_first(self, leg: _Leg, side: Side, first: tuple[Token, ...], now: float) -> None:
        """Token 0 of the attempt, for each of its choices, whoever tells it first."""
        begins = len(leg.token_ids) - len(self._request.token_ids)
        try:
            for token in first:
                self._accept(leg, token)
            if any(len(self._out[choice]) <= begins for choice in leg.choices):
                raise _Misbehaved("left out the first token of a choice")
            self._end_if_finished(leg)
        except _Misbehaved as error:
            self._misbehaved(leg, side, error, now)

    def _accept(self, leg: _Leg, token: Token) -> bool:
        """Lets a token out if it is the choice's next; seen ones are dropped."""
        out = self._out.get(token.choice)
        if out is None or token.choice not in leg.choices:
            raise _Misbehaved(f"sent a token of choice {token.choice}")
        if token.index < len(out) or token.choice in self._finished:
            return False
        if token.index > len(out):
            raise _Misbehaved(f"went from index {len(out) - 1} to {token.index}")
        out.append(token.token)
        if token.finish is not None:
            self._finished.add(token.choice)
        self._actions.append(token)
        return True

    def _misbehaved(self, leg: _Leg, side: Side, error: _Misbehaved, now: float) -> None:
        worker = self._prefill_of(leg) if side.prefill else self._decode_of(leg)
        failure = Failure(
            FailureKind.TRANSFER_FAILED, f"{worker.name if worker else 'a worker'} {error}"
        )
        self._attempt_failed(leg, failure, now, blamed=worker)

    def _end_if_finished(self, leg: _Leg) -> None:
        """All choices of the leg have their finish: what is still open goes back."""
        if not all(choice in self._finished for choice in leg.choices):
            return
        if leg.state is _State.DECODING:  # D ended by itself, and P when D committed
            for side in (leg.decode, leg.prefill):
                if side is not None:
                    self._close(leg, side)
        self._cancel_leg(leg)
        self._legs.remove(leg)
        if not self._legs:
            self.ended = True
            self._actions.append(Done())

    # ---- sides and ends ------------------------------------------------------------------

    def _leg(self, side: Side) -> _Leg | None:
        """None: the side was ended here, its frames are late."""
        return self._sides.get(side)

    def _decode_of(self, leg: _Leg) -> WorkerId | None:
        return leg.placement.decode if leg.placement else None

    def _prefill_of(self, leg: _Leg) -> WorkerId | None:
        return leg.placement.prefill if leg.placement else None

    def _enter(self, leg: _Leg, state: _State, due: float) -> None:
        leg.state = state
        leg.due = due

    def _end_side(self, leg: _Leg, side: Side, *, cancel: bool) -> None:
        del self._sides[side]
        if side.prefill:
            leg.prefill = None
        else:
            leg.decode = None
        self._actions.append(CancelSide(side) if cancel else CloseSide(side))

    def _close(self, leg: _Leg, side: Side) -> None:
        self._end_side(leg, side, cancel=False)

    def _cancel_leg(self, leg: _Leg) -> None:
        for side in (leg.decode, leg.prefill):
            if side is not None:
                # After the commit P holds nothing of ours any more.
                done = side.prefill and leg.state is _State.DECODING
                self._end_side(leg, side, cancel=not done)

    def _cancel_open(self) -> None:
        for leg in self._legs:
            self._cancel_leg(leg)
        self._legs.clear()

    def _fail(self, failure: Failure) -> None:
        self._cancel_open()
        self.ended = True
        self._actions.append(Fail(failure))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    # ---- the timeline ----------------------------------------------------------------------

    def _note_placement(self, leg: _Leg, placement: Placement) -> None:
        line = self.timeline
        line.attempts = self._attempts
        line.decode_worker = placement.decode.name
        line.prefill_worker = (placement.prefill or placement.decode).name
        line.reason = placement.reason
        line.considered = placement.considered
        if leg.failure is not None:
            line.reason += f"; attempt {leg.attempt} after {leg.failure.kind}"

    def _note_prefill(self, event: Prefilled, *, from_prefill: bool) -> None:
        line = self.timeline
        line.prefill_queue_s += event.queue_s
        line.prefill_s += event.prefill_s
        if from_prefill:
            line.transport = event.transport or line.transport
        self._note_cached(event.cached_tokens)

    def _note_cached(self, cached_tokens: int) -> None:
        """The first attempt's count: a resumed one has the client's own output cached too."""
        if not self._counted_cached:
            self._counted_cached = True
            self.timeline.cached_tokens = min(cached_tokens, self.timeline.prompt_tokens)


def _late(worker: WorkerId | None, what: str) -> Failure:
    name = worker.name if worker else "a worker"
    return Failure(FailureKind.WORKER_LATE, f"{name} was silent too long ({what})")
