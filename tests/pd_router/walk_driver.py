"""Drives a walk by hand: events in, actions out, and the places that its attempts get."""

from dataclasses import dataclass, field

from pd_core.failures import Failure, FailureKind
from pd_router.fleet import WorkerId
from pd_router.hedging import Hedging
from pd_router.moves import (
    Action,
    Blamed,
    Committed,
    Granted,
    OpenDecode,
    Prefilled,
    Side,
    Token,
    WalkConfig,
)
from pd_router.policy import Exclusions, Need, Placement, Unplaced
from pd_router.types import Considered, FinishReason, GenerateRequest, Sampling, Timeline
from pd_router.walk import Walk

P0, P1 = WorkerId("p-0", "e"), WorkerId("p-1", "e")
D0, D1 = WorkerId("d-0", "e"), WorkerId("d-1", "e")
PROMPT = (1, 2, 3)
GRANT = Granted(b"secret", prefix_tokens=16, wait_s=0.5, kv_address="kv:1")


def first(
    choices: int = 1, index: int = 0, finish: FinishReason | None = None
) -> tuple[Token, ...]:
    return tuple(Token(c, index, 100 * c + index, finish) for c in range(choices))


def failure(kind: FailureKind) -> Failure:
    return Failure(kind, "as told")


@dataclass
class Driver:
    """A walk, its time, and the places that the next attempts get, in turn."""

    choices: int = 1
    max_tokens: int = 10
    config: WalkConfig = field(default_factory=WalkConfig)
    places: list[tuple[WorkerId, WorkerId | None] | Unplaced] = field(
        default_factory=lambda: [(D0, P0), (D1, P1), (D0, P0), (D1, P1), (D0, P0), (D1, P1)]
    )
    hedging: Hedging = field(default_factory=Hedging)
    now: float = 100.0
    decode_at: WorkerId | None = None
    ttft_s: float = 0.0  # that is predicted, wherever
    blamed: list[tuple[WorkerId, ...]] = field(default_factory=list)
    sent_at: list[tuple[float, ...]] = field(default_factory=list)
    asked: list[tuple[Need, Exclusions, tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = GenerateRequest(
            "r", PROMPT, self.choices, Sampling(max_tokens=self.max_tokens), deadline_s=600.0
        )
        self.line = Timeline("r", accepted=self.now, prompt_tokens=len(PROMPT))
        self.walk = Walk(request, self._place, self.line, self.config, self.hedging)

    def _place(
        self,
        need: Need,
        exclusions: Exclusions,
        token_ids: tuple[int, ...],
        decode_at: WorkerId | None,
    ) -> Placement | Unplaced:
        self.decode_at = decode_at
        self.asked.append((need, exclusions.copy(), token_ids))
        place = self.places.pop(0)
        if isinstance(place, Unplaced):
            return place
        way = Considered(
            place[0].name, place[1].name if place[1] else None, 3, 0, 0, self.ttft_s, 9
        )
        return Placement(place[0], place[1], 1, 3, "because", (way,))

    def _said(self, actions: list[Action]) -> list[Action]:
        """All but whose fault something was: that is told apart."""
        for action in actions:
            if isinstance(action, Blamed):
                self.blamed.append(tuple(one.worker for one in action.workers))
                self.sent_at.append(tuple(one.sent_at for one in action.workers))
        return [action for action in actions if not isinstance(action, Blamed)]

    def start(self) -> list[Action]:
        return self.walk.start(self.now)

    def granted(self, attempt: int = 1, event: Granted = GRANT) -> list[Action]:
        return self.walk.granted(Side(attempt, False), event, self.now)

    def prefilled(
        self, tokens: tuple[Token, ...], attempt: int = 1, *, here: bool = False, cached: int = 2
    ) -> list[Action]:
        event = Prefilled(tokens, cached, queue_s=0.1, prefill_s=0.2, transport="tcp")
        return self._said(self.walk.prefilled(Side(attempt, not here), event, self.now))

    def committed(self, tokens: tuple[Token, ...], attempt: int = 1) -> list[Action]:
        event = Committed(tokens, cached_tokens=2, kv_bytes=64, transfer_s=0.3)
        return self._said(self.walk.committed(Side(attempt, False), event, self.now))

    def token(
        self, index: int, choice: int = 0, attempt: int = 1, finish: FinishReason | None = None
    ) -> list[Action]:
        token = Token(choice, index, 100 * choice + index, finish)
        return self._said(self.walk.token(Side(attempt, False), token, self.now))

    def failed(self, kind: FailureKind, attempt: int = 1, *, prefill: bool = False) -> list[Action]:
        return self._said(self.walk.failed(Side(attempt, prefill), failure(kind), self.now))

    def tick(self, after_s: float) -> list[Action]:
        self.now += after_s
        return self._said(self.walk.tick(self.now))

    def to_decode(self) -> None:
        """Through the first attempt up to the commit."""
        self.start()
        self.granted()
        self.prefilled(first(self.choices))
        self.committed(first(self.choices))

    def retry(self) -> OpenDecode:
        """The next attempt, after the back-off."""
        (opened,) = self.tick(1.0)
        assert isinstance(opened, OpenDecode)
        return opened


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]
