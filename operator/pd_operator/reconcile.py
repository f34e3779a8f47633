"""The line: observe -> scale -> desired -> plan -> apply each -> status -> requeue."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from pd_operator import api, desired, rollout, samples, status
from pd_operator.measured import Samples
from pd_operator.observed import Ref, observe
from pd_operator.podparts import Manifest, Settings

log = logging.getLogger("pd_operator.reconcile")

RESYNC_S = 30.0
SAMPLE_S = 5.0


class Key(NamedTuple):
    """A PDCluster."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class World:
    """What a backend knows of one PDCluster: the object, and its children and pods."""

    document: Manifest | None
    children: tuple[Manifest, ...] = ()


class Backend(Protocol):
    """The verbs that a reconcile needs; objects are Kubernetes manifests everywhere."""

    async def observe(self, key: Key) -> World: ...

    async def apply(self, key: Key, manifest: Manifest) -> None: ...

    async def scale(self, key: Key, ref: Ref, replicas: int) -> None: ...

    async def delete(self, key: Key, ref: Ref) -> None: ...

    async def write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None: ...


class Reconciler:
    """Brings what exists one step closer to what an object says, as often as it is called.

    Level-triggered: nothing is remembered between two calls.
    """

    def __init__(
        self,
        backend: Backend,
        settings: Settings,
        *,
        read_samples: Callable[[Iterable[str]], Awaitable[Samples]] = samples.read,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._read_samples = read_samples
        self._clock = clock

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look without an event; None when the object is gone."""
        world = await self._backend.observe(key)
        if world.document is None:
            return None
        now = status.timestamp(self._clock())
        previous = world.document.get("status", {})
        try:
            cluster = api.parse(world.document)
        except api.InvalidCluster as error:
            generation = world.document.get("metadata", {}).get("generation", 0)
            new = status.invalid_status(error, generation, previous, now)
            await self._write_status(key, world.document, new)
            return RESYNC_S
        wanted = desired.render(cluster, desired.fixed_replicas(cluster), self._settings)
        seen = observe(world.children)
        plan = rollout.plan(wanted, seen)
        for operation in plan.operations:
            log.info("apply cluster=%s/%s operation=%s", *key, describe(operation))
            await self._perform(key, operation)
        routers = [pod.ip for pod in seen.routers if pod.serves and pod.ip]
        measured = await self._read_samples(routers)
        new = status.status_of(cluster, wanted, seen, plan, measured, previous, now)
        await self._write_status(key, world.document, new)
        return SAMPLE_S if routers else RESYNC_S

    async def _perform(self, key: Key, operation: rollout.Operation) -> None:
        match operation:
            case rollout.Apply(manifest):
                await self._backend.apply(key, manifest)
            case rollout.Scale(ref, replicas):
                await self._backend.scale(key, ref, replicas)
            case rollout.Delete(ref):
                await self._backend.delete(key, ref)

    async def _write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None:
        if document.get("status") != new:
            await self._backend.write_status(key, document, new)


def describe(operation: rollout.Operation) -> str:
    """An operation in a few words, for logs and terminals."""
    match operation:
        case rollout.Apply(manifest):
            return f"apply {manifest['kind']} {manifest['metadata']['name']}"
        case rollout.Scale(ref, replicas):
            return f"scale {ref.kind} {ref.name} to {replicas}"
        case rollout.Delete(ref):
            return f"delete {ref.kind} {ref.name}"
