"""PURE. What exists -> the object's status: conditions, counts, columns."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pd_operator.api import Cluster, InvalidCluster, Role, Target
from pd_operator.desired import Desired
from pd_operator.fields import format_duration
from pd_operator.measured import Samples
from pd_operator.observed import Observed, PodView
from pd_operator.rollout import Plan

COLUMNS = ("NAME", "READY", "PREFILL", "DECODE", "TTFT", "TPOT", "MODEL", "AGE")
_ROLE_CONDITION = {
    Role.PREFILL: "PrefillReady",
    Role.DECODE: "DecodeReady",
    Role.COLOCATED: "ColocatedReady",
}


MAX_MESSAGE = 1024
NO_KEYS = "NoAPIKeys"
_NUMBERS = frozenset({"ttft", "tpot", "observed"})


@dataclass(frozen=True, slots=True)
class _Condition:
    type: str
    status: bool | None
    reason: str
    message: str = ""


def status_of(
    cluster: Cluster,
    desired: Desired,
    observed: Observed,
    plan: Plan,
    samples: Samples,
    previous: Mapping[str, Any],
    now: str,
    lost: Collection[str] = (),
) -> dict[str, Any]:
    """The status of an object. `now` is RFC 3339; a condition that didn't change keeps
    its time of transition from `previous`. `lost`: pods that have been missing for too long."""
    locked = _locked(cluster, samples, previous)
    pools = [
        _with_lost(_pool_ready(pool.role, pool.replicas, observed), pool.role, observed, lost)
        for pool in desired.pools
    ]
    router = _group_ready("RouterReady", cluster.router.replicas, observed.routers)
    conditions = [
        _ready([*pools, router], plan, locked),
        _available(desired, observed, locked),
        _progressing(plan, observed),
        _degraded(observed, pools),
        *pools,
        router,
        _Condition("ScalingActive", False, "FixedReplicas"),
        _slo_met(cluster, samples),
    ]
    status: dict[str, Any] = {
        "observedGeneration": cluster.generation,
        "model": cluster.model.name,
        "router": {
            "desired": cluster.router.replicas,
            "ready": sum(pod.serves for pod in observed.routers),
        },
        "conditions": _documents(conditions, cluster.generation, previous, now),
    }
    latencies = _latencies(cluster, samples)
    for pool in desired.pools:
        made = _pool_status(pool.role, pool.replicas, pool.revision, observed)
        text = _observed(pool.role, latencies)
        status[pool.role.value] = made | ({"observed": text} if text else {})
    status["summary"] = {
        name: status.get(name, status.get("colocated", {})).get("readiness", "-")
        for name in ("prefill", "decode")
    }
    return status | latencies


def _latencies(cluster: Cluster, samples: Samples) -> dict[str, str]:
    """Those that are known: no requests, no number."""
    found = {
        "ttft": samples.ttft_s(_percentile(cluster.slo.ttft)),
        "tpot": samples.tpot_s(_percentile(cluster.slo.tpot)),
    }
    return {name: format_latency(value) for name, value in found.items() if value is not None}


def _observed(role: Role, latencies: Mapping[str, str]) -> str:
    """What a pool answers for."""
    ttft, tpot = latencies.get("ttft", ""), latencies.get("tpot", "")
    if role is Role.COLOCATED:
        parts = (("TTFT", ttft), ("TPOT", tpot))
        return ", ".join(f"{name} {value}" for name, value in parts if value)
    return ttft if role is Role.PREFILL else tpot


def only_numbers_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the only news are latencies and what follows from them: these change all the
    time, and needn't be written each time."""
    return _without_numbers(old) == _without_numbers(new)


