"""PURE. (desired, observed) -> the next ordered operations.

A changed pool gets a new StatefulSet beside the old one. The new one grows by surge,
the old one shrinks by what the new one serves, and goes when it is empty. Rules that
hold at every step:

- no pod that serves goes while that would leave fewer than desired - maxUnavailable
  serving, nor, where there is a surge, the last one while the new revision serves nothing;
- pools that roll at the same time move in step, since old and new workers may not be
  able to work with each other;
- at most two revisions of a pool live: an edit in the middle of a rollout drains the
  half-done revision before the next one starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pd_operator.api import Role
from pd_operator.desired import APPLIED_ANNOTATION, Desired, DesiredPool
from pd_operator.observed import Observed, Ref, SetView
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


Operation = Apply | Scale | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now. `rolling` pools aren't done; `blocked` says why one can't move."""

    operations: tuple[Operation, ...]
    rolling: frozenset[Role] = frozenset()
    blocked: str = ""


def plan(desired: Desired, observed: Observed) -> Plan:
    """The next operations; none when what exists is what is desired."""
    operations: list[Operation] = list(_surroundings(desired, observed))
    step = _Step(desired, observed)
    for pool in desired.pools:
        operations += _pool(pool, step)
    operations += _unwanted_pools(desired, observed)
    rolling = frozenset(pool.role for pool in desired.pools if step.old_sets(pool))
    return Plan(tuple(operations), rolling, step.blocked)


def is_applied(manifest: Manifest, existing: Manifest | None) -> bool:
    """Whether an object has all that we say, and nothing that we said and say no more."""
    if existing is None:
        return False
    annotations = existing["metadata"].get("annotations", {})
    ours = manifest["metadata"]["annotations"][APPLIED_ANNOTATION]
    return annotations.get(APPLIED_ANNOTATION) == ours and _is_within(manifest, existing)


def _is_within(wanted: object, found: object) -> bool:
    """Whether `found` has every field of `wanted`, and maybe more."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            key in found and _is_within(value, found[key]) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(wanted) == len(found)
            and all(_is_within(a, b) for a, b in zip(wanted, found, strict=True))
        )
    return wanted == found


def _surroundings(desired: Desired, observed: Observed) -> Iterator[Operation]:
    for manifest in desired.surroundings:
        operation = Apply(manifest)
        if not is_applied(manifest, observed.objects.get(operation.ref)):
            yield operation


class _Step:
    """The numbers of one planning step, of all pools together."""

    def __init__(self, desired: Desired, observed: Observed) -> None:
        self.desired = desired
        self.observed = observed
        self.blocked = ""
        self._headroom = self._gpu_headroom()

    def current(self, pool: DesiredPool) -> SetView | None:
        sets = self.observed.pool_sets(pool.role)
        return next((item for item in sets if item.name == pool.name), None)

    def old_sets(self, pool: DesiredPool) -> list[SetView]:
        return [item for item in self.observed.pool_sets(pool.role) if item.name != pool.name]

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
    if current is None:
        yield from _apply_set(pool, None, pool.replicas, step.observed)
        return
    wanted = pool.replicas
    if wanted < current.replicas:
        wanted = _scale_in(current, wanted, min(wanted, current.serving))
    yield from _apply_set(pool, current, wanted, step.observed)


def _roll(
    pool: DesiredPool, current: SetView | None, old: SetView, step: _Step
) -> Iterator[Operation]:
    desired = step.desired
    now = current.replicas if current else 0
    # Broken pods of the old revision must not block the fix: they take no room from it.
    broken = sum(pod.problem is not None and not pod.serves for pod in old.pods)
    room = pool.replicas + desired.max_surge - (_pods(old) - broken)
    wanted = max(min(now, pool.replicas), min(pool.replicas, room))
    if current is not None and wanted < now:
        wanted = _scale_in(current, wanted, min(wanted, current.serving))
    wanted = step.grow(pool, now, wanted)
    yield from _apply_set(pool, current, wanted, step.observed)

    replaced = step.replaced(pool)
    floor = max(0, pool.replicas - desired.max_unavailable - replaced)
    if pool.replicas and not replaced and desired.max_surge:
        floor = max(1, floor)
    kept = _scale_in(old, min(floor, old.replicas), min(floor, old.serving))
    if kept < old.replicas:
        yield Scale(Ref("StatefulSet", old.name), kept)
    elif not old.replicas:
        yield from _drain(old, step.observed)
    elif wanted == now == 0 and len(old.pods) == old.replicas and pool.replicas:
        step.blocked = step.blocked or _why_blocked(pool, desired)


def _why_blocked(pool: DesiredPool, desired: Desired) -> str:
    problem = f"{pool.role} can't roll: there is no room for a worker of the new revision"
    if desired.gpus is not None and desired.max_surge:
        return f"{problem} within budget.gpus ({desired.gpus}); raise it"
    return f"{problem}; raise rollout.maxSurge"


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


def _unwanted_pools(desired: Desired, observed: Observed) -> Iterator[Operation]:
    """Pools that the object has no more go when those that it has serve."""
    wanted = {pool.role: pool for pool in desired.pools}
    for pool in desired.pools:
        serving = sum(item.serving for item in observed.pool_sets(pool.role))
        if serving < pool.replicas - desired.max_unavailable:
            return
    for item in observed.sets:
        if item.role not in wanted:
            yield from _drain(item, observed)
