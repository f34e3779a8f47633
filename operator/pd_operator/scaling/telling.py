"""PURE. Decisions in the object's status, and what of them is worth an event.

Only changes of a pool's size are kept there, with their reason: numbers that move with every
look would be a write with every look.
"""

from collections.abc import Mapping
from typing import Any

from pd_operator.api import Cluster, Role, ScalingMode
from pd_operator.notices import Notice
from pd_operator.replicas import Standing
from pd_operator.scaling.types import Decision, Scale

MOVES = ("MoreDemand", "Burst", "LessDemand", "OutOfBounds", "Budget", "Ratio")
"""Why a pool's size changes."""
_BLIND = ("NoData", "StaleData", "NoCapacityYet")
_LIMITED = ("AtMaximum", "Budget", "PartialData")
_TYPE = "ScalingActive"


def with_scaling(
    status: Mapping[str, Any],
    cluster: Cluster,
    before: Mapping[Role, Standing],
    decisions: Mapping[Role, Decision],
    previous: Mapping[str, Any],
    now: str,
) -> dict[str, Any]:
    """A PDCluster's status with each pool's last decision and the condition ScalingActive."""
    made = dict(status)
    for role, decision in decisions.items():
        last = previous.get(role.value, {}).get("decision")
        if isinstance(decision, Scale):
            last = {
                "replicas": decision.replicas,
                "reason": decision.reason,
                "message": decision.message,
                "time": now,
            }
        if last is not None:
            made[role.value] = {**made.get(role.value, {}), "decision": last}
    condition = _condition(cluster, before, decisions)
    made["conditions"] = [
        _dated({**one, **condition}, previous, now) if one["type"] == _TYPE else one
        for one in status.get("conditions", [])
    ]
    return made


def notices(
    decisions: Mapping[Role, Decision], before: Mapping[Role, Standing], now: str
) -> list[Notice]:
    """One event for each pool whose size changes."""
    return [
        Notice(
            "ScaledUp" if decision.replicas > before[role].replicas else "ScaledDown",
            f"{role} from {before[role].replicas} to {decision.replicas} workers: "
            f"{decision.reason}: {decision.message}",
            since=now,
        )
        for role, decision in decisions.items()
        if isinstance(decision, Scale)
    ]


def _condition(
    cluster: Cluster, before: Mapping[Role, Standing], decisions: Mapping[Role, Decision]
) -> dict[str, str]:
    """The worst of all pools. Its text holds no number that moves."""
    modes = {pool.role: pool.scaling.mode if pool.scaling else None for pool in cluster.pools}
    ours = {role: decisions[role] for role, mode in modes.items() if mode is ScalingMode.SLO}
    for role, decision in ours.items():
        if decision.reason in _BLIND:
            return _text("False", decision.reason, f"{role}: {decision.message}")
    for role, decision in ours.items():
        if decision.numbers.get("infeasible"):
            message = f"{role}: one request alone misses the target, more workers can't meet it"
            return _text("True", "SLOInfeasible", message)
    for role, decision in ours.items():
        if decision.reason in _LIMITED:
            return _text("True", decision.reason, f"{role} is held at {decision.replicas} workers")
    for role, mode in modes.items():
        asked = before[role].wanted
        if mode is ScalingMode.EXTERNAL and asked not in (None, before[role].replicas):
            message = f"{role} is to have {asked}, out of bounds: {before[role].replicas} it is"
            return _text("True", "OutOfBounds", message)
    if ours:
        return _text("True", "FollowsSLO", f"{' and '.join(sorted(ours))} by their targets")
    if ScalingMode.EXTERNAL in modes.values():
        return _text("True", "External", "PDPools say how many workers there are")
    return _text("False", "FixedReplicas", "")


def _text(status: str, reason: str, message: str) -> dict[str, str]:
    return {"status": status, "reason": reason, "message": message}


def _dated(condition: dict[str, Any], previous: Mapping[str, Any], now: str) -> dict[str, Any]:
    """Since when its status is what it is."""
    before = [one for one in previous.get("conditions", []) if one["type"] == condition["type"]]
    same = before and before[0]["status"] == condition["status"]
    return {**condition, "lastTransitionTime": before[0]["lastTransitionTime"] if same else now}
