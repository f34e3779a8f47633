"""The line: observe -> scale -> desired -> plan -> apply each -> status -> requeue."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from pd_operator import (
    api,
    apierrors,
    certmanager,
    conflicts,
    desired,
    notices,
    pins,
    replicas,
    rollout,
    samples,
    status,
)
from pd_operator.api import Cluster, Role, TlsMode
from pd_operator.applied import is_applied
from pd_operator.certificates import Certified, Certifier
from pd_operator.conflicts import NameTaken, Obstacle, Refused
from pd_operator.desired import Desired
from pd_operator.keys import Key
from pd_operator.measured import Samples
from pd_operator.notices import Notice
from pd_operator.observed import Observed, Ref, observe
from pd_operator.peertokens import TokenTerms
from pd_operator.pki import make_token
from pd_operator.podparts import Manifest, Settings
from pd_operator.replicas import Standing
from pd_operator.scaler import Scaler
from pd_operator.scaling import telling
from pd_operator.scaling.explaining import Told, line, told
from pd_operator.scaling.spec import is_scaled
from pd_operator.scaling.types import Decision, Hold, Scale
from pd_operator.teller import Teller
from pd_operator.tokening import Tokened, Tokener

log = logging.getLogger("pd_operator.reconcile")

RESYNC_S = 600.0
"""How often an object is looked at without any event. Watches tell of everything that
changes, so this is for what no watch tells, and against our own errors."""
RETRY_S = 60.0
"""How often we look whether what was in the way still is."""
SOON_S = 1.0
"""When to go on with what MAX_ROUNDS didn't end."""
UNSAID_S = 0.25
"""When to say what a look has left unsaid, if nothing happens before."""
MISSING_S = 30.0
"""Pods are made within moments. One that is missing for longer won't come by itself: a quota or
an admission refuses it, or its name is taken by a pod without our labels."""
RENDERED = 64
"""Renderings that are kept, for objects that are looked at again soon."""
MAX_ROUNDS = 3
"""Plans carried out before a look at something else: most need one, and one to see it's done."""


@dataclass(frozen=True, slots=True)
class Pace:
    """In seconds: how often routers are asked where something depends on the answer, and
    where it is only shown; how often numbers alone are written to a status."""

    sample_s: float = 5.0
    glance_s: float = 300.0
    status_s: float = 30.0


@dataclass(frozen=True, slots=True)
class World:
    """What a backend knows of one PDCluster: the object, and its children and pods.

    `absent` are kinds that this backend hasn't got: what is desired of them waits. A backend
    may tell versions as `mark` (the object's, then the others') and the addresses of
    `routers` that serve.
    """

    document: Manifest | None
    children: Iterable[Manifest] = ()
    absent: frozenset[str] = frozenset()
    mark: tuple[str, ...] | None = None
    routers: tuple[str, ...] | None = None


class Lazily:
    """Objects that cost something to get: got once, when they are looked at."""

    def __init__(self, get: Callable[[], list[Manifest]]) -> None:
        self._get = get
        self._got: list[Manifest] | None = None

    def __iter__(self) -> Iterator[Manifest]:
        if self._got is None:
            self._got = self._get()
        return iter(self._got)


class Backend(Protocol):
    """The verbs that a reconcile needs; objects are Kubernetes manifests everywhere."""

    async def observe(self, key: Key) -> World: ...

    async def apply(self, key: Key, manifest: Manifest) -> None: ...

    async def provide(self, key: Key, manifest: Manifest) -> None:
        """Creates what isn't there, and reads nothing."""
        ...

    async def scale(self, key: Key, ref: Ref, replicas: int) -> None: ...

    async def delete(self, key: Key, ref: Ref) -> None: ...

    async def write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None: ...

    async def write_replicas(self, key: Key, write: replicas.Write) -> None: ...


class Listener:
    """Hears what was done. All of it may be ignored."""

    def operation(self, key: Key, operation: rollout.Operation) -> None:
        """An operation has succeeded."""

    def notices(self, document: Manifest, found: Sequence[Notice]) -> None:
        """What is worth an event."""

    def decided(self, key: Key, decisions: Mapping[Role, Decision]) -> None:
        """How large each pool is to be, and why."""

    def pools(self, key: Key, counts: Mapping[Role, Mapping[str, int]]) -> None:
        """How many workers each pool has, by state."""

    def told(self, one: Told) -> None:
        """A pool's decision is another one than before."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How large each pool is to be, and how that came about."""

    before: Mapping[Role, Standing]
    decisions: Mapping[Role, Decision]
    written: bool = False

    @property
    def replicas(self) -> dict[Role, int]:
        return {role: one.replicas for role, one in self.decisions.items()}


