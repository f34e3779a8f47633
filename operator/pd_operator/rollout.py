"""PURE. (desired, observed) -> the next ordered operations.

A changed pool gets a new StatefulSet beside the old one. The new one grows by surge,
the old one shrinks by what the new one serves, and goes when it is empty. Rules that
hold at every step:

- no pod that serves goes while that would leave fewer than desired - maxUnavailable
  serving, nor, where there is a surge, the last one while the new revision serves nothing;
- pools that roll at the same time move in step, since old and new workers may not be
  able to work with each other;
- at most two revisions of a pool live: an edit in the middle of a rollout drains the
  half-done revision before the next one starts;
- all pods together, those of a surge as well, stay within the GPU budget. A new pod that
  finds no node for too long gets an old one's place, as long as one of these serves on;
- pools that the object has no more go when those that it has instead serve.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from pd_operator.api import Role
from pd_operator.applied import is_applied, unwanted
from pd_operator.desired import Desired, DesiredPool
from pd_operator.fields import format_duration
from pd_operator.observed import Observed, PodView, Ref, SetView
from pd_operator.podparts import Manifest


@dataclass(frozen=True, slots=True)
class Apply:
    """Create an object, or make its fields what we say."""

    manifest: Manifest

    @property
    def ref(self) -> Ref:
        return Ref(self.manifest["kind"], self.manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Scale:
    """Set the replicas of a StatefulSet and nothing else of it."""

    ref: Ref
    replicas: int


@dataclass(frozen=True, slots=True)
class Delete:
    ref: Ref


@dataclass(frozen=True, slots=True)
class Provide:
    """Create an object where there is none of that name. What is there isn't read."""

    manifest: Manifest

    @property
    def ref(self) -> Ref:
        return Ref(self.manifest["kind"], self.manifest["metadata"]["name"])


