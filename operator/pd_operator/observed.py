"""PURE. What exists, as Kubernetes objects, and the few facts that decisions need of it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_operator.api import Role
from pd_operator.manifests import REVISION_LABEL, ROLE_LABEL, ROUTER
from pd_operator.podparts import Manifest

_SIGNALLED = 128
_FINISHED = ("Succeeded", "Failed")
_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


class Ref(NamedTuple):
    """An object within the cluster's namespace."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a pod doesn't get ready, in the user's terms; `reason` is stable CamelCase."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodView:
    """`ordinal` is the number of a StatefulSet's pod; -1 for others. `homeless`: no node
    takes it."""

    name: str
    component: str
    revision: str
    ip: str
    ordinal: int
    ready: bool
    terminating: bool
    restarts: int
    problem: Problem | None
    created: str = ""
    homeless: bool = False
    template: str = ""  # of a Deployment: which version of it
    uid: str = ""

    @property
    def process(self) -> str:
        """Another one after each restart, though name and address stay."""
        return f"{self.uid or self.name}/{self.restarts}"

    @property
    def serves(self) -> bool:
        return self.ready and not self.terminating


@dataclass(frozen=True, slots=True)
class SetView:
    """A StatefulSet of a pool and its pods, by ordinal."""

    name: str
    role: Role
    revision: str
    replicas: int
    created: str
    pods: tuple[PodView, ...] = ()

    @property
    def serving(self) -> int:
        return sum(pod.serves for pod in self.pods)

    @property
    def missing(self) -> tuple[str, ...]:
        """Pods that there are to be and aren't, not even on their way."""
        there = {pod.ordinal for pod in self.pods}
        return tuple(f"{self.name}-{n}" for n in range(self.replicas) if n not in there)

    def serving_below(self, ordinal: int) -> int:
        """Serving pods that a scale-in to so many replicas leaves."""
        return sum(pod.serves for pod in self.pods if pod.ordinal < ordinal)


@dataclass(frozen=True, slots=True)
class Observed:
    """All objects of one cluster."""

    objects: Mapping[Ref, Manifest]
    sets: tuple[SetView, ...]
    routers: tuple[PodView, ...]

    @property
    def routers_roll(self) -> bool:
        """There are routers of two versions."""
        return len({pod.template for pod in self.routers if not pod.terminating}) > 1

    @property
    def router_processes(self) -> dict[str, str]:
        """Where each process of a router that serves is."""
        return {pod.process: pod.ip for pod in self.routers if pod.serves and pod.ip}

    @property
    def missing(self) -> tuple[str, ...]:
        """Pods of all pools that there are to be and aren't."""
        return tuple(name for item in self.sets for name in item.missing)

    def pool_sets(self, role: Role) -> tuple[SetView, ...]:
        return tuple(item for item in self.sets if item.role is role)


def observe(objects: Iterable[Manifest]) -> Observed:
    """The view of a cluster's objects, pods included."""
    by_ref = {Ref(item["kind"], item["metadata"]["name"]): item for item in objects}
    pods = [
        pod_view(item) for ref, item in by_ref.items() if ref.kind == "Pod" and not _is_over(item)
    ]
    sets = [
        _set_view(item, pods)
        for ref, item in by_ref.items()
        if ref.kind == "StatefulSet" and _label(item, ROLE_LABEL) in list(Role)
    ]
    sets.sort(key=lambda item: (item.created, item.name))
    routers = tuple(pod for pod in pods if pod.component == ROUTER)
    return Observed(by_ref, tuple(sets), routers)


def _is_over(pod: Manifest) -> bool:
    """An evicted router's pod stays there, although another one has taken its place."""
    status = pod.get("status", {})
    return _label(pod, ROLE_LABEL) == ROUTER and status.get("phase") in _FINISHED


def _label(item: Manifest, label: str) -> str:
    return str(item["metadata"].get("labels", {}).get(label, ""))


