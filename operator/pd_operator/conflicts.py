"""PURE. What keeps a PDCluster from getting an object: its name is taken, or it is refused.

Foreign objects are never taken over: a force-apply would, silently, and with them whatever
depends on them. They are reported, and ours are made as soon as the name is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pd_operator.api import KIND
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest


@dataclass(frozen=True, slots=True)
class Taken:
    """`by_predecessor`: it belongs to a deleted PDCluster of the same name, and will go."""

    ref: Ref
    by_predecessor: bool
    reason: ClassVar[str] = "NameTaken"

    def __str__(self) -> str:
        name = f"{self.ref.kind} {self.ref.name}"
        if self.by_predecessor:
            return f"{name} of an earlier PDCluster of this name is still being deleted"
        return f"{name} exists and isn't ours; delete it, or name this PDCluster differently"


@dataclass(frozen=True, slots=True)
class Refused:
    """The API server doesn't take it: a rule, a quota, a missing right."""

    ref: Ref
    message: str
    reason: ClassVar[str] = "Refused"

    def __str__(self) -> str:
        return f"{self.ref.kind} {self.ref.name} is refused: {self.message}"


@dataclass(frozen=True, slots=True)
class NotIssued:
    """cert-manager hasn't made a certificate that pods wait for."""

    ref: Ref
    message: str
    reason: ClassVar[str] = "CertificateNotIssued"

    def __str__(self) -> str:
        return f"{self.ref.kind} {self.ref.name}: cert-manager says: {self.message}"


Obstacle = Taken | Refused | NotIssued


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


def with_obstacles(
    status: Mapping[str, Any], found: Sequence[Obstacle], previous: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of a PDCluster that lacks objects."""
    if not found:
        return dict(status)
    message = "; ".join(str(one) for one in found)
    before = {one["type"]: one for one in previous.get("conditions", [])}
    conditions = []
    for one in status["conditions"]:
        if one["type"] not in ("Ready", "Progressing"):
            conditions.append(one)
            continue
        old = before.get(one["type"])
        since = old["lastTransitionTime"] if old and old["status"] == "False" else now
        changed = {"status": "False", "reason": found[0].reason, "message": message}
        conditions.append({**one, **changed, "lastTransitionTime": since})
    return {**status, "conditions": conditions}
