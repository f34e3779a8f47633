"""When a worker is late or fails too often, and what that means for it. Pure: time is an
argument.

A worker that has work and shows no sign of it for too long is late: its breaker opens,
so it gets nothing new and its requests move on. One that fails half of its requests, by
its own fault, gets nothing new either: failing fast it would look idle, and attract all.
Once it shows life again, one request is let through (half open); if that one is answered, or
where failures were the reason if something is computed for it, all may come. What becomes of
requests that were sent before tells nothing of how it is now.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from pd_router.fleet import LoadReport

_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 30.0
_OUTCOMES = 10
"""So many of a worker's last outcomes are looked at."""
_TOO_MANY = 5.0
"""Of them failed: it opens. Five in a row are enough, and so is every other one."""
_STEPS = 20
# A step with a whole long prompt in it takes as long as the prompt: allow a multiple of
# what the worker measured at its start with short ones on an idle machine.
_PREFILL_ALLOWANCE = 10.0
_UNKNOWN_TOKENS_PER_S = 100.0


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """One worker's breaker. `probe`: the one request of the half-open state that is out, or
    chosen to go; 0: none is. Each has a number of its own."""

    state: State = State.CLOSED
    probe: int = 0
    reason: str = ""
    faulty: bool = False  # failures opened it: only something computed closes it
    _pause_s: float = field(default=_FIRST_PAUSE_S, repr=False)
    _retry_at: float = field(default=0.0, repr=False)
    _since: float = field(default=-inf, repr=False)  # when it last began to let any through
    _probes: int = field(default=0, repr=False)
    _failed_at: float | None = field(default=None, repr=False)
    _outcomes: deque[float] = field(default_factory=lambda: deque(maxlen=_OUTCOMES), repr=False)

    @property
    def lets_through(self) -> bool:
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and not self.probe)

    def trip(self, reason: str, now: float, *, faulty: bool = False) -> None:
        """The worker is late, or `faulty`. Each time in a row it is left alone for twice as
        long."""
        if self.state is not State.CLOSED:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self.state = State.OPEN
        self.probe = 0
        self.faulty = self.faulty or faulty
        self.reason = reason
        self._retry_at = now + self._pause_s

    def alive(self, now: float) -> None:
        """A heartbeat shows that it could work."""
        if self.state is State.OPEN and now >= self._retry_at:
            self.state = State.HALF_OPEN
            self.probe = 0
            self._since = now

    def chosen(self) -> int:
        """A request is to go to it. The probe's number if that is the probe, else 0."""
        if self.state is not State.HALF_OPEN or self.probe:
            return 0
        self._probes += 1
        self.probe = self._probes
        return self.probe

    def answered(self, probe: int) -> bool:
        """It answered a request, whatever it said; says whether that has closed the breaker.
        `probe`: what `chosen` said of that request."""
        if self.faulty or not self._is_probe(probe):
            return False
        self._close()
        return True

    def succeeded(self, probe: int) -> bool:
        """It computed something for a request; says whether that has closed the breaker."""
        self._outcomes.append(0.0)
        if not self._is_probe(probe):
            return False
        self._close()
        return True

    def failed(self, share: float, now: float, sent_at: float) -> bool:
        """It failed a request, alone (1) or as one of several that may be to blame; says
        whether that is too much. One step's failure ends all requests in it: what came at
        one moment counts once. One that was sent before the worker was let through again
        doesn't count."""
        if now == self._failed_at or sent_at < self._since:
            return False
        self._failed_at = now
        self._outcomes.append(share)
        if self.state is State.CLOSED:
            return sum(self._outcomes) >= _TOO_MANY
        return self.state is State.HALF_OPEN

    def over(self, probe: int) -> None:
        """A request ended; if it was the probe, and told nothing (its client left), another
        may go."""
        if self._is_probe(probe):
            self.probe = 0

    def _is_probe(self, probe: int) -> bool:
        return self.state is State.HALF_OPEN and 0 < probe == self.probe

    def _close(self) -> None:
        self.state = State.CLOSED
        self.probe = 0
        self.faulty = False
        self.reason = ""
        self._pause_s = _FIRST_PAUSE_S
        self._outcomes.clear()


@dataclass(slots=True)
class Progress:
    """Whether a worker that has work moves. Frames and steps count as moving."""

    least_s: float = 2.0
    prefill_tokens_per_s: float = 0.0  # as measured by the worker; 0: unknown
    expecting: int = 0  # live requests that wait for one of its steps
    last: float = 0.0

    def expect(self, now: float) -> None:
        if self.expecting == 0:
            self.last = now
        self.expecting += 1

    def expect_no_more(self) -> None:
        self.expecting -= 1

    def moved(self, now: float) -> None:
        self.last = now

    def heartbeat(self, before: LoadReport, load: LoadReport, now: float) -> bool:
        """Takes a heartbeat in; says whether it proves that steps go on (or aren't due)."""
        counted = bool(load.steps or before.steps)
        # An engine that doesn't count its steps: any change in what it holds will do.
        changed = load.steps != before.steps if counted else load != before
        moves = changed or not load.busy
        if moves:
            self.last = now
        return moves

    def allowed_s(self, step_s: float, pending_tokens: int) -> float:
        """How long it may be silent: `least_s`, 20 steps, or what its prompts may take."""
        rate = self.prefill_tokens_per_s or _UNKNOWN_TOKENS_PER_S
        return max(self.least_s, _STEPS * step_s, _PREFILL_ALLOWANCE * pending_tokens / rate)

    def late(self, step_s: float, pending_tokens: int, now: float) -> str | None:
        """Why it is late, or None."""
        if not self.expecting:
            return None
        silent_s = now - self.last
        allowed_s = self.allowed_s(step_s, pending_tokens)
        if silent_s <= allowed_s:
            return None
        return (
            f"no step seen for {silent_s:.1f} s ({allowed_s:.1f} s are allowed) "
            f"with {self.expecting} requests waiting for one"
        )