def _set_view(item: Manifest, pods: Iterable[PodView]) -> SetView:
    metadata = item["metadata"]
    revision, role = _label(item, REVISION_LABEL), Role(_label(item, ROLE_LABEL))
    mine = [pod for pod in pods if pod.component == role and pod.revision == revision]
    return SetView(
        metadata["name"],
        role,
        revision,
        int(item["spec"].get("replicas", 1)),
        metadata.get("creationTimestamp", ""),
        tuple(sorted(mine, key=lambda pod: pod.ordinal)),
    )


def pod_view(item: Manifest) -> PodView:
    """The facts of a Pod object."""
    metadata, status = item["metadata"], item.get("status", {})
    statuses = status.get("containerStatuses", [])
    tail = metadata["name"].rpartition("-")[2]
    return PodView(
        name=metadata["name"],
        component=_label(item, ROLE_LABEL),
        revision=_label(item, REVISION_LABEL),
        ip=status.get("podIP", ""),
        ordinal=int(tail) if tail.isdecimal() else -1,
        ready=_condition(status, "Ready") == "True",
        terminating="deletionTimestamp" in metadata,
        restarts=sum(int(one.get("restartCount", 0)) for one in statuses),
        problem=_problem(item),
        created=metadata.get("creationTimestamp", ""),
        homeless=_condition(status, "PodScheduled") == "False",
        template=_label(item, "pod-template-hash"),
        uid=metadata.get("uid", ""),
    )


def _condition(status: Manifest, kind: str) -> str:
    for condition in status.get("conditions", []):
        if condition["type"] == kind:
            return str(condition["status"])
    return "Unknown"


def _problem(pod: Manifest) -> Problem | None:
    """The first thing that keeps a pod from being ready and won't pass by waiting."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            # What follows is about evicting others, and long.
            message = str(condition.get("message", "")).partition(" preemption:")[0].strip()
            return Problem(condition.get("reason", "Unschedulable"), message)
    everyone = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    for one in everyone:
        found = _container_problem(one)
        if found is not None:
            return found
    return None


def _container_problem(status: Manifest) -> Problem | None:
    waiting = status.get("state", {}).get("waiting")
    if waiting is None:
        return _restarting(status)
    reason = waiting.get("reason", "")
    if reason in _IMAGE_REASONS:
        return Problem("ImagePullBackOff", f"image {status.get('image', '')}: {_pull(waiting)}")
    if reason == "CrashLoopBackOff":
        return Problem(reason, f"{status['name']} {_how_it_ended(status)}")
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
        return Problem(reason, f"{status['name']}: {waiting.get('message', '')}")
    return None


def _pull(waiting: Manifest) -> str:
    """The registry's answer: it stands in both of the messages that take turns."""
    message = str(waiting.get("message", ""))
    if message.startswith("Back-off pulling image"):
        message = message.partition("ErrImagePull: ")[2]
    return message or "can't be pulled"


def _restarting(status: Manifest) -> Problem | None:
    """One that runs again after a crash: until it is ready, why it crashed is what counts."""
    state = status.get("state", {})
    ended = state.get("terminated") or status.get("lastState", {}).get("terminated") or {}
    if "terminated" in state:
        if not ended.get("exitCode"):
            return None
        return Problem("ContainerRestarting", f"{status['name']} {_how_it_ended(status)}")
    if status.get("ready") or "running" not in state:
        return None
    if not status.get("restartCount") or not ended.get("exitCode"):
        return None
    return Problem("ContainerRestarting", f"{status['name']} {_how_it_ended(status)}")


def _how_it_ended(status: Manifest) -> str:
    ended: Any = status.get("state", {}).get("terminated")
    ended = ended or status.get("lastState", {}).get("terminated") or {}
    code = ended.get("exitCode", "unknown")
    if isinstance(code, int) and code > _SIGNALLED:  # its last line had no part in that
        return f"was killed by signal {code - _SIGNALLED}"
    lines = [line for line in str(ended.get("message", "")).splitlines() if line.strip()]
    how = f"ended with exit code {code}"
    return f"{how}: {lines[-1].strip()}" if lines else how
