"""A world of workers for the walk, in virtual time, that fails at every edge.

Workers answer after random delays, are lost, fail with types, stay silent, say things
twice, go on talking after they were cancelled, break the protocol. The world checks
each action as it comes; `check_end` judges the whole.
"""

import heapq
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvForm
from pd_router.fleet import LoadReport, Role, WorkerId, WorkerView
from pd_router.hedging import Hedge, Hedging
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
    Prefilled,
    Retried,
    Side,
    Token,
    WalkConfig,
)
from pd_router.policy import Exclusions, Need, Placement, Unplaced, place
from pd_router.types import GenerateRequest, Sampling, Timeline
from pd_router.walk import Walk

_KV = KvForm("m", "float32", block_tokens=4, layers=2, kv_heads=1, head_dim=8)

TYPED = (
    FailureKind.STEP_FAILED,
    FailureKind.TRANSFER_FAILED,
    FailureKind.PREEMPTED,
    FailureKind.LEASE_EXPIRED,
    FailureKind.NO_CAPACITY,
    FailureKind.DRAINING,
    FailureKind.LAYOUT_MISMATCH,
    FailureKind.INTERNAL,
)


def model_token(choice: int, index: int) -> int:
    return zlib.crc32(f"{choice}/{index}".encode()) % 1000


@dataclass(frozen=True)
class Plan:
    """What one run of the world is like. Rates are chances a step, 0..1."""

    seed: int
    prefills: int
    decodes: int
    boths: int
    choices: int
    max_tokens: int
    fault_rate: float
    duplicate_rate: float
    deadline_s: float = 60.0
    cancel_at: float | None = None
    max_retries: int = 3
    hedge_after_s: float | None = None  # None: no hedges
    stops: tuple[int | None, ...] = ()  # by choice: the index at which the model stops


@dataclass
class _Side:
    side: Side
    worker: WorkerId
    choices: tuple[int, ...]
    token_ids: tuple[int, ...]
    decode: Side | None = None  # of a prefill: whose grant it fills
    talks_until: float = 0.0  # frames of one side keep their order
    over: bool = False  # ended over there
    committed: bool = False
    dropped: bool = False  # cancelled or closed by the walk


