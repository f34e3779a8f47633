"""What exists: for each kind a list, then a watch, into a store. What changed is told as keys.

A stream may end, go silent or be refused at any time; nothing is lost by it, since a watch
goes on at its version, and a list that comes after a gap is compared with what is held.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from pd_operator import apierrors, kept
from pd_operator.keys import Key
from pd_operator.kube import Kube, WatchEvent
from pd_operator.podparts import Manifest
from pd_operator.resources import CHILDREN, PDCLUSTER, POD, WATCHED, Resource
from pd_operator.store import Packing, Store, name_of

log = logging.getLogger("pd_operator.informer")

_MANAGED_BY = ("app.kubernetes.io/managed-by", "pdcluster-operator")
MANAGED = "=".join(_MANAGED_BY)
LIST_TIMEOUT_S = 60.0
WATCH_S = (300.0, 600.0)
BACKOFF_S = (0.2, 5.0)
"""The first and the longest pause after failures. An API server that is back is noticed soon."""
ABSENT_S = 30.0
"""How often we look whether an optional kind has appeared."""
FRESH_S = 100.0
"""Watches say something every 60 s at least: a bookmark."""


def is_watched(item: Mapping[str, Any]) -> bool:
    """Whether watches of children tell of it."""
    name, value = _MANAGED_BY
    return (item["metadata"].get("labels") or {}).get(name) == value


PACKING = Packing(
    msgspec.json.Encoder(order="sorted").encode, msgspec.json.Decoder(dict[str, Any]).decode
)

Touched = Callable[[Resource, Iterable[Key] | None], None]
"""Hears which PDClusters a change of a kind matters to; None: to all."""


class Watcher:
    """One kind's list and watch."""

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        namespace: str,
        touched: Touched,
        on_restart: Callable[[Resource, str], None] = lambda _resource, _why: None,
        *,
        packs: bool = False,
    ) -> None:
        self.resource = resource
        self.store: Store[Key] = Store(
            kept.owner_of, self._slim, packing=PACKING if packs else None
        )
        self.present = asyncio.Event()
        self.settled = asyncio.Event()
        self.heard_at = float("-inf")
        self._kube = kube
        self._namespace = namespace
        self._selector = "" if resource is PDCLUSTER else MANAGED
        self._touched = touched
        self._on_restart = on_restart
        self._version: str | None = None
        self._ahead = False
        self._silent = False
        self._trouble = ""

    def fresh(self) -> bool:
        return time.monotonic() - self.heard_at < FRESH_S

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = BACKOFF_S[0]
        while True:
            heard_at = self.heard_at
            wait_s = pause_s  # a stream that ends at once and says nothing is a failure, too
            try:
                await self._once()
            except apierrors.ApiError as error:
                wait_s = self._failed(error, pause_s)
            else:
                if self.heard_at != heard_at:
                    wait_s = 0.0
            pause_s = min(BACKOFF_S[1], pause_s * 2)
            if self.heard_at != heard_at:
                pause_s, self._trouble = BACKOFF_S[0], ""
            if wait_s:
                await asyncio.sleep(wait_s * random.uniform(0.7, 1.3))

    async def _once(self) -> None:
        """A list where one is needed, then one watch to its end."""
        if self._version is None:
            await self._list()
        assert self._version is not None
        events = self._kube.watch(
            self.resource,
            self._namespace,
            version=self._version,
            selector=self._selector,
            timeout_s=random.uniform(*WATCH_S),
        )
        async with aclosing(events):
            async for event in events:
                self._take(event)

    async def _list(self) -> None:
        # At the first list any age will do. Later nothing may be older than what we know,
        # except when the server itself can't come to that version. After silence it is to
        # ask its store: what feeds its watches may be what stands still.
        known = str(self.store.seen) if self.store.seen else "0"
        listed = await self._kube.list(
            self.resource,
            self._namespace,
            selector=self._selector,
            version=None if self._ahead or self._silent else known,
            timeout_s=LIST_TIMEOUT_S,
        )
        touched = self.store.relist(listed.version, listed.items, reset=self._ahead)
        self._version, self._ahead, self._silent = listed.version, False, False
        self.heard_at = time.monotonic()
        appeared = not self.present.is_set() and self.settled.is_set()
        self.present.set()
        self.settled.set()
        log.info("listed kind=%s objects=%d", self.resource.kind, len(self.store))
        self._touched(self.resource, None if appeared else touched)

    def _take(self, event: WatchEvent) -> None:
        self.heard_at = time.monotonic()
        version = event.object.get("metadata", {}).get("resourceVersion")
        if not version:
            raise apierrors.Unavailable("an event of the watch has no version")
        touched = self.store.event(event.kind, event.object)
        self._version = version
        if touched:
            self._touched(self.resource, touched)

    def _failed(self, error: apierrors.ApiError, pause_s: float) -> float:
        """How long to wait. A version is kept unless the server doesn't know it."""
        self._on_restart(self.resource, type(error).__name__)
        match error:
            case apierrors.VersionAhead():
                self._version, self._ahead = None, True
            case apierrors.Gone():
                self._version = None
            case apierrors.Silent():
                # A list finds what the watch may have kept to itself. Without anything lost,
                # too, a server is silent about a kind of which nothing has changed since it
                # started: it has no version yet that it could tell.
                self._version, self._silent = None, True
                log.info("watch kind=%s: %s", self.resource.kind, error)
                return 0.0
            case apierrors.NotFound() if self.resource.optional:
                self._vanish()
                return ABSENT_S
            case _:
                self._complain(error)
        return max(pause_s, error.retry_after_s)

    def _complain(self, error: apierrors.ApiError) -> None:
        """Once for each kind of trouble: an outage has many failures a second."""
        trouble = type(error).__name__
        if trouble != self._trouble:
            log.warning("watch kind=%s: %s", self.resource.kind, error)
        self._trouble = trouble

    def _vanish(self) -> None:
        """The kind isn't there (any more); that is heard from the server, too."""
        self.heard_at = time.monotonic()
        self._version = None
        self.present.clear()
        self.settled.set()
        touched = self.store.relist(str(self.store.seen), (), reset=True)
        self._touched(self.resource, touched)

    def _slim(self, item: Manifest) -> Manifest:
        return kept.slim(self.resource.kind, self.resource.api_version, item)