Operation = Apply | Provide | Scale | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `rolling` pools aren't done, `leaving` ones the object has no more.

    `blocked` says why one can't move, `held` why one keeps more replicas than it should have.
    In `again_s` seconds the plan may be another one without any event.
    """

    operations: tuple[Operation, ...]
    rolling: frozenset[Role] = frozenset()
    blocked: str = ""
    leaving: frozenset[Role] = frozenset()
    held: str = ""
    again_s: float | None = None


def plan(desired: Desired, observed: Observed, now: datetime | None = None) -> Plan:
    """The next operations; none when what exists is what is desired. Without the time no
    pod has waited for too long."""
    operations: list[Operation] = list(_surroundings(desired, observed))
    step = _Step(desired, observed, now)
    for pool in desired.pools:
        operations += _pool(pool, step)
    operations += _leaving(step)
    wanted = [*_refs(desired.surroundings), *(Ref("Service", pool.name) for pool in desired.pools)]
    operations += [Delete(ref) for ref in unwanted(observed, wanted)]
    return Plan(
        tuple(operations),
        frozenset(pool.role for pool in desired.pools if step.old_sets(pool)),
        step.blocked,
        frozenset(item.role for item in step.leaving()),
        step.held,
        step.again_s(),
    )


def _refs(manifests: Iterable[Manifest]) -> Iterator[Ref]:
    for manifest in manifests:
        yield Ref(manifest["kind"], manifest["metadata"]["name"])


def _surroundings(desired: Desired, observed: Observed) -> Iterator[Operation]:
    for manifest in desired.surroundings:
        operation = Apply(manifest)
        if not is_applied(manifest, observed.objects.get(operation.ref)):
            yield operation


class _Step:
    """The numbers of one planning step, of all pools together."""

    def __init__(self, desired: Desired, observed: Observed, now: datetime | None) -> None:
        self.desired = desired
        self.observed = observed
        self.blocked = ""
        self.held = ""
        self.short_of_gpus = False
        self._now = now
        self._headroom = self._gpu_headroom()

    def current(self, pool: DesiredPool) -> SetView | None:
        sets = self.observed.pool_sets(pool.role)
        return next((item for item in sets if item.name == pool.name), None)

    def old_sets(self, pool: DesiredPool) -> list[SetView]:
        return [item for item in self.observed.pool_sets(pool.role) if item.name != pool.name]

    def leaving(self) -> list[SetView]:
        """Sets of pools that the object has no more."""
        wanted = {pool.role for pool in self.desired.pools}
        return [item for item in self.observed.sets if item.role not in wanted]

    def stranded(self, item: SetView | None) -> list[PodView]:
        """Pods for which there has been no node for too long."""
        limit = self.desired.pending_timeout_s
        return [] if item is None else [pod for pod in item.pods if self._homeless_s(pod) >= limit]

    def is_crowded(self) -> bool:
        """Whether a pool that rolls has such pods."""
        return any(
            self.stranded(self.current(pool)) for pool in self.desired.pools if self.old_sets(pool)
        )

    def _homeless_s(self, pod: PodView) -> float:
        if not pod.homeless or not pod.created or self._now is None:
            return -1.0
        return (self._now - datetime.fromisoformat(pod.created)).total_seconds()

    def again_s(self) -> float | None:
        """When the next pod of a pool that changes will have waited for too long."""
        if not self.leaving() and not any(self.old_sets(pool) for pool in self.desired.pools):
            return None
        waited = [self._homeless_s(pod) for item in self.observed.sets for pod in item.pods]
        left = [self.desired.pending_timeout_s - one for one in waited if one >= 0]
        return min((one for one in left if one > 0), default=None)

    def _gpu_headroom(self) -> int | None:
        """GPUs that may be added; None without a budget. Pools that go count like the rest."""
        if self.desired.gpus is None:
            return None
        each = {pool.role: pool.gpus_each for pool in self.desired.pools}
        most = max(each.values(), default=0)
        used = sum(_pods(item) * each.get(item.role, most) for item in self.observed.sets)
        return self.desired.gpus - used

    def grow(self, pool: DesiredPool, now: int, wanted: int) -> int:
        """As many replicas of `wanted` as the GPU budget allows."""
        if self._headroom is None or pool.gpus_each == 0 or wanted <= now:
            return wanted
        grown = min(wanted, now + max(0, self._headroom) // pool.gpus_each)
        self.short_of_gpus |= grown < wanted
        self._headroom -= (grown - now) * pool.gpus_each
        return grown

    def replaced(self, pool: DesiredPool) -> int:
        """How many old pods the new revision stands in for, all rolling pools in step.

        The pool that is least far along decides: the others keep so many old workers
        that its old workers still have partners.
        """
        serving = self._new_serving(pool)
        for other in self.desired.pools:
            if other.replicas and self.old_sets(other):
                share = self._new_serving(other) * pool.replicas // other.replicas
                serving = min(serving, share)
        return serving

    def _new_serving(self, pool: DesiredPool) -> int:
        current = self.current(pool)
        return min(current.serving, pool.replicas) if current else 0


def _pods(item: SetView) -> int:
    """Pods that exist or are to exist."""
    return max(item.replicas, len(item.pods))


def _pool(pool: DesiredPool, step: _Step) -> Iterator[Operation]:
    olds = step.old_sets(pool)
    # The sets come by age: of two that serve alike, the older one has proven itself.
    kept = max(olds, key=lambda item: (item.serving, -olds.index(item)), default=None)
    half_done = [item for item in olds if item is not kept]
    current = step.current(pool)
    if kept is None:
        yield from _settled(pool, current, step)
    elif half_done and current is None:
        yield from _step_back(pool, kept, half_done[0], step)
    else:
        for item in half_done:
            yield from _drain(item, step.observed)
        yield from _roll(pool, current, kept, step)


def _step_back(
    pool: DesiredPool, kept: SetView, half_done: SetView, step: _Step
) -> Iterator[Operation]:
    """An edit came in the middle of a rollout: the half-done revision goes before the next.

    Where it serves already, the kept one grows back first, unless that can't succeed.
    """
    desired = step.desired
    room = pool.replicas + desired.max_surge - _pods(half_done)
    wanted = step.grow(pool, kept.replicas, max(kept.replicas, min(pool.replicas, room)))
    if wanted > kept.replicas:
        yield Scale(Ref("StatefulSet", kept.name), wanted)
    floor = max(0, pool.replicas - desired.max_unavailable - kept.serving)
    left = _scale_in(half_done, min(floor, half_done.replicas), min(floor, half_done.serving))
    settled = wanted == kept.replicas == kept.serving
    hopeless = any(pod.problem for pod in kept.pods) or (settled and left == half_done.replicas)
    if hopeless or not half_done.serving or not left:
        yield from _drain(half_done, step.observed)
    elif left < half_done.replicas:
        yield Scale(Ref("StatefulSet", half_done.name), left)


def _settled(pool: DesiredPool, current: SetView | None, step: _Step) -> Iterator[Operation]:
    """One revision lives: replicas change in place."""
    now = current.replicas if current else 0
    wanted = step.grow(pool, now, pool.replicas)
    if current is not None and wanted < now:
        wanted = _scale_in(current, wanted, min(wanted, current.serving))
        if wanted > pool.replicas:
            step.held = step.held or (
                f"{pool.role} keeps {wanted} replicas instead of {pool.replicas}: fewer would "
                "take a worker that serves, while one of a lower number doesn't"
            )
    yield from _apply_set(pool, current, wanted, step.observed)


def _roll(
    pool: DesiredPool, current: SetView | None, old: SetView, step: _Step
) -> Iterator[Operation]:
    desired = step.desired
    stranded = step.stranded(current)
    replaced = step.replaced(pool)
    unavailable = max(desired.max_unavailable, 1 if stranded else 0)
    floor = max(0, pool.replicas - unavailable - replaced)
    if pool.replicas and not replaced and (desired.max_surge or stranded):
        floor = max(1, floor)
    kept = _scale_in(old, min(floor, old.replicas), min(floor, old.serving))

    now = current.replicas if current else 0
    # Broken pods of the old revision must not block the fix: they take no room from it.
    broken = sum(pod.problem is not None and not pod.serves for pod in old.pods)
    room = pool.replicas + desired.max_surge - (_pods(old) - broken)
    wanted = max(min(now, pool.replicas), min(pool.replicas, room))
    needed = min(wanted, current.serving) if current else 0
    if step.is_crowded():
        # Nothing beyond the replicas while somebody waits: it may be what keeps him waiting.
        wanted = min(wanted, max(1, pool.replicas - kept))
        needed = min(needed, max(0, pool.replicas - unavailable - old.serving))
    if current is not None and wanted < now:
        wanted = _scale_in(current, wanted, needed)
    wanted = step.grow(pool, now, wanted)
    yield from _apply_set(pool, current, wanted, step.observed)

    if kept < old.replicas:
        yield Scale(Ref("StatefulSet", old.name), kept)
    elif not old.replicas:
        yield from _drain(old, step.observed)
    elif len(old.pods) > old.replicas or not pool.replicas:
        pass  # one is on its way out, and makes room
    elif stranded and wanted >= now:
        step.blocked = step.blocked or _why_stranded(pool, stranded, desired)
    elif wanted == now == 0:
        step.blocked = step.blocked or _why_blocked(pool, desired)


def _why_blocked(pool: DesiredPool, desired: Desired) -> str:
    problem = f"{pool.role} can't roll: there is no room for a worker of the new revision"
    if desired.gpus is not None and desired.max_surge:
        return f"{problem} within budget.gpus ({desired.gpus}); raise it"
    return f"{problem}; raise rollout.maxSurge"


def _why_stranded(pool: DesiredPool, stranded: list[PodView], desired: Desired) -> str:
    first = stranded[0]
    why = f" ({first.problem.message})" if first.problem and first.problem.message else ""
    limit = format_duration(desired.pending_timeout_s)
    return (
        f"{pool.role} can't roll: no node took {first.name} within {limit}{why}, and no old "
        "worker can be spared; make room on a node"
    )


def _scale_in(item: SetView, wanted: int, serving: int) -> int:
    """The fewest replicas, at least `wanted`, that leave so many serving pods.

    A scale-in takes the top ordinals, whether they serve or not: a low ordinal that
    doesn't serve counts as the spare.
    """
    replicas = wanted
    while replicas < item.replicas and item.serving_below(replicas) < serving:
        replicas += 1
    return replicas


def _apply_set(
    pool: DesiredPool, current: SetView | None, replicas: int, observed: Observed
) -> Iterator[Operation]:
    """The pool's Service and StatefulSet, with so many replicas."""
    service = Apply(pool.service)
    if not is_applied(pool.service, observed.objects.get(service.ref)):
        yield service
    spec = pool.stateful_set["spec"]
    now = replicas if current is None else current.replicas
    manifest = {**pool.stateful_set, "spec": {**spec, "replicas": now}}
    operation = Apply(manifest)
    if not is_applied(manifest, observed.objects.get(operation.ref)):
        yield operation
    if current is not None and current.replicas != replicas:
        yield Scale(operation.ref, replicas)