@dataclass(frozen=True, slots=True)
class _Done:
    """What was seen at last, the plan for it, and what couldn't be done. `acted`: something
    was done; `in_vain`: that changed nothing, since somebody else undoes it."""

    seen: Observed
    plan: rollout.Plan
    obstacles: tuple[Obstacle, ...]
    acted: bool = False
    in_vain: bool = False


class _Mark(NamedTuple):
    """What a look depends on, but for time: the versions of what it saw, the object's first."""

    versions: tuple[str, ...]
    absent: frozenset[str]
    measured: str


class _Looked(NamedTuple):
    """Seconds until the next look; and the status, if it was all that there was to do, and
    nothing else will be for `lasts_s` as long as nothing changes."""

    again_s: float
    told: Manifest | None = None
    lasts_s: float = RESYNC_S


@dataclass(frozen=True, slots=True)
class _Calm:
    """A look that found nothing to do: the next one needn't look closer at the same things."""

    mark: _Mark
    at: datetime
    look: _Looked

    def holds(self, mark: _Mark | None, now: datetime) -> bool:
        return self.mark == mark and (now - self.at).total_seconds() < self.look.lasts_s


class Reconciler:
    """Brings what exists one step closer to what an object says, as often as it is called.

    Level-triggered: what is remembered between two calls only spares writes.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        *,
        listener: Listener | None = None,
        pace: Pace | None = None,
        read_samples: Callable[[Iterable[str]], Awaitable[Samples]] = samples.read,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        scaler: Scaler[Key] | None = None,
        certifier: Certifier | None = None,
        token_terms: TokenTerms | None = None,
        teller: Teller | None = None,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._listener = listener or Listener()
        self._pace = pace or Pace()
        self._read_samples = read_samples
        self._clock = clock
        self._scaler = scaler or Scaler()
        self._certifier = certifier or Certifier()
        self._tokener = Tokener(settings, token_terms or TokenTerms(), make_token)
        self._teller = teller
        self._written_at: dict[Key, datetime] = {}
        self._calm: dict[Key, _Calm] = {}
        self._told: dict[Key, dict[Role, str]] = {}
        self._unsaid: set[Key] = set()
        self._missing: dict[Key, dict[str, datetime]] = {}
        self._rendered: dict[tuple[object, ...], Desired] = {}

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._written_at.pop(key, None)
        self._calm.pop(key, None)
        self._told.pop(key, None)
        self._unsaid.discard(key)
        self._missing.pop(key, None)
        self._scaler.forget(key)
        if self._teller is not None:
            self._teller.forget(key)
        self._certifier.forget(key)
        self._tokener.forget(key)

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look without an event; None when the object is gone."""
        measured = await self._measure(key)
        world = await self._backend.observe(key)  # asking the routers may have taken a while
        if world.document is None:
            self.forget(key)
            return None
        mark, now = _mark(world, measured), self._clock()
        calm = self._calm.get(key)
        if calm is not None and calm.holds(mark, now):
            return calm.look.again_s
        look = await self._look_closely(key, world, world.document, measured)
        self._calm.pop(key, None)
        if mark is not None and look.told is not None:
            mark = _mark_after(mark, await self._backend.observe(key), world.document, look.told)
            if mark is not None:
                self._calm[key] = _Calm(mark, now, look)
        return look.again_s

    async def _look_closely(
        self, key: Key, world: World, document: Manifest, measured: Samples
    ) -> _Looked:
        try:
            cluster = api.parse(document)
            desired.check_supported(cluster, self._settings, world.absent)
        except api.InvalidCluster as error:
            await self._write_invalid(key, document, error)
            return _Looked(RESYNC_S)
        seen = observe(world.children)
        sizes = await self._decide(key, cluster, document, seen, measured)
        if sizes.written:
            seen = observe((await self._backend.observe(key)).children)
        seen, certified, lacking = await self._certify(key, cluster, seen)
        wanted = pins.keep(self._render(cluster, sizes.replicas), cluster, seen)
        wanted, tokened = self._tokened(key, cluster, sizes.replicas, wanted, seen)
        if certified.secrets:
            wanted = replace(wanted, surroundings=(*certified.secrets, *wanted.surroundings))
        if tokened.provide is not None:
            refused = await self._perform_all(key, [tokened.provide])
            lacking += refused
            if not refused:
                self._tokener.provided(key, self._clock())
        wanted = _available(wanted, world.absent)
        done = await self._carry_out(key, wanted, seen)
        unsaid_s = await self._write_pools(key, cluster, done, sizes)
        previous, now = document.get("status", {}), status.timestamp(self._clock())
        if self._teller is not None:
            self._teller.tell(key, done.seen.router_processes)
        self._listener.pools(key, status.pool_counts(wanted, done.seen))
        lost = self._lost(key, done.seen)
        new = status.status_of(cluster, wanted, done.seen, done.plan, measured, previous, now, lost)
        new = telling.with_scaling(new, cluster, sizes.before, sizes.decisions, previous, now)
        not_issued = certmanager.not_issued(cluster, done.seen.objects)
        obstacles = [*lacking, *done.obstacles, *not_issued]
        new = conflicts.with_obstacles(new, obstacles, previous, now)
        await self._write_status(key, document, new)
        now_due = self._clock()
        due_s = max(SOON_S, min(certified.due_s(now_due), tokened.due_s(now_due)))
        look_s = self._look_again_s(cluster, done, measured)
        again_s = min(look_s, RETRY_S if lacking else due_s)
        lasts_s = MISSING_S if len(done.seen.missing) > len(lost) else RESYNC_S
        again_s = min(again_s, lasts_s)
        if unsaid_s:  # the watch tells nothing new of what we wrote ourselves
            again_s = min(again_s, unsaid_s)
        wrote = done.plan.operations or sizes.written or unsaid_s
        calm = not (wrote or done.plan.again_s or is_scaled(cluster) or lacking)
        return _Looked(again_s, new if calm and due_s >= RESYNC_S else None, lasts_s)

    def _lost(self, key: Key, seen: Observed) -> list[str]:
        """Pods that have been missing for too long."""
        before, now = self._missing.pop(key, {}), self._clock()
        since = {name: before.get(name, now) for name in seen.missing}
        if since:
            self._missing[key] = since
        return [name for name, at in since.items() if (now - at).total_seconds() >= MISSING_S]

    async def _certify(
        self, key: Key, cluster: Cluster, seen: Observed
    ) -> tuple[Observed, Certified, list[Obstacle]]:
        """Its own authority is written before anything that it issues: what isn't kept would
        be another one at the next look."""
        if cluster.tls is not TlsMode.AUTO:
            self._certifier.forget(key)
            return seen, Certified(), []
        now = self._clock()
        settled = self._certifier.settled(key, cluster, seen.objects, now)
        if settled is not None:
            return seen, settled, []
        lacking: list[Obstacle] = []
        first = rollout.Apply(self._certifier.authority(cluster, seen.objects, now))
        if not is_applied(first.manifest, seen.objects.get(first.ref)):
            lacking = await self._perform_all(key, [first])
            seen = observe((await self._backend.observe(key)).children)
        return seen, self._certifier.certify(key, cluster, seen.objects, now), lacking

    def _tokened(
        self,
        key: Key,
        cluster: Cluster,
        sizes: Mapping[Role, int],
        wanted: Desired,
        seen: Observed,
    ) -> tuple[Desired, Tokened]:
        """What is wanted, with the token's Secret; and what else is to be done about it."""
        with_token = self._tokener.wants(wanted)
        if with_token != self._settings.tokens:
            settings = replace(self._settings, tokens=with_token)
            other = self._render(cluster, sizes, settings)
            wanted = replace(wanted, surroundings=other.surroundings)
        tokened = self._tokener.look(key, cluster, wanted, seen, self._clock())
        if tokened.secret is not None:
            wanted = replace(wanted, surroundings=(tokened.secret, *wanted.surroundings))
        return wanted, tokened

    def _render(
        self, cluster: Cluster, sizes: Mapping[Role, int], settings: Settings | None = None
    ) -> Desired:
        """Most looks come a few at a time, at the same version of an object."""
        settings = settings or self._settings
        tokens = settings.tokens
        key = (cluster.uid, cluster.generation, cluster.upgrade, tokens, *sorted(sizes.items()))
        found = self._rendered.pop(key, None)
        if found is None:
            found = desired.render(cluster, sizes, settings)
        if cluster.uid:
            self._rendered[key] = found
            if len(self._rendered) > RENDERED:
                del self._rendered[next(iter(self._rendered))]
        return found

    async def _decide(
        self, key: Key, cluster: Cluster, document: Manifest, seen: Observed, measured: Samples
    ) -> _Sizes:
        """Written into the PDPools before anything follows from it: after a crash in between,
        what was decided is still known."""
        before = replicas.standings(cluster, seen, document.get("status", {}))
        decisions = self._scaler.look(key, cluster, before, measured)
        sizes = _Sizes(before, decisions)
        writes = replicas.writes(cluster, seen, sizes.replicas)
        for write in writes:
            await self._write_replicas(key, write)
        found = replicas.notices(cluster, before, sizes.replicas)
        found += telling.notices(decisions, before, status.timestamp(self._clock()))
        for notice in found:
            log.info("cluster=%s/%s %s: %s", *key, notice.reason, notice.text)
        if found:
            self._listener.notices(document, found)
        self._listener.decided(key, decisions)
        self._tell(key, before, decisions, document.get("status", {}))
        return replace(sizes, written=bool(writes))

    def _tell(
        self,
        key: Key,
        before: Mapping[Role, Standing],
        decisions: Mapping[Role, Decision],
        previous: Mapping[str, Any],
    ) -> None:
        """Each change of a size or of its reason, once, with all its numbers."""
        self._recall(key, decisions, previous)
        known, now = self._told.setdefault(key, {}), status.timestamp(self._clock())
        for role, one in decisions.items():
            if isinstance(one, Hold) and known.get(role) == one.reason:
                continue
            known[role] = one.reason
            said = told(f"{key.namespace}/{key.name}", role.value, before[role].replicas, one, now)
            if one.reason != "FixedReplicas":
                self._listener.told(said)
                if self._teller is not None:
                    self._teller.note(key, said)
            if isinstance(one, Scale):
                log.info("%s", line(said))

    def _recall(
        self, key: Key, decisions: Mapping[Role, Decision], previous: Mapping[str, Any]
    ) -> None:
        """What was told of an object before this look, of pools that are still sized by us."""
        if self._teller is not None:
            ours = [role.value for role, d in decisions.items() if d.reason != "FixedReplicas"]
            if not self._teller.knows(key):
                self._teller.remember(key, previous, ours)
            self._teller.keep(key, ours)

    async def _write_pools(self, key: Key, cluster: Cluster, done: _Done, sizes: _Sizes) -> float:
        """Seeds PDPools that were made just now, and says what runs of each other one.

        After something was done what runs is about to change, unless it is as many as it is
        to be: the look that comes soon says it once, even if it has something to do as well.
        Seconds until that look; 0: all is said.
        """
        writes = replicas.writes(cluster, done.seen, sizes.replicas)
        for write in writes:
            await self._write_replicas(key, write)
        statuses = replicas.pool_statuses(cluster, done.seen)
        changes = done.acted and any(
            new["replicas"] != item.get("spec", {}).get("replicas") for item, new in statuses
        )
        if (writes or changes) and key not in self._unsaid:
            self._unsaid.add(key)
            return UNSAID_S
        self._unsaid.discard(key)
        written = {write.name for write in writes}
        for item, new in statuses:
            if item["metadata"]["name"] not in written:  # its version is another one now
                await self._backend.write_status(key, item, new)
        return SOON_S if writes else 0.0

    async def _write_replicas(self, key: Key, write: replicas.Write) -> None:
        log.info("cluster=%s/%s PDPool %s: %d replicas", *key, write.name, write.replicas)
        await self._backend.write_replicas(key, write)

    async def _measure(self, key: Key) -> Samples:
        world = await self._backend.observe(key)
        if world.document is None:
            return Samples()
        addresses = world.routers
        if addresses is None:
            addresses = tuple(_addresses(observe(world.children)))
        return await self._read_samples(addresses) if addresses else Samples()

    async def _carry_out(self, key: Key, wanted: Desired, seen: Observed) -> _Done:
        """Plans and applies until there is nothing more to do now, or nothing that helps."""
        before: tuple[rollout.Operation, ...] = ()
        found: list[Obstacle] = []
        for _ in range(MAX_ROUNDS):
            plan = rollout.plan(wanted, seen, self._clock())
            in_vain = plan.operations != () and plan.operations == before
            if not plan.operations or in_vain or found:
                break
            found = await self._perform_all(key, plan.operations)
            before = plan.operations
            seen = observe((await self._backend.observe(key)).children)
        acted = before != () and not in_vain and not found
        return _Done(seen, plan, tuple(found), acted, in_vain)

    async def _perform_all(
        self, key: Key, operations: Iterable[rollout.Operation]
    ) -> list[Obstacle]:
        """What is in the way; every operation that can be made is made."""
        found: list[Obstacle] = []
        for operation in operations:
            try:
                await self._perform(key, operation)
            except NameTaken as error:
                found.append(error.taken)
            except (apierrors.Invalid, apierrors.Forbidden) as error:
                found.append(Refused(operation.ref, str(error)))
            else:
                log.info("cluster=%s/%s operation=%s", *key, describe(operation))
                self._listener.operation(key, operation)
        for one in found:
            log.warning("cluster=%s/%s: %s", *key, one)
        return found

    async def _perform(self, key: Key, operation: rollout.Operation) -> None:
        match operation:
            case rollout.Provide(manifest):
                await self._backend.provide(key, manifest)
            case rollout.Apply(manifest):
                await self._backend.apply(key, manifest)
            case rollout.Scale(ref, replicas):
                await self._backend.scale(key, ref, replicas)
            case rollout.Delete(ref):
                await self._backend.delete(key, ref)

    async def _write_invalid(self, key: Key, document: Manifest, error: api.InvalidCluster) -> None:
        generation = document.get("metadata", {}).get("generation", 0)
        previous, now = document.get("status", {}), status.timestamp(self._clock())
        new = status.invalid_status(error, generation, previous, now)
        await self._write_status(key, document, new)

    async def _write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None:
        old = document.get("status", {})
        if old == new:
            return
        now = self._clock()
        written_at = self._written_at.get(key)
        if (
            written_at is not None
            and (now - written_at).total_seconds() < self._pace.status_s
            and status.only_numbers_differ(old, new)
        ):
            return
        await self._backend.write_status(key, document, new)
        self._written_at[key] = now
        self._listener.notices(document, notices.of_change(old, new))

    def _look_again_s(self, cluster: Cluster, done: _Done, measured: Samples) -> float:
        if done.obstacles or done.in_vain:
            return RETRY_S
        if done.plan.operations:
            return SOON_S
        again_s = done.plan.again_s or RESYNC_S
        if not _addresses(done.seen):
            return min(again_s, RESYNC_S)
        unsure = measured.locked or (measured.locked is None and measured.silent)
        waits = cluster.router.api_keys and unsure
        asked = cluster.slo.ttft or cluster.slo.tpot or is_scaled(cluster) or waits
        return min(again_s, self._pace.sample_s if asked else self._pace.glance_s)