def _without_numbers(document: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in document.items():
        if name == "conditions":
            made[name] = [one for one in value if one["type"] != "SLOMet"]
        elif name not in _NUMBERS:
            made[name] = _without_numbers(value) if isinstance(value, Mapping) else value
    return made


def invalid_status(
    error: InvalidCluster, generation: int, previous: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of an object that can't be read: what runs stays as it is."""
    text = "; ".join(str(one) for one in error.errors)
    kept = [_from_document(one) for one in previous.get("conditions", [])]
    others = [one for one in kept if one.type not in ("Ready", "Progressing")]
    conditions = [
        _Condition("Ready", False, error.reason, text),
        _Condition("Progressing", False, error.reason, "what runs stays as it is"),
        *others,
    ]
    documents = _documents(conditions, generation, previous, now)
    return {**previous, "observedGeneration": generation, "conditions": documents}


def format_latency(seconds: float) -> str:
    """Two significant digits, so that a status isn't rewritten for noise."""
    if seconds <= 0:
        return "0ms"
    milliseconds = float(f"{seconds * 1000:.2g}")
    if milliseconds >= 10_000:
        return f"{milliseconds / 1000:g}s"
    return f"{milliseconds:g}ms"


def columns(document: Mapping[str, Any], now: datetime) -> dict[str, str]:
    """What `kubectl get pdc` shows of an object."""
    status = document.get("status", {})
    conditions = {one["type"]: one["status"] for one in status.get("conditions", [])}
    summary = status.get("summary", {})
    return {
        "NAME": document["metadata"]["name"],
        "READY": conditions.get("Ready", "Unknown"),
        "PREFILL": summary.get("prefill", "-"),
        "DECODE": summary.get("decode", "-"),
        "TTFT": status.get("ttft", "-"),
        "TPOT": status.get("tpot", "-"),
        "MODEL": status.get("model") or document["spec"]["model"]["name"],
        "AGE": _age(document["metadata"].get("creationTimestamp", ""), now),
    }


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC, to the second, as Kubernetes writes it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _age(created: str, now: datetime) -> str:
    if not created:
        return "-"
    seconds = max(0, int((now - datetime.fromisoformat(created)).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _percentile(target: Target | None) -> float:
    return target.percentile if target else 99.0


def _members(role: Role, observed: Observed) -> list[PodView]:
    return [pod for item in observed.pool_sets(role) for pod in item.pods]


def _pool_status(role: Role, replicas: int, revision: str, observed: Observed) -> dict[str, Any]:
    counts = _counts(role, replicas, revision, observed)
    return {
        **{name: counts[name] for name in ("desired", "ready", "draining")},
        "restarts": sum(pod.restarts for pod in _members(role, observed)),
        "revision": revision,
        "readiness": f"{counts['ready']}/{replicas}",
    }


def pool_counts(desired: Desired, observed: Observed) -> dict[Role, dict[str, int]]:
    """Workers of each pool by state, for those who draw them over time."""
    return {pool.role: _counts(pool.role, pool.replicas, pool.revision, observed)
            for pool in desired.pools}  # fmt: skip


def _counts(role: Role, replicas: int, revision: str, observed: Observed) -> dict[str, int]:
    pods = _members(role, observed)
    return {
        "desired": replicas,
        "ready": sum(pod.serves for pod in pods),
        "draining": sum(pod.terminating for pod in pods),
        "outdated": sum(pod.revision != revision for pod in pods),
    }


def _pool_ready(role: Role, replicas: int, observed: Observed) -> _Condition:
    return _group_ready(_ROLE_CONDITION[role], replicas, _members(role, observed))


def _group_ready(kind: str, replicas: int, pods: Sequence[PodView]) -> _Condition:
    ready = sum(pod.serves for pod in pods)
    message = f"{ready} of {replicas} ready"
    if replicas == 0:
        return _Condition(kind, True, "ScaledToZero")
    if ready >= replicas:
        return _Condition(kind, True, "AllReady", message)
    troubled = _first_problem(pods)
    if troubled is None:
        return _Condition(kind, False, "Starting", message)
    reason, text = troubled
    return _Condition(kind, False, reason, f"{message}; {text}")


def _with_lost(
    condition: _Condition, role: Role, observed: Observed, lost: Collection[str]
) -> _Condition:
    """The condition of a pool that only seems to start: something keeps it from having pods."""
    if condition.reason != "Starting":
        return condition
    for item in observed.pool_sets(role):
        for name in lost:
            if name in item.missing:
                text = f"there is no pod {name}; kubectl describe statefulset {item.name} says why"
                return replace(
                    condition, reason="PodMissing", message=f"{condition.message}; {text}"
                )
    return condition


def _first_problem(pods: Iterable[PodView]) -> tuple[str, str] | None:
    for pod in pods:
        if pod.problem is not None and not pod.terminating:
            return pod.problem.reason, f"{pod.name}: {pod.problem.message}"
    return None


def _locked(cluster: Cluster, samples: Samples, previous: Mapping[str, Any]) -> str:
    """What is wrong with the clients' keys, as routers tell; "" where all is well. While none
    tells, it is as it was."""
    secret, locked = cluster.router.api_keys, samples.locked
    if locked is None:
        locked = any(one["reason"] == NO_KEYS for one in previous.get("conditions", ()))
    if not (secret and locked):
        return ""
    return (
        f"all requests get 401: Secret {secret} of this namespace is missing or has no key; write"
        f" an entry for each client: kubectl create secret generic {secret} -n {cluster.namespace}"
        " --from-literal=CLIENT=KEY"
    )


def _ready(parts: Sequence[_Condition], plan: Plan, locked: str) -> _Condition:
    for part in parts:
        if not part.status:
            return _Condition("Ready", False, part.reason, f"{part.type}: {part.message}")
    if locked:
        return _Condition("Ready", False, NO_KEYS, locked)
    # Routers roll by maxUnavailable 0: as many as there are to be serve all the time.
    if rolling := _rolling_text(plan):
        return _Condition("Ready", False, "RollingOut", rolling)
    empty = [part.type for part in parts[:-1] if part.reason == "ScaledToZero"]
    if len(empty) == len(parts) - 1:
        return _Condition("Ready", True, "ScaledToZero")
    if _ROLE_CONDITION[Role.DECODE] in empty:
        text = "decode has no replicas, so no request can be answered"
        return _Condition("Ready", False, "NoWorkers", text)
    return _Condition("Ready", True, "AllReady")


def _available(desired: Desired, observed: Observed, locked: str) -> _Condition:
    """Whether a request would be answered: by a router, and a worker that decodes."""
    if not any(pod.serves for pod in observed.routers):
        return _Condition("Available", False, "NoRouter", "no router is ready")
    if locked:
        return _Condition("Available", False, NO_KEYS, locked)
    serving = {item.role for item in observed.sets if item.serving}
    if not serving - {Role.PREFILL}:
        role = Role.COLOCATED if desired.pool(Role.COLOCATED) else Role.DECODE
        return _Condition("Available", False, "NoWorkers", f"no {role} worker is ready")
    alone = desired.pool(Role.PREFILL) is not None and Role.PREFILL not in serving
    text = "no prefill worker is ready: decode computes prompts itself" if alone else ""
    return _Condition("Available", True, "Serving", text)


def _rolling_text(plan: Plan, *, routers: bool = False) -> str:
    """Empty: everything is of its newest version; `routers`: these have another one."""
    rolling = sorted(plan.rolling) + ["router"] * routers
    texts = []
    if rolling:
        texts.append(f"{' and '.join(rolling)} on the way to a new revision")
    if plan.leaving:
        texts.append(f"{' and '.join(sorted(plan.leaving))} on the way out")
    return "; ".join(texts)


def _progressing(plan: Plan, observed: Observed) -> _Condition:
    if plan.blocked:
        return _Condition("Progressing", False, "RolloutBlocked", plan.blocked)
    if rolling := _rolling_text(plan, routers=observed.routers_roll):
        return _Condition("Progressing", True, "RollingOut", rolling)
    if plan.held:
        return _Condition("Progressing", False, "ScaleInHeld", plan.held)
    if plan.operations:
        return _Condition("Progressing", True, "Applying")
    return _Condition("Progressing", False, "UpToDate")


def _degraded(observed: Observed, pools: Sequence[_Condition]) -> _Condition:
    everyone = [*observed.routers, *(pod for item in observed.sets for pod in item.pods)]
    troubled = _first_problem(everyone)
    if troubled is not None:
        return _Condition("Degraded", True, *troubled)
    for pool in pools:
        if pool.reason == "PodMissing":
            return _Condition("Degraded", True, pool.reason, f"{pool.type}: {pool.message}")
    return _Condition("Degraded", False, "NoProblem")


def _slo_met(cluster: Cluster, samples: Samples) -> _Condition:
    slo = cluster.slo
    checks = []
    if slo.ttft:
        checks.append(("TTFT", slo.ttft, samples.ttft_s(slo.ttft.percentile)))
    if slo.tpot:
        checks.append(("TPOT", slo.tpot, samples.tpot_s(slo.tpot.percentile)))
    if not checks:
        return _Condition("SLOMet", None, "NoTarget")
    known = [(name, target, value) for name, target, value in checks if value is not None]
    if not known:
        return _Condition("SLOMet", None, "NoData")
    missed = [
        f"p{target.percentile:g} {name} is {format_latency(value)}, "
        f"target {format_duration(target.target_s)}"
        for name, target, value in known
        if value > target.target_s
    ]
    if missed:
        return _Condition("SLOMet", False, "TargetMissed", "; ".join(missed))
    return _Condition("SLOMet", True, "WithinTarget")


def _documents(
    conditions: Sequence[_Condition], generation: int, previous: Mapping[str, Any], now: str
) -> list[dict[str, Any]]:
    before = {one["type"]: one for one in previous.get("conditions", [])}
    documents = []
    for condition in conditions:
        text = {True: "True", False: "False", None: "Unknown"}[condition.status]
        old = before.get(condition.type)
        unchanged = old is not None and old["status"] == text
        documents.append(
            {
                "type": condition.type,
                "status": text,
                "reason": condition.reason,
                "message": _clipped(condition.message),
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if old and unchanged else now,
            }
        )
    return documents


def _clipped(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 1]}…"


def _from_document(document: Mapping[str, Any]) -> _Condition:
    status = {"True": True, "False": False}.get(document["status"])
    return _Condition(document["type"], status, document["reason"], document["message"])