def _drain(item: SetView, observed: Observed) -> Iterator[Operation]:
    """Towards nothing: first without replicas, then, when its pods have ended, deleted."""
    if item.replicas:
        yield Scale(Ref("StatefulSet", item.name), 0)
    elif not item.pods:
        yield Delete(Ref("StatefulSet", item.name))
        if Ref("Service", item.name) in observed.objects:
            yield Delete(Ref("Service", item.name))


def _leaving(step: _Step) -> Iterator[Operation]:
    """Pools that the object has no more go when those that it has serve.

    Where these find no room beside them, the old ones make it, one by one, if workers may
    be missing; the last of each role serves until each new pool has one that does.
    """
    leaving, desired = step.leaving(), step.desired
    if not leaving:
        return
    serving = {
        pool.role: sum(item.serving for item in step.observed.pool_sets(pool.role))
        for pool in desired.pools
    }
    usable = all(serving[pool.role] or not pool.replicas for pool in desired.pools)
    missing = max(pool.replicas - serving[pool.role] for pool in desired.pools)
    if usable and missing <= desired.max_unavailable:
        for item in leaving:
            yield from _drain(item, step.observed)
        return
    stranded = [pod for pool in desired.pools for pod in step.stranded(step.current(pool))]
    if not (step.short_of_gpus or stranded) or _moves(step):
        return
    if not desired.max_unavailable and not stranded:
        step.blocked = step.blocked or _why_no_switch(desired, leaving)
        return
    spared = list(_spare(leaving, 0 if usable else 1))
    if not spared:
        step.blocked = step.blocked or _why_no_switch(desired, leaving)
    yield from spared


def _moves(step: _Step) -> bool:
    """Whether anything still starts or ends of which more room may come."""
    return any(
        pod.terminating or not (pod.ready or pod.homeless or pod.problem)
        for item in step.observed.sets
        for pod in item.pods
    ) or any(len(item.pods) < item.replicas for item in step.observed.sets)


def _spare(leaving: list[SetView], least: int) -> Iterator[Operation]:
    """One worker less of each, as long as so many serve."""
    for item in leaving:
        wanted = max(least, item.replicas - 1)
        kept = _scale_in(item, wanted, min(item.serving, max(least, item.serving - 1)))
        if kept < item.replicas:
            yield Scale(Ref("StatefulSet", item.name), kept)


def _why_no_switch(desired: Desired, leaving: list[SetView]) -> str:
    new = " and ".join(sorted(pool.role for pool in desired.pools))
    old = " and ".join(sorted({item.role for item in leaving}))
    problem = f"{new} can't start: there is no room beside {old}, which serve until it does"
    if desired.gpus is None:
        return f"{problem}; make room on a node"
    remedy = "raise it" if desired.max_unavailable else "raise it, or write maxUnavailable: 1"
    return f"{problem}, within budget.gpus ({desired.gpus}); {remedy}"
