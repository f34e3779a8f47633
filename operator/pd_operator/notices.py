"""PURE. What is worth an Event: changes of an object's conditions, not their states."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOLD = ("Ready", "Progressing", "Degraded", "ScalingActive")
_BAD = {"Ready": "False", "Degraded": "True"}
_QUIET = frozenset(
    {
        *("Starting", "Applying", "NoProblem", "UpToDate", "FixedReplicas"),
        *("NoData", "NoCapacityYet"),  # so does every pool begin
    }
)
"""Reasons that only say that things go their way."""
MAX_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell the user. `since` makes it the same one after a restart."""

    reason: str
    text: str
    warning: bool = False
    since: str = ""


def of_change(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Notice]:
    """The notices of one status write."""
    before = {one["type"]: one for one in previous.get("conditions", ())}
    found = []
    for one in new.get("conditions", ()):
        kind, reason = one["type"], one["reason"]
        old = before.get(kind)
        if kind not in _TOLD or reason in _QUIET:
            continue
        if old is not None and (old["status"], old["reason"]) == (one["status"], reason):
            continue
        text = f"{kind}: {one['message'] or reason}"[:MAX_TEXT]
        warning = one["status"] == _BAD.get(kind)
        found.append(Notice(reason, text, warning, one["lastTransitionTime"]))
    return found


@dataclass(slots=True)
class Budget:
    """How many events of one reason an object may still have: a burst, then one now and then."""

    burst: int = 10
    refill_s: float = 60.0
    left: float = 10.0
    at_s: float = 0.0

    def take(self, now_s: float) -> bool:
        self.left = min(self.burst, self.left + (now_s - self.at_s) / self.refill_s)
        self.at_s = now_s
        if self.left < 1:
            return False
        self.left -= 1
        return True
