"""PURE. Objects that have a name which a PDCluster needs, and aren't its own.

They are never taken over: a force-apply would, silently, and with them whatever depends on
them. They are reported, and made as soon as the name is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_operator.api import KIND
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest

REASON = "NameTaken"


@dataclass(frozen=True, slots=True)
class Taken:
    """`by_predecessor`: it belongs to a deleted PDCluster of the same name, and will go."""

    ref: Ref
    by_predecessor: bool

    def __str__(self) -> str:
        name = f"{self.ref.kind} {self.ref.name}"
        if self.by_predecessor:
            return f"{name} of an earlier PDCluster of this name is still being deleted"
        return f"{name} exists and isn't ours; delete it, or name this PDCluster differently"


class NameTaken(Exception):
    """A write that wasn't made for that reason."""

    def __init__(self, taken: Taken) -> None:
        super().__init__(str(taken))
        self.taken = taken


def is_owned(item: Manifest, uid: str) -> bool:
    """Whether an object's controller is the PDCluster of that uid."""
    return controller_uid(item) == uid


def controller_uid(item: Manifest) -> str:
    return str(_controller(item).get("uid", ""))


def is_pdclusters(item: Manifest) -> bool:
    """Whether an object's controller is some PDCluster."""
    return _controller(item).get("kind") == KIND


def _controller(item: Manifest) -> Mapping[str, Any]:
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            found: Mapping[str, Any] = owner
            return found
    return {}


def with_taken(
    status: Mapping[str, Any], taken: Sequence[Taken], previous: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of a PDCluster that lacks objects since their names are taken."""
    if not taken:
        return dict(status)
    message = "; ".join(str(one) for one in taken)
    before = {one["type"]: one for one in previous.get("conditions", [])}
    conditions = []
    for one in status["conditions"]:
        if one["type"] not in ("Ready", "Progressing"):
            conditions.append(one)
            continue
        old = before.get(one["type"])
        since = old["lastTransitionTime"] if old and old["status"] == "False" else now
        changed = {"status": "False", "reason": REASON, "message": message}
        conditions.append({**one, **changed, "lastTransitionTime": since})
    return {**status, "conditions": conditions}
