"""The verbs of `reconcile.Backend` over the API server.

Every write goes to the very object that the decision was made about: its uid and its version
are preconditions, so that a write which was decided before a pause, or about a predecessor
of the same name, is refused.
"""

from contextlib import suppress
from typing import Any

from pd_operator import apierrors, conflicts
from pd_operator.conflicts import NameTaken, Taken
from pd_operator.informer import Informer, is_watched
from pd_operator.keys import Key
from pd_operator.kube import REPLICAS_MANAGER, STATUS_MANAGER, Kube
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest
from pd_operator.reconcile import Lazily, World, router_addresses
from pd_operator.replicas import MARK, Write
from pd_operator.resources import BY_KIND, CHILDREN, PDCLUSTER, PDPOOL, POD, STATEFUL_SET

_NEVER = "1"
"""A version that no object of ours has: an apply with it succeeds only as a creation."""


class KubeBackend:
    """Observes from the informer's stores; writes to the API server."""

    def __init__(self, kube: Kube, informer: Informer) -> None:
        self._kube = kube
        self._informer = informer

    async def observe(self, key: Key) -> World:
        document = self._informer.get(PDCLUSTER.kind, *key)
        if document is None or "deletionTimestamp" in document["metadata"]:
            return World(None)
        absent = {one.kind for one in CHILDREN if not self._informer.has_kind(one.kind)}
        return World(
            document,
            Lazily(lambda: _own(document, self._informer.children(key))),
            frozenset(absent),
            mark=self._informer.versions(key),
            routers=tuple(router_addresses(self._informer.pods(key))),
        )

    async def apply(self, key: Key, manifest: Manifest) -> None:
        """Raises NameTaken when an object of that name isn't this PDCluster's."""
        resource, metadata = BY_KIND[manifest["kind"]], manifest["metadata"]
        held = self._informer.get(resource.kind, key.namespace, metadata["name"])
        uid = conflicts.controller_uid(manifest)
        if held is None:
            await self._create(key, manifest, uid)
            return
        if not conflicts.is_owned(held, uid):
            raise NameTaken(_taken(held))
        body = _with_metadata(manifest, _preconditions(held))
        try:
            made = await self._kube.apply(resource, body)
        except apierrors.Invalid:
            made = held
        if made["metadata"]["resourceVersion"] == held["metadata"]["resourceVersion"]:
            # An apply can't take away what others put into our lists, such as a port.
            change = {"metadata": _preconditions(held), **_content(manifest)}
            made = await self._kube.patch(resource, key.namespace, metadata["name"], change)
        self._informer.wrote(resource.kind, made)

    async def _create(self, key: Key, manifest: Manifest, uid: str) -> None:
        resource = BY_KIND[manifest["kind"]]
        body = _with_metadata(manifest, {"resourceVersion": _NEVER})
        try:
            made = await self._kube.apply(resource, body)
        except apierrors.Conflict:
            # There is one. Ours, if the watch is behind; otherwise somebody's.
            found = await self._kube.get(resource, key.namespace, manifest["metadata"]["name"])
            if not conflicts.is_owned(found, uid):
                raise NameTaken(_taken({"kind": resource.kind, **found})) from None
            if is_watched(found):
                self._informer.wrote(resource.kind, found)
                raise
            # Somebody took the label by which we watch: nothing would tell us of it.
            made = await self._kube.apply(resource, _with_metadata(manifest, _preconditions(found)))
        self._informer.wrote(resource.kind, made)

    async def provide(self, key: Key, manifest: Manifest) -> None:
        del key
        with suppress(apierrors.AlreadyExists):
            await self._kube.create(BY_KIND[manifest["kind"]], manifest)

    async def scale(self, key: Key, ref: Ref, replicas: int) -> None:
        resource = BY_KIND[ref.kind]
        held = self._held(key, ref)
        change = {"metadata": _preconditions(held), "spec": {"replicas": replicas}}
        made = await self._kube.patch(resource, key.namespace, ref.name, change)
        self._informer.wrote(resource.kind, made)

    async def delete(self, key: Key, ref: Ref) -> None:
        held = self._held(key, ref)
        metadata = held["metadata"]
        with suppress(apierrors.NotFound):
            await self._kube.delete(
                BY_KIND[ref.kind],
                key.namespace,
                ref.name,
                uid=metadata["uid"],
                version=metadata["resourceVersion"],
            )
        self._informer.deleted(held)

    async def write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None:
        del key
        resource = BY_KIND[document["kind"]]
        metadata = document["metadata"]
        body = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                **_preconditions(document),
            },
            "status": new,
        }
        made = await self._kube.apply(resource, body, manager=STATUS_MANAGER, subresource="status")
        self._informer.wrote(resource.kind, made)

    async def write_replicas(self, key: Key, write: Write) -> None:
        """By a field manager of its own: whoever applies the PDPool's other fields without
        its replicas would else take them away."""
        del key
        metadata = write.pool["metadata"]
        body = {
            "apiVersion": PDPOOL.api_version,
            "kind": PDPOOL.kind,
            "metadata": {
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "annotations": {MARK: write.mark},
                **_preconditions(write.pool),
            },
            "spec": {"replicas": write.replicas},
        }
        made = await self._kube.apply(PDPOOL, body, manager=REPLICAS_MANAGER)
        self._informer.wrote(PDPOOL.kind, made)

    def _held(self, key: Key, ref: Ref) -> Manifest:
        held = self._informer.get(ref.kind, key.namespace, ref.name)
        if held is None:
            raise apierrors.Conflict(f"{ref.kind} {ref.name} has gone meanwhile")
        return held


def _own(document: Manifest, children: list[Manifest]) -> list[Manifest]:
    """Those of this very object. One of the same name may have been there before, and what
    it had goes only by and by."""
    uid = document["metadata"]["uid"]
    own = [one for one in children if one["kind"] != POD.kind and conflicts.is_owned(one, uid)]
    sets = {one["metadata"]["uid"] for one in own if one["kind"] == STATEFUL_SET.kind}
    born = document["metadata"]["creationTimestamp"]
    pods = [one for one in children if one["kind"] == POD.kind and _is_own_pod(one, sets, born)]
    return own + pods


def _is_own_pod(pod: Manifest, sets: set[str], born: str) -> bool:
    owners = pod["metadata"].get("ownerReferences") or ()
    for owner in owners:
        if owner.get("controller") and owner.get("kind") == STATEFUL_SET.kind:
            return owner["uid"] in sets
    # A Deployment's pods belong to its ReplicaSets, which we don't watch; those of a
    # predecessor are older than this object, and on their way out.
    return bool(owners) and bool(pod["metadata"]["creationTimestamp"] >= born)


def _taken(item: Manifest) -> Taken:
    ref = Ref(item["kind"], item["metadata"]["name"])
    return Taken(ref, by_predecessor=conflicts.is_pdclusters(item))


def _preconditions(held: Manifest) -> dict[str, str]:
    metadata = held["metadata"]
    return {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}


def _content(manifest: Manifest) -> Manifest:
    return {k: v for k, v in manifest.items() if k not in ("apiVersion", "kind", "metadata")}


def _with_metadata(manifest: Manifest, fields: dict[str, str]) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], **fields}}
