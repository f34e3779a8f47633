"""What controllers and kubelets would do, as far as the operator sees it: pods of StatefulSets
and Deployments appear and get ready, surplus ones go, and what belongs to nobody is collected.

Much cheaper than the real ones, so that a thousand PDClusters fit on a small machine.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from pd_operator import apierrors, conflicts, kube
from pd_operator.desired import revision_of
from pd_operator.informer import Informer
from pd_operator.keys import Key
from pd_operator.kube import Kube
from pd_operator.podparts import Manifest
from pd_operator.queue import Again, Queue
from pd_operator.resources import BY_KIND, DEPLOYMENT, PDCLUSTER, POD, STATEFUL_SET

_AGAIN_S = 0.05


def always(_pod: Manifest) -> bool:
    return True


class PodStub:
    """`ready` says of a pod whether it gets ready. `collects`: owners' children go with them,
    as the garbage collector would have it."""

    def __init__(
        self,
        api: Kube,
        namespace: str = "",
        *,
        ready: Callable[[Manifest], bool] = always,
        collects: bool = True,
        runners: int = 4,
    ) -> None:
        self.ready = ready
        self._api = api
        self._collects = collects
        self._runners = runners
        self._informer = Informer(api, namespace, self._touched)
        self._queue: Queue[Key] = Queue(self._work)
        self._addresses = itertools.count(1)
        self._settled = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._informer.run())
            await self._informer.settled()
            self._settled = True
            for key in self._informer.known():
                self._queue.add(key)
            group.create_task(self._queue.run(self._runners))

    def collect(self) -> None:
        """From now on owners' children go with them, those of owners of before, too."""
        self._collects = True
        self._touched(None, None)

    def _touched(self, _resource: object, keys: Iterable[Key] | None) -> None:
        if self._settled:
            for key in self._informer.known() if keys is None else keys:
                self._queue.add(key)

    async def _work(self, key: Key) -> float | None:
        try:
            await self._step(key)
        except apierrors.ApiError as error:
            raise Again(str(error), _AGAIN_S) from None
        return None

    async def _step(self, key: Key) -> None:
        document = self._informer.get(PDCLUSTER.kind, *key)
        children = self._informer.children(key)
        uid = document["metadata"]["uid"] if document else ""
        owners = []
        for child in children:
            if child["kind"] == POD.kind:
                continue
            if self._collects and not conflicts.is_owned(child, uid):
                if conflicts.is_pdclusters(child):
                    await self._delete(child)
            elif child["kind"] in (STATEFUL_SET.kind, DEPLOYMENT.kind):
                owners.append(child)
        wanted = {name: owner for owner in owners for name in _pod_names(owner)}
        alive = {owner["metadata"]["uid"] for owner in owners}
        there = {}
        for pod in (one for one in children if one["kind"] == POD.kind):
            name = pod["metadata"]["name"]
            if name in wanted and conflicts.controller_uid(pod) in alive:
                there[name] = pod
            else:
                await self._delete(pod)
        for name, owner in wanted.items():
            if name not in there:
                there[name] = await self._create(name, owner)
            await self._see_to(there[name])

    async def _create(self, name: str, owner: Manifest) -> Manifest:
        """The pod of that name; its spec is cut to what the API server demands."""
        template = owner["spec"]["template"]
        metadata = owner["metadata"]
        reference = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet" if owner["kind"] == DEPLOYMENT.kind else owner["kind"],
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": metadata["namespace"],
                "labels": template["metadata"]["labels"],
                "ownerReferences": [reference],
            },
            "spec": {
                "automountServiceAccountToken": False,
                "containers": [
                    {"name": one["name"], "image": one["image"]}
                    for one in template["spec"]["containers"]
                ],
            },
        }
        made = await self._api.create(POD, pod)
        self._informer.wrote(POD.kind, made)
        return made

    async def _see_to(self, pod: Manifest) -> None:
        """Ready, or not, as the test has it."""
        wanted = "True" if self.ready(pod) else "False"
        conditions = (pod.get("status") or {}).get("conditions") or []
        if any((one["type"], one["status"]) == ("Ready", wanted) for one in conditions):
            return
        number = next(self._addresses)
        metadata = pod["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "status": {
                "phase": "Running",
                "podIP": f"127.{number >> 16 & 63 | 64}.{number >> 8 & 255}.{number & 255}",
                "conditions": [{"type": "Ready", "status": wanted}],
            },
        }
        made = await self._api.apply(POD, body, manager="podstub", subresource="status")
        self._informer.wrote(POD.kind, made)

    async def _delete(self, item: Manifest) -> None:
        metadata = item["metadata"]
        with suppress(apierrors.NotFound):
            await self._api.delete(
                BY_KIND[item["kind"]],
                metadata["namespace"],
                metadata["name"],
                uid=metadata["uid"],
            )
        self._informer.deleted({"kind": item["kind"], **item})


def _pod_names(owner: Manifest) -> Iterator[str]:
    name, spec = owner["metadata"]["name"], owner["spec"]
    middle = f"-{revision_of(spec['template'])}" if owner["kind"] == DEPLOYMENT.kind else ""
    for number in range(spec.get("replicas", 1)):
        yield f"{name}{middle}-{number}"


@asynccontextmanager
async def running(kubeconfig: Path, namespace: str = "", **options: Any) -> AsyncIterator[PodStub]:
    """A stub at work, in this loop."""
    api = Kube(await kube.connect(str(kubeconfig)))
    stub = PodStub(api, namespace, **options)
    task = asyncio.create_task(stub.run())
    try:
        yield stub
    finally:
        task.cancel()
        await asyncio.wait([task])
        await api.close()
        if not task.cancelled():
            task.result()
