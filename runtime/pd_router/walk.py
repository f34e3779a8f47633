"""One request's walk: reserve -> prefill -> commit -> decode, with its retries. Pure.

Events go in with the time, actions come out. Whatever the workers do, the walk ends
exactly once (Done, Fail, or silently after `cancel`), within the request's deadline; each
token index of a choice comes out once and in order; and every side that was opened is
cancelled unless it ended by itself.

A *leg* carries some of the request's choices; there is one until tokens are out and an
attempt fails with several choices unfinished: then each goes on in a leg of its own. While a
prefill is hedged two legs have the same choices, each with an attempt and a grant of its own:
the first to give token 0 goes on, and of the other nothing is heard any more.
"""

from math import inf

from pd_core.failures import Failure, FailureKind
from pd_router.fleet import WorkerId
from pd_router.hedging import NO_HEDGING, Hedging
from pd_router.legs import Leg, State
from pd_router.moves import (
    Action,
    Blamed,
    CancelSide,
    CloseSide,
    Committed,
    Done,
    Fail,
    Granted,
    Hedged,
    OpenDecode,
    OpenPrefill,
    Placer,
    Prefilled,
    Retried,
    Side,
    Suspect,
    Token,
    WalkConfig,
)
from pd_router.notes import Notes
from pd_router.policy import Need, Placement, Unplaced
from pd_router.types import GenerateRequest, Timeline

