"""One pull: reserve room at the target, have the holder send, until it's there or late. Pure.

Events go in with the time, actions come out. Whatever the workers do, it's over within its
limit, exactly once, and both sides are closed by then: the prompt is computed in any case, with
the copy in the prefix cache or without it.
"""

from dataclasses import dataclass

from pd_core.failures import Failure, FailureKind
from pd_router.moves import Committed, Granted
from pd_router.pulls import Pull


@dataclass(frozen=True, slots=True)
class AskTarget:
    """Send Pull."""


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Send Share, with the copy bound for this grant."""

    grant: Granted


@dataclass(frozen=True, slots=True)
class Close:
    """Listen no more to the target, or else the holder; `cancel`: and tell it."""

    target: bool
    cancel: bool


@dataclass(frozen=True, slots=True)
class Over:
    """The prompt goes on. The last action. `why` is empty where the copy is there; `broken`:
    the next one between these two would most likely fail, too."""

    kv_bytes: int
    took_s: float
    why: str = ""
    broken: bool = False
    had_tokens: int = 0  # that the target had by then


PullAction = AskTarget | AskHolder | Close | Over


class PullWalk:
    """See the module. Feed events until `ended`; call `tick` at `due`."""

    def __init__(self, pull: Pull, now: float) -> None:
        self._pull = pull
        self._began = now
        self.due = now + pull.limit_s
        self.ended = False
        self._open: dict[bool, None] = {}  # sides: True is the target

    def start(self) -> list[PullAction]:
        self._open[True] = None
        return [AskTarget()]

    def granted(self, grant: Granted) -> list[PullAction]:
        """The target has room."""
        if self.ended or False in self._open:
            return []
        self._open[False] = None
        return [AskHolder(grant)]

    def committed(self, event: Committed, now: float) -> list[PullAction]:
        """The target has the copy: of what the holder says nobody needs to hear any more."""
        if self.ended:
            return []
        over = Over(event.kv_bytes, now - self._began, had_tokens=event.cached_tokens)
        self.ended = True
        return [*self._close(cancel=False), over]

    def failed(self, *, target: bool, failure: Failure, now: float) -> list[PullAction]:
        """One side has given up, or is lost: the other is told."""
        if self.ended or target not in self._open:
            return []
        del self._open[target]
        closed: list[PullAction] = [Close(target, cancel=False)]
        broken = failure.kind is not FailureKind.NO_CAPACITY  # that may pass in a moment
        over = self._failed(now, failure.message, broken=broken)
        return [*closed, *self._close(cancel=True), over]

    def tick(self, now: float) -> list[PullAction]:
        """Computing is sooner from now on."""
        if self.ended or now < self.due:
            return []
        why = f"it took longer than {self._pull.limit_s:.3f} s"
        return [*self._close(cancel=True), self._failed(now, why, broken=True)]

    def cancel(self) -> list[PullAction]:
        """The request wants it no more."""
        self.ended = True
        return self._close(cancel=True)

    def _close(self, *, cancel: bool) -> list[PullAction]:
        sides, self._open = self._open, {}
        return [Close(target, cancel) for target in sides]

    def _failed(self, now: float, why: str, *, broken: bool) -> Over:
        self.ended = True
        return Over(0, now - self._began, why, broken)
