"""PURE. Whether alerts told the truth: what fired, held against what clients saw.

Alerts look at windows of time; so does this, with room on both sides: an alert is false where
clients saw much less than it says, and missing where they saw much more for much longer than it
waits. In between either is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_MUCH = 2.0
"""Times the alert's limit."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, as its client saw it. Times in seconds; None: there was none."""

    ended: float
    ttft_s: float | None
    tpot_s: float | None
    error: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """An alert fires where the share of bad requests is over `limit` in both windows of any of
    `windows` (long, short), for `lasting_s`. `late_s`: its bad is a time beyond this."""

    name: str
    kind: str  # ttft, tpot, error
    limit: float
    windows: tuple[tuple[float, float], ...]
    lasting_s: float
    late_s: float = 0.0

    def is_bad(self, seen: Seen) -> bool | None:
        """None: it says nothing of this request."""
        if self.kind == "error":
            return seen.error
        took = seen.ttft_s if self.kind == "ttft" else seen.tpot_s
        return None if took is None else took > self.late_s


def share(rule: Rule, seen: Sequence[Seen], until: float, window_s: float) -> float:
    """Of bad requests among those that ended in the window."""
    judged = [rule.is_bad(one) for one in seen if until - window_s < one.ended <= until]
    known = [one for one in judged if one is not None]
    return sum(known) / len(known) if known else 0.0


def false_alarms(
    rule: Rule, seen: Sequence[Seen], fired: Sequence[tuple[float, frozenset[str]]], slack_s: float
) -> list[float]:
    """When it fired though clients saw little of it. `slack_s`: what may pass between a request's
    end and an alert that looks back on it."""
    return [
        at
        for at, names in fired
        if rule.name in names and not _saw(rule, seen, at, slack_s, rule.limit / _MUCH)
    ]


def _saw(rule: Rule, seen: Sequence[Seen], at: float, slack_s: float, least: float) -> bool:
    """Whether clients saw that much in any of its windows, lately."""
    windows = {window for pair in rule.windows for window in pair}
    return any(
        share(rule, seen, until, window) > least
        for window in windows
        for until in (at, at - slack_s / 2, at - slack_s)
    )


def missing_alarms(
    rule: Rule,
    seen: Sequence[Seen],
    fired: Sequence[tuple[float, frozenset[str]]],
    slack_s: float,
) -> list[float]:
    """When it hadn't fired though clients had seen much of it for long."""
    missing: list[float] = []
    since: float | None = None
    for at, names in fired:
        much = min(_MUCH * rule.limit, (1 + rule.limit) / 2)
        if not any(all(share(rule, seen, at, w) > much for w in pair) for pair in rule.windows):
            since = None
            continue
        since = at if since is None else since
        if rule.name not in names and at - since > rule.lasting_s + slack_s:
            missing.append(at)
    return missing


def told(
    rules: Sequence[Rule],
    seen: Sequence[Seen],
    fired: Sequence[tuple[float, frozenset[str]]],
    slack_s: float,
) -> Mapping[str, tuple[int, list[float], list[float]]]:
    """Of each alert: in how many looks it fired, when falsely, when not though it should have."""
    return {
        rule.name: (
            sum(rule.name in names for _, names in fired),
            false_alarms(rule, seen, fired, slack_s),
            missing_alarms(rule, seen, fired, slack_s),
        )
        for rule in rules
    }
