"""PURE. Who may write: what a Lease on the API server means to one candidate, over time.

Times are this machine's own, and only durations between them count: no two clocks are ever
compared. A holder stops writing `deadline_s` after the *start* of its last successful
renewal; everyone else waits `duration_s` after having *seen* that renewal, which was later.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Terms:
    """In seconds. A renewal must fit into the period, several periods into the deadline."""

    duration_s: float = 15.0
    deadline_s: float = 10.0
    period_s: float = 2.0
    timeout_s: float = 1.5

    def __post_init__(self) -> None:
        if not self.timeout_s < self.period_s < self.deadline_s < self.duration_s:
            raise ValueError("a lease needs timeout < period < deadline < duration")


@dataclass(frozen=True, slots=True)
class Record:
    """A Lease as the server has it. `version` changes with every renewal."""

    holder: str
    duration_s: float
    transitions: int
    version: str


class Leadership:
    """One candidate's view of one Lease."""

    def __init__(self, identity: str, terms: Terms) -> None:
        self.identity = identity
        self.terms = terms
        self.record: Record | None = None
        self._seen_at = 0.0
        self._valid_until = float("-inf")

    def saw(self, record: Record | None, now_s: float) -> None:
        """What the server has. A record that hasn't changed keeps the time of its first sight."""
        if record != self.record or record is None:
            self.record, self._seen_at = record, now_s

    def may_take(self, now_s: float) -> bool:
        """Whether to write ourselves into it: it is free, ours, or its holder is silent."""
        record = self.record
        if record is None or record.holder in ("", self.identity):
            return True
        # Who holds it may have longer terms than ours.
        patience_s = max(record.duration_s, self.terms.duration_s)
        return now_s - self._seen_at >= patience_s

    def next_transitions(self) -> int:
        """How often the Lease will have changed hands once we have it."""
        if self.record is None:
            return 0
        return self.record.transitions + (self.record.holder != self.identity)

    def took(self, record: Record, began_s: float) -> None:
        """A write of ours, begun at that time, has succeeded."""
        self.record, self._seen_at = record, began_s
        self._valid_until = began_s + self.terms.deadline_s

    def lost(self) -> None:
        """Somebody else has it."""
        self._valid_until = float("-inf")

    def released(self, record: Record, now_s: float) -> None:
        """We gave it up."""
        self.lost()
        self.saw(replace(record, holder=""), now_s)

    def holds(self, now_s: float) -> bool:
        """Whether a write that begins now is covered."""
        return now_s < self._valid_until

    def left_s(self, now_s: float) -> float:
        return max(0.0, self._valid_until - now_s)