def _mark(world: World, measured: Samples) -> _Mark | None:
    """None where a backend doesn't tell."""
    if world.mark is None:
        return None
    shown = [sorted(one.items()) for one in (measured.ttft, measured.tpot, measured.own_ttft)]
    return _Mark(world.mark, world.absent, f"{shown} {measured.locked}")


def _mark_after(mark: _Mark, after: World, before: Manifest, told: Manifest) -> _Mark | None:
    """The mark of what a look has left, if all that has changed since is the status that it
    wrote; None when there is more."""
    document = after.document
    if document is None or after.mark is None or after.absent != mark.absent:
        return None
    if after.mark == mark.versions:  # the status was as it should be, or has to wait
        return mark if document.get("status", {}) == told else None
    if after.mark[1:] != mark.versions[1:] or document.get("status") != told:
        return None
    return mark._replace(versions=after.mark) if _content(document) == _content(before) else None


def _content(document: Manifest) -> Manifest:
    """A document without its status and its version."""
    metadata = {k: v for k, v in document["metadata"].items() if k != "resourceVersion"}
    return {**document, "metadata": metadata, "status": None}


def router_addresses(pods: Iterable[Manifest]) -> list[str]:
    """Of the routers among the pods that serve."""
    return _addresses(observe(pods))


def _addresses(seen: Observed) -> list[str]:
    return list(seen.router_processes.values())


def _available(wanted: Desired, absent: frozenset[str]) -> Desired:
    """What is desired, without kinds that aren't there."""
    if not any(one["kind"] in absent for one in wanted.surroundings):
        return wanted
    kept = tuple(one for one in wanted.surroundings if one["kind"] not in absent)
    return replace(wanted, surroundings=kept)


def describe(operation: rollout.Operation) -> str:
    """An operation in a few words, for logs and terminals."""
    match operation:
        case rollout.Provide(manifest):
            return f"create {manifest['kind']} {manifest['metadata']['name']} if it isn't there"
        case rollout.Apply(manifest):
            return f"apply {manifest['kind']} {manifest['metadata']['name']}"
        case rollout.Scale(ref, replicas):
            return f"scale {ref.kind} {ref.name} to {replicas}"
        case rollout.Delete(ref):
            return f"delete {ref.kind} {ref.name}"