class Informer:
    """All kinds together: what exists, by PDCluster."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        touched: Touched,
        on_restart: Callable[[Resource, str], None] = lambda _resource, _why: None,
        resources: Iterable[Resource] = WATCHED,
    ) -> None:
        # What is large and seldom asked for is packed.
        self._watchers = {
            resource.kind: Watcher(
                kube, resource, namespace, touched, on_restart, packs=resource in CHILDREN
            )
            for resource in resources
        }

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watcher in self._watchers.values():
                group.create_task(watcher.run())

    async def settled(self) -> None:
        """Until every kind has been listed once, or is known to be absent."""
        for watcher in self._watchers.values():
            await watcher.settled.wait()

    def is_settled(self) -> bool:
        return all(watcher.settled.is_set() for watcher in self._watchers.values())

    def stale(self) -> list[str]:
        """The kinds of which nothing has been heard for too long."""
        return [kind for kind, watcher in self._watchers.items() if not watcher.fresh()]

    def has_kind(self, kind: str) -> bool:
        """Whether the API server has this kind now."""
        watcher = self._watchers.get(kind)
        return watcher is not None and watcher.present.is_set()

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self._watchers[kind].store.get(namespace, name)

    def keys(self) -> list[Key]:
        return list(self._watchers[PDCLUSTER.kind].store.groups())

    def known(self) -> set[Key]:
        """Those, and PDClusters of which only children are left."""
        return {key for watcher in self._watchers.values() for key in watcher.store.groups()}

    def children(self, key: Key) -> list[Manifest]:
        """Everything that carries the PDCluster's label, whoever owns it."""
        return [
            item
            for kind, watcher in self._watchers.items()
            if kind != PDCLUSTER.kind
            for item in watcher.store.group(key)
        ]

    def pods(self, key: Key) -> list[Manifest]:
        return self._watchers[POD.kind].store.group(key)

    def versions(self, key: Key) -> tuple[str, ...]:
        """Of the PDCluster, then of all that carries its label."""
        # The PDCluster's watcher is the first, and has one object of each key.
        return tuple(
            version
            for watcher in self._watchers.values()
            for version in watcher.store.versions(key)
        )

    def wrote(self, kind: str, item: Manifest) -> None:
        """The answer to a write of ours: known before the watch tells of it."""
        self._watchers[kind].store.wrote(item)

    def deleted(self, item: Manifest) -> None:
        """The answer to a delete of ours."""
        self._watchers[item["kind"]].store.deleted(name_of(item), item["metadata"]["uid"])

    def __len__(self) -> int:
        return sum(len(watcher.store) for watcher in self._watchers.values())