GONE = (FailureKind.WORKER_LOST, FailureKind.WORKER_LATE)
"""A worker that doesn't answer."""
_REFUSED = (FailureKind.NO_CAPACITY, FailureKind.DRAINING)
_LEAST_DEADLINE_S = 0.001  # an event may come just before the tick that ends the request
_BOTH_TO_BLAME = (FailureKind.TRANSFER_FAILED, FailureKind.LEASE_EXPIRED)
_FAULTS = (FailureKind.STEP_FAILED, FailureKind.TRANSFER_FAILED, FailureKind.INTERNAL)
"""A worker that works has none of these. Lateness and loss are noticed elsewhere; the other
kinds are the request's own, or mean that the worker is full or leaves."""


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
        hedging: Hedging = NO_HEDGING,
    ) -> None:
        self._request = request
        self._hedging = hedging
        self._place = place
        self._config = config
        self.timeline = timeline
        self.deadline = timeline.accepted + request.deadline_s
        self.ended = False
        self._legs = [Leg(choices=tuple(range(request.choices)))]
        self._sides: dict[Side, Leg] = {}
        self._out: dict[int, list[int]] = {choice: [] for choice in range(request.choices)}
        self._finished: set[int] = set()
        self._attempts = 0
        self._notes = Notes(timeline)
        self._actions: list[Action] = []

    # ---- what the caller may ask ---------------------------------------------------

    @property
    def waiting(self) -> bool:
        """A leg waits for a worker: `workers_changed` may help."""
        return any(leg.give_up is not None for leg in self._legs)

    @property
    def next_deadline(self) -> float:
        """When `tick` is due at the latest. Later frames may move it on."""
        return min([self.deadline, *(leg.next_due for leg in self._legs)])

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
        if leg is None or leg.placement is None or leg.state is not State.RESERVING:
            return []
        if leg.rival is None:  # else the first has been granted already
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
        self._enter(leg, State.PREFILLING, now + self._config.prefill_wait_s)
        leg.asked = now
        if leg.rival is None:
            leg.hedge_due = now + self._hedging.after_s(leg.expected_s)
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
        if side.prefill and leg.state is State.DECODING:  # D's commit was faster
            self._notes.prefilled(event, from_prefill=True)
            self._close(leg, side)
            return self._take()
        expected = State.PREFILLING if side.prefill else State.LOCAL
        if leg.state is not expected:
            return []
        self._won(leg, now)
        self._notes.prefilled(event, from_prefill=side.prefill)
        if side.prefill:
            leg.prefilled = now
            self._hedging.took(leg.expected_s, now - leg.asked)
            self._enter(leg, State.COMMITTING, now + self._config.commit_wait_s)
        else:
            self._enter(leg, State.DECODING, now + self._config.decode_wait_s)
        self._accept_first(leg, side, event.first, now)
        return self._take()

    def committed(self, side: Side, event: Committed, now: float) -> list[Action]:
        leg = self._leg(side)
        if leg is None or leg.state not in (
            State.PREFILLING,
            State.COMMITTING,
            State.VERDICT,
        ):
            return []
        # P's Prefilled may still come, on the other stream: its times are wanted, its
        # failure isn't.
        if leg.state is not State.PREFILLING and leg.prefill is not None:
            self._close(leg, leg.prefill)
        self._won(leg, now)
        self._notes.committed(leg, event, now)
        self._enter(leg, State.DECODING, now + self._config.decode_wait_s)
        self._accept_first(leg, side, event.first, now)
        return self._take()

    def token(self, side: Side, token: Token, now: float) -> list[Action]:
        """A later token from D."""
        leg = self._sides.get(side)
        if leg is None:
            return []
        try:
            if leg.state is not State.DECODING or side.prefill:
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
        if leg is None or leg.state is not State.DECODING or side.prefill:
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
            self._attempt_failed(leg, failure, now, blamed=leg.decode_at)
        elif leg.state is State.COMMITTING:
            leg.failure = failure
            self._enter(leg, State.VERDICT, now + self._config.verdict_wait_s)
        elif leg.state is State.PREFILLING and failure.kind in GONE:
            leg.failure = failure
            self._enter(leg, State.VERDICT, now + self._config.lost_wait_s)
        elif leg.state is State.PREFILLING:
            self._attempt_failed(leg, failure, now, blamed=leg.prefill_at)
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
            if leg in self._legs and now >= leg.due:
                self._overdue(leg, now)
            elif leg in self._legs and now >= leg.hedge_due:
                self._hedge(leg, now)
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

    def _begin(self, leg: Leg, now: float) -> None:
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
        self._open(leg, placement, now, self._config.grant_wait_s)
        self._notes.placed(leg, placement)

    def _open(self, leg: Leg, placement: Placement, now: float, grant_wait_s: float) -> None:
        self._attempts += 1
        self.timeline.attempts = self._attempts
        leg.attempt = self._attempts
        leg.began = now
        leg.prefilled = None
        leg.placement = placement
        leg.decode = Side(leg.attempt, prefill=False)
        self._sides[leg.decode] = leg
        here = placement.prefill is None
        config = self._config
        if here:
            self._enter(leg, State.LOCAL, now + grant_wait_s + config.prefill_wait_s)
        else:
            wait_s = grant_wait_s + config.reserve_margin_s
            self._enter(leg, State.RESERVING, now + wait_s)
        self._actions.append(
            OpenDecode(
                side=leg.decode,
                worker=placement.decode,
                token_ids=leg.token_ids,
                choices=leg.choices,
                deadline_s=max(self.deadline - now, _LEAST_DEADLINE_S),
                grant_wait_s=grant_wait_s,
                prefill_here=here,
                blocks=placement.blocks,
                compute_tokens=placement.compute_tokens if here else 0,
                prefill=placement.prefill,
                prefill_tokens=0 if here else placement.compute_tokens,
                hedge=leg.rival is not None,
                pull=placement.pull if here else None,
            )
        )

    def _need(self, leg: Leg) -> Need:
        written = len(leg.token_ids) - len(self._request.token_ids)
        return Need(
            tokens=len(leg.token_ids),
            output_tokens=self._request.sampling.max_tokens - written,
            choices=len(leg.choices),
            session=self._request.session,
        )

    def _choose_prefill_anew(self, leg: Leg, old: Placement) -> None:
        """The grant took its time: the worker chosen before may be busy now, or gone."""
        new = self._place(self._need(leg), leg.exclusions, leg.token_ids, old.decode)
        if isinstance(new, Placement):  # else decode takes nothing new, but keeps its grant
            leg.placement = new
            if leg.rival is None:
                self._notes.placed(leg, new)

    def _unplaced(self, leg: Leg, unplaced: Unplaced, now: float) -> None:
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
        self._enter(leg, State.WAITING, min(leg.give_up, now + self._config.replace_every_s))

    def _attempt_failed(
        self, leg: Leg, failure: Failure, now: float, blamed: WorkerId | None
    ) -> None:
        """Cancels what is left of the attempt, then retries or fails the request."""
        self._cancel_leg(leg)
        if failure.kind is FailureKind.STEP_FAILED:
            leg.step_failures += 1
        self._blame(leg, failure, now, blamed)
        if leg.rival is not None:
            self._give_way(leg, leg.rival, failure, blamed)
            return
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
            self._enter(part, State.WAITING, now + pause_s)

    def _blame(self, leg: Leg, failure: Failure, now: float, blamed: WorkerId | None) -> None:
        """Whose fault it may be. A request whose steps fail wherever it goes is itself to
        blame, so its second worker isn't."""
        if blamed is None or failure.kind not in _FAULTS or leg.step_failures > 1:
            return
        workers: tuple[WorkerId, ...] = (blamed,)
        decode, prefill = leg.decode_at, leg.prefill_at
        if failure.kind in _BOTH_TO_BLAME and decode is not None and prefill is not None:
            workers = (decode, prefill)
        suspects = (Suspect(w, leg.began if w == decode else leg.last_sent) for w in workers)
        self._actions.append(Blamed(tuple(suspects), failure, now))

    def _learn(self, leg: Leg, failure: Failure, blamed: WorkerId | None) -> None:
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

    def _split(self, leg: Leg) -> list[Leg]:
        """A failed leg's unfinished choices: together while nothing is out, else each alone."""
        unfinished = tuple(c for c in leg.choices if c not in self._finished)
        if not any(self._out[c] for c in leg.choices):
            leg.choices = unfinished
            return [leg]
        parts = [
            Leg(
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

    def _overdue(self, leg: Leg, now: float) -> None:
        decode, prefill = leg.decode_at, leg.prefill_at
        if leg.state is State.WAITING:
            self._begin(leg, now)
        elif leg.state is State.VERDICT and leg.failure is not None:
            self._attempt_failed(leg, leg.failure, now, blamed=prefill)
        elif leg.state is State.PREFILLING:
            self._attempt_failed(leg, _late(prefill, "the prompt's end"), now, blamed=prefill)
        elif leg.state is State.COMMITTING:
            name = decode.name if decode else ""
            message = f"{name} didn't commit within {self._config.commit_wait_s:g} s"
            failure = Failure(FailureKind.TRANSFER_FAILED, message)
            self._attempt_failed(leg, failure, now, blamed=decode)
        else:
            self._attempt_failed(leg, _late(decode, leg.state.value), now, blamed=decode)

    # ---- hedges ------------------------------------------------------------------------

    def _hedge(self, leg: Leg, now: float) -> None:
        """Nothing has come from its prefill for long: computes the prompt elsewhere as well,
        where that is predicted to take less than has been waited. Else looks again later."""
        leg.hedge_due = now + self._hedging.after_s(leg.expected_s)
        exclusions, slow = leg.exclusions.copy(), leg.prefill_at
        if slow is None or not self._hedging.room:
            return
        exclusions.disliked.add(slow)
        placement = self._place(self._need(leg), exclusions, leg.token_ids, None)
        if isinstance(placement, Unplaced) or placement.prefill in (None, slow):
            return
        if placement.expected_s > now - leg.asked:
            return
        leg.exclusions = exclusions
        leg.rival = second = Leg(
            choices=leg.choices,
            exclusions=exclusions,
            tries=leg.tries,
            step_failures=leg.step_failures,
            token_ids=leg.token_ids,
            rival=leg,
            hedges=True,
        )
        leg.hedge_due = inf
        self._legs.append(second)
        self._hedging.running += 1
        # Room for a second try is there at once or not at all: others wait for it.
        self._open(second, placement, now, self._config.stale_choice_s)

    def _won(self, leg: Leg, now: float) -> None:
        """Token 0 is here. Where two prefills ran, it's decided."""
        loser = leg.rival
        if loser is None:
            return
        if leg.hedges:
            self._hedging.took(loser.expected_s, now - loser.asked)
        self._cancel_leg(loser)
        self._decided(leg, loser)

    def _give_way(self, leg: Leg, rival: Leg, failure: Failure, blamed: WorkerId | None) -> None:
        """One of two attempts failed: the other is the retry, and it runs already."""
        if not (leg.hedges and failure.kind is FailureKind.NO_CAPACITY):  # it hardly waited
            self._learn(leg, failure, blamed)
        rival.step_failures = leg.step_failures
        self._decided(rival, leg)

    def _decided(self, winner: Leg, loser: Leg) -> None:
        self._legs.remove(loser)
        winner.rival = loser.rival = None
        self._notes.hedged(winner, loser)
        self._hedge_over(won=winner.hedges)
        winner.hedges = False  # it's the only one now, and may be hedged itself

    def _hedge_over(self, *, won: bool) -> None:
        self._hedging.running -= 1
        self._actions.append(Hedged(won))

    # ---- tokens ------------------------------------------------------------------------

    def _accept_first(self, leg: Leg, side: Side, first: tuple[Token, ...], now: float) -> None:
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

    def _accept(self, leg: Leg, token: Token) -> bool:
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

    def _misbehaved(self, leg: Leg, side: Side, error: _Misbehaved, now: float) -> None:
        worker = leg.prefill_at if side.prefill else leg.decode_at
        failure = Failure(
            FailureKind.TRANSFER_FAILED, f"{worker.name if worker else 'a worker'} {error}"
        )
        self._attempt_failed(leg, failure, now, blamed=worker)

    def _end_if_finished(self, leg: Leg) -> None:
        """All choices of the leg have their finish: what is still open goes back."""
        if not all(choice in self._finished for choice in leg.choices):
            return
        if leg.state is State.DECODING:  # D ended by itself, and P when D committed
            for side in (leg.decode, leg.prefill):
                if side is not None:
                    self._close(leg, side)
        self._cancel_leg(leg)
        self._legs.remove(leg)
        if not self._legs:
            self.ended = True
            self._actions.append(Done())

    # ---- sides and ends ------------------------------------------------------------------

    def _leg(self, side: Side) -> Leg | None:
        """None: the side was ended here, its frames are late."""
        return self._sides.get(side)

    def _enter(self, leg: Leg, state: State, due: float) -> None:
        leg.state = state
        leg.due = due
        leg.hedge_due = inf

    def _end_side(self, leg: Leg, side: Side, *, cancel: bool) -> None:
        del self._sides[side]
        if side.prefill:
            leg.prefill = None
        else:
            leg.decode = None
        self._actions.append(CancelSide(side) if cancel else CloseSide(side))

    def _close(self, leg: Leg, side: Side) -> None:
        self._end_side(leg, side, cancel=False)

    def _cancel_leg(self, leg: Leg) -> None:
        for side in (leg.decode, leg.prefill):
            if side is not None:
                # After the commit P holds nothing of ours any more.
                done = side.prefill and leg.state is State.DECODING
                self._end_side(leg, side, cancel=not done)

    def _cancel_open(self) -> None:
        for leg in self._legs:
            self._cancel_leg(leg)
            if leg.hedges and leg.rival is not None:
                self._hedge_over(won=False)
        self._legs.clear()

    def _fail(self, failure: Failure) -> None:
        self._cancel_open()
        self.ended = True
        self._actions.append(Fail(failure))

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _late(worker: WorkerId | None, what: str) -> Failure:
    name = worker.name if worker else "a worker"
    return Failure(FailureKind.WORKER_LATE, f"{name} was silent too long ({what})")