@dataclass
class World:
    plan: Plan
    now: float = 1000.0
    views: dict[WorkerId, WorkerView] = field(default_factory=dict)
    sides: dict[Side, _Side] = field(default_factory=dict)
    granted: set[int] = field(default_factory=set)
    delivered: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    tries: dict[int, int] = field(default_factory=dict)
    ends: list[Action] = field(default_factory=list)
    silent: WorkerId | None = None  # a prefill worker that says nothing
    hedges: int = 0
    hedged: list[bool] = field(default_factory=list)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.plan.seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._epochs = 0
        roles = {"p": (Role.PREFILL, self.plan.prefills), "d": (Role.DECODE, self.plan.decodes)}
        roles["b"] = (Role.BOTH, self.plan.boths)
        for letter, (role, count) in roles.items():
            for number in range(count):
                self._add_worker(f"{letter}-{number}", role)
        self.request = GenerateRequest(
            request_id="r",
            token_ids=tuple(range(10)),
            choices=self.plan.choices,
            sampling=Sampling(max_tokens=self.plan.max_tokens),
            deadline_s=self.plan.deadline_s,
        )
        self.timeline = Timeline("r", accepted=self.now, prompt_tokens=10)
        self.config = WalkConfig(
            max_retries=self.plan.max_retries,
            grant_wait_s=5.0,
            prefill_wait_s=10.0,
            commit_wait_s=5.0,
            decode_wait_s=5.0,
            worker_wait_s=8.0,
            stale_choice_s=0.03,
        )
        after_s = self.plan.hedge_after_s
        self.hedging = Hedging(None if after_s is None else Hedge(after_s))
        self.walk = Walk(self.request, self._place, self.timeline, self.config, self.hedging)

    # ---- running --------------------------------------------------------------------------

    def run(self) -> None:
        deadline = self.walk.deadline
        if self.plan.cancel_at is not None:
            self.at(self.plan.cancel_at, self._cancel)
        self.take(self.walk.start(self.now))
        while not self.walk.ended:
            assert self.now <= deadline + 1e-6, "still running after its deadline"
            due = self.walk.next_deadline
            assert due <= deadline
            if self._queue and self._queue[0][0] <= due:
                self.now, _, event = heapq.heappop(self._queue)
                event()
            else:
                self.now = max(self.now, due)
                self.take(self.walk.tick(self.now))
        # What still talks must not be heard any more.
        while self._queue:
            self.now, _, event = heapq.heappop(self._queue)
            event()
        self.take(self.walk.tick(self.now + 1000.0))

    def at(self, after_s: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + after_s, self._number, event))

    def chance(self, rate: float) -> bool:
        return self.random.random() < rate

    # ---- workers ---------------------------------------------------------------------------

    def _add_worker(self, name: str, role: Role) -> None:
        self._epochs += 1
        worker = WorkerId(name, f"e{self._epochs}")
        self.views[worker] = WorkerView(
            id=worker,
            role=role,
            kv=_KV,
            kv_blocks=100,
            max_model_tokens=400,
            load=LoadReport(kv_blocks=100, kv_free=100),
            usable=True,
        )

    def _place(
        self,
        need: Need,
        exclusions: Exclusions,
        token_ids: tuple[int, ...],
        decode_at: WorkerId | None,
    ) -> Placement | Unplaced:
        assert need.tokens == len(token_ids)
        return place(need, self.views.values(), lambda _: 0, exclusions, decode_at)

    def _lose(self, worker: WorkerId) -> None:
        """The process dies; another may take its place."""
        view = self.views.pop(worker, None)
        if view is None:
            return
        for talk in list(self.sides.values()):
            if talk.worker == worker and not talk.over:
                talk.over = True
                failure = Failure(FailureKind.WORKER_LOST, f"{worker.name} died")
                self._say(talk, lambda t=talk, f=failure: self.walk.failed(t.side, f, self.now))
        if self.chance(0.7):
            self.at(self.random.uniform(0.1, 12.0), lambda: self._return(view))

    def _return(self, view: WorkerView) -> None:
        self._add_worker(view.id.name, view.role)
        self.take(self.walk.workers_changed(self.now))

    def _late(self, talk: _Side) -> None:
        """The router's own finding: the worker lives but doesn't move."""
        view = self.views.get(talk.worker)
        if view is None or talk.over or talk.dropped:
            return
        view.usable = False
        failure = Failure(FailureKind.WORKER_LATE, f"{talk.worker.name} is late")
        self.take(self.walk.failed(talk.side, failure, self.now))

        def recover() -> None:
            view.usable = True
            self.take(self.walk.workers_changed(self.now))

        self.at(self.random.uniform(0.5, 12.0), recover)

    # ---- frames ----------------------------------------------------------------------------

    def _say(self, talk: _Side, frame: Callable[[], list[Action]], wait_s: float = 0.0) -> None:
        """A frame on its way: in order within its side, sometimes twice."""
        at = max(self.now + wait_s, talk.talks_until) + self.random.uniform(0.0, 0.02)
        talk.talks_until = at
        for _ in range(2 if self.chance(self.plan.duplicate_rate) else 1):
            self.at(at - self.now, lambda: self.take(frame()))

    def _stage(self, talk: _Side, go_on: Callable[[], None]) -> None:
        """Before each step of a worker: it goes on, or one of the faults."""
        if talk.over:
            return
        if talk.dropped and self.chance(0.8):  # heard of the cancel; else it talks on
            talk.over = True
            return
        if not self.chance(self.plan.fault_rate):
            go_on()
            return
        match self.random.randrange(5):
            case 0:
                self._lose(talk.worker)
            case 1:
                self._fail(talk, self.random.choice(TYPED))
            case 2:
                self._late(talk)
            case 3:
                pass  # silent for ever
            case _:
                self.at(self.random.uniform(0.5, 4.0), go_on)

    def _fail(self, talk: _Side, kind: FailureKind) -> None:
        talk.over = True
        failure = Failure(kind, f"{talk.worker.name} says so")
        self._say(talk, lambda: self.walk.failed(talk.side, failure, self.now))

    def _tokens(self, talk: _Side, index: int) -> list[Token]:
        return [self._token(choice, index) for choice in talk.choices]

    def _token(self, choice: int, index: int) -> Token:
        stop = self.plan.stops[choice] if choice < len(self.plan.stops) else None
        if stop is not None and index == stop:
            return Token(choice, index, model_token(choice, index), "stop")
        last = index + 1 == self.plan.max_tokens
        return Token(choice, index, model_token(choice, index), "length" if last else None)

    # ---- what each side does ------------------------------------------------------------------

    def _serve_decode(self, talk: _Side, local: bool) -> None:
        if local:
            self._stage(talk, lambda: self._prefill_locally(talk))
        else:
            self._stage(talk, lambda: self._grant(talk))

    def _grant(self, talk: _Side) -> None:
        self.granted.add(talk.side.attempt)
        grant = Granted(b"g", wait_s=0.01)
        self._say(talk, lambda: self.walk.granted(talk.side, grant, self.now))

    def _prefill_locally(self, talk: _Side) -> None:
        index = len(talk.token_ids) - 10
        first = self._first(talk, index)
        event = Prefilled(first=first, cached_tokens=3)
        self._say(talk, lambda: self.walk.prefilled(talk.side, event, self.now), 0.05)
        self._decode_on(talk, index + 1, [t.choice for t in first if not t.finish])

    def _serve_prefill(self, talk: _Side) -> None:
        def compute() -> None:
            index = len(talk.token_ids) - 10
            first = self._first(talk, index)
            event = Prefilled(first=first, cached_tokens=3, transport="tcp")
            if not self.chance(self.plan.fault_rate):  # else the frame is lost with P, later
                self._say(talk, lambda: self.walk.prefilled(talk.side, event, self.now), 0.05)
            self.at(self.random.uniform(0.0, 0.1), lambda: self._stage(talk, seal))

        def seal() -> None:
            decode = self.sides[talk.decode] if talk.decode else None
            if decode is not None and not decode.over and not decode.committed:
                self.at(
                    self.random.uniform(0.0, 0.1),
                    lambda: self._stage(decode, lambda: self._commit(talk, decode)),
                )

        self._stage(talk, compute)

    def _first(self, talk: _Side, index: int) -> tuple[Token, ...]:
        first = self._tokens(talk, index)
        if self.chance(self.plan.fault_rate / 4):
            first.pop()  # breaks the protocol
        return tuple(first)

    def _commit(self, prefill: _Side, decode: _Side) -> None:
        if decode.committed:
            return
        decode.committed = prefill.committed = True
        prefill.over = True
        index = len(decode.token_ids) - 10
        event = Committed(first=self._first(decode, index), kv_bytes=10, transfer_s=0.01)
        self._say(decode, lambda: self.walk.committed(decode.side, event, self.now))
        left = [t.choice for t in self._tokens(decode, index) if not t.finish]
        self._decode_on(decode, index + 1, left)

    def _decode_on(self, talk: _Side, index: int, choices: Sequence[int]) -> None:
        if not choices:
            talk.over = True
            return

        def step() -> None:
            if self.chance(self.plan.fault_rate / 8):
                skipped = self._token(choices[0], index + 1)  # breaks the protocol
                self._say(talk, lambda: self.walk.token(talk.side, skipped, self.now))
            tokens = [self._token(choice, index) for choice in choices]
            for token in tokens:
                self._say(talk, lambda t=token: self.walk.token(talk.side, t, self.now))
            self._decode_on(talk, index + 1, [t.choice for t in tokens if not t.finish])

        self.at(self.random.uniform(0.01, 0.05), lambda: self._stage(talk, step))

    # ---- the walk's actions --------------------------------------------------------------

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.ends, f"{action} after the end"
            if self.cancelled:
                assert isinstance(action, CancelSide | CloseSide), f"{action} after cancel"
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Token():
                self._deliver(action)
            case OpenDecode():
                self._open_decode(action)
            case OpenPrefill():
                self._open_prefill(action)
            case CancelSide(side=side):
                self._drop(side)
            case CloseSide(side=side):
                talk = self._drop(side)
                assert talk.over or talk.committed, f"{side} closed while it holds something"
            case Retried():
                pass
            case Blamed(workers=workers):
                assert workers, "a fault of nobody"
            case Hedged(won=won):
                self.hedged.append(won)
            case Done() | Fail():
                assert not any(not t.dropped for t in self.sides.values()), "ended with open sides"
                self.ends.append(action)

    def _drop(self, side: Side) -> _Side:
        talk = self.sides[side]
        assert not talk.dropped, f"{side} dropped twice"
        talk.dropped = True
        return talk

    def _deliver(self, token: Token) -> None:
        out = self.delivered.setdefault(token.choice, [])
        assert token.choice not in self.finished, "a token after the finish"
        assert token.index == len(out), "indices must be contiguous"
        assert token.token == model_token(token.choice, token.index)
        attempts = {s.side.attempt for s in self._open(token.choice)}
        assert len(attempts) <= 1, "two attempts are still open for a choice that has tokens"
        out.append(token.token)
        if token.finish is not None:
            self.finished.add(token.choice)

    def _open_decode(self, action: OpenDecode) -> None:
        assert action.side not in self.sides
        assert not action.side.prefill
        assert 0 < action.deadline_s <= self.plan.deadline_s
        if action.hedge:
            self._check_hedge(action)
        for choice in action.choices:
            assert choice not in self.finished
            if action.hedge:
                continue
            assert not self._open(choice), "two attempts at once, and no hedge"
            self.tries[choice] = self.tries.get(choice, 0) + 1
            assert self.tries[choice] <= 1 + self.plan.max_retries, "an attempt too many"
            out = tuple(self.delivered.get(choice, []))
            assert action.token_ids == self.request.token_ids + out, "resumed elsewhere"
        view = self.views[action.worker]
        assert view.role is not Role.PREFILL
        assert action.prefill_here or view.role is Role.DECODE
        talk = _Side(action.side, action.worker, action.choices, action.token_ids)
        self.sides[action.side] = talk
        delay_s = self.random.uniform(0.0, 0.05)
        self.at(delay_s, lambda: self._serve_decode(talk, action.prefill_here))

    def _open(self, choice: int) -> list[_Side]:
        return [s for s in self.sides.values() if choice in s.choices and not s.dropped]

    def _check_hedge(self, action: OpenDecode) -> None:
        self.hedges += 1
        assert self.hedging.running == 1, "one at a time, of one request"
        assert action.prefill is not None, "a hedge is a second prefill"
        first = [s for s in self._open(action.choices[0]) if s.side.prefill]
        assert len(first) == 1
        assert first[0].worker != action.prefill, "elsewhere"
        assert first[0].choices == action.choices

    def _open_prefill(self, action: OpenPrefill) -> None:
        assert action.side.attempt in self.granted, "no prefill without a grant"
        decode = Side(action.side.attempt, prefill=False)
        assert not self.sides[decode].dropped
        assert action.side not in self.sides
        assert action.decode == self.sides[decode].worker
        talk = _Side(action.side, action.worker, action.choices, action.token_ids, decode)
        self.sides[action.side] = talk
        if action.worker not in self.views:  # died since it was chosen
            self._fail(talk, FailureKind.WORKER_LOST)
            return
        if action.worker == self.silent:
            return
        delay_s = self.random.uniform(0.0, 0.1)
        self.at(delay_s, lambda: self._serve_prefill(talk))

    def _cancel(self) -> None:
        if not self.walk.ended:
            self.take(self.walk.cancel())
            self.cancelled = True

    # ---- the judgement ---------------------------------------------------------------------------

    def check_end(self) -> None:
        assert self.walk.ended
        assert len(self.ends) == (0 if self.cancelled else 1)
        assert all(talk.dropped for talk in self.sides.values())
        if self.ends and isinstance(self.ends[0], Done):
            assert self.finished == set(range(self.plan.choices))
        assert self.hedging.running == 0
        assert len(self.hedged) == self.hedges
        assert self.timeline.attempts == len([s for s in self.sides if not s.prefill])
