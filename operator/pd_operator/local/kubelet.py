"""StatefulSets, Deployments and Services of this machine: which pods run, who finds whom."""

import asyncio
import copy
import itertools
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pd_operator import tlsobjects
from pd_operator.desired import revision_of
from pd_operator.local.container import Backoff, PodContext, Publication
from pd_operator.local.network import AddressTaken, Subnet
from pd_operator.local.pod import Pod
from pd_operator.local.state import write_json
from pd_operator.local.volumes import SecretFolders, Volumes
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest
from pd_operator.status import timestamp

log = logging.getLogger("pd_operator.local")

_NODE = "localhost"
SECRET = "Secret"
_TEMPLATE_LABEL = "pod-template-hash"
_HOSTS_ENV = "PD_HOSTS_FILE"
_UNKILLABLE_S = 5.0


class Listener:
    """Who wants to know what happens. Called in the event loop; must not block."""

    def changed(self) -> None:
        """Something about an object or a pod is different."""

    def say(self, pod: str, text: str) -> None:
        """Something that a person wants to know."""

    def output(self, pod: str, line: str) -> None:
        """A line that an init container printed, or what a container that starts says to its
        startup probe; "" when that is over."""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders that the kubelet may use. `memory` is on /dev/shm."""

    state: Path
    memory: Path
    shared: Mapping[str, Path] = field(default_factory=dict)


class Kubelet:
    """Level-triggered, as the real one: `apply` and `delete` change what is wanted, and
    every change of a pod makes it look again."""

    def __init__(
        self,
        places: Places,
        listener: Listener,
        *,
        publications: tuple[Publication, ...] = (),
        backoff: Backoff | None = None,
        gives_up: bool = False,
    ) -> None:
        self._places = places
        self._listener = listener
        self._publications = publications
        self._backoff = backoff or Backoff()
        self._gives_up = gives_up
        self._subnet = Subnet()
        self._objects: dict[Ref, Manifest] = {}
        self._pods: dict[str, Pod] = {}
        self._stops: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        self._serial = itertools.count(1)
        self._secrets = SecretFolders(places.state / "secrets")
        self._hosts: dict[str, list[str]] | None = None  # as the file has it
        self._closing = False
        self._sync_due = False
        places.state.mkdir(parents=True, exist_ok=True)
        (places.state / "logs").mkdir(exist_ok=True)
        self._write_hosts()

    @property
    def pods(self) -> tuple[Pod, ...]:
        return tuple(self._pods.values())

    @property
    def hosts_file(self) -> Path:
        return self._places.state / "hosts.json"

    def apply(self, manifest: Manifest) -> None:
        """Creates an object, or replaces what it says; its time of creation stays."""
        ref = Ref(manifest["kind"], manifest["metadata"]["name"])
        stored = copy.deepcopy(manifest)
        before = self._objects.get(ref)
        metadata = before["metadata"] if before else {}
        created = metadata.get("creationTimestamp", timestamp(datetime.now(UTC)))
        stored["metadata"]["creationTimestamp"] = created
        stored["metadata"]["uid"] = metadata.get("uid", str(uuid.uuid4()))
        if ref.kind == SECRET:
            self._secrets.write(ref.name, tlsobjects.decoded(stored))
        self._objects[ref] = stored
        self._changed()

    def scale(self, ref: Ref, replicas: int) -> None:
        self._objects[ref]["spec"]["replicas"] = replicas
        self._changed()

    def delete(self, ref: Ref) -> None:
        """Its pods end as if scaled to zero."""
        self._objects.pop(ref, None)
        if ref.kind == SECRET:
            self._secrets.remove(ref.name)
        self._changed()

    def objects(self) -> Iterator[Manifest]:
        """All objects, pods among them, as the API server would give them."""
        yield from self._objects.values()
        for pod in self._pods.values():
            yield pod.document()

    def hurry(self) -> None:
        """From now on no grace period counts."""
        self._hurry.set()

    async def close(self, grace_s: float) -> None:
        """Ends every pod at once, within the grace period and a little more."""
        self._closing = True
        for pod in self.pods:
            if not pod.terminating:
                self._stop(pod, grace_s)
        timer = asyncio.get_running_loop().call_later(grace_s, self.hurry)
        if self._stops:
            await asyncio.wait(self._stops, timeout=grace_s + _UNKILLABLE_S)
        timer.cancel()
        for pod in self.pods:  # only a process that hangs in the kernel survives SIGKILL
            log.error("pod %s: process %s doesn't end", pod.name, pod.pid)
        self._subnet.close()

    def _changed(self) -> None:
        if not self._sync_due:
            self._sync_due = True
            asyncio.get_running_loop().call_soon(self._sync)

    def _sync(self) -> None:
        self._sync_due = False
        if not self._closing:
            for pod in self.pods:
                self._check(pod)
            for ref, item in list(self._objects.items()):
                if ref.kind == "StatefulSet":
                    self._sync_stateful_set(item)
                elif ref.kind == "Deployment":
                    self._sync_deployment(item)
            self._stop_orphans()
        self._write_hosts()
        self._listener.changed()

    def _check(self, pod: Pod) -> None:
        error = pod.failed()
        if error is not None and not pod.terminating:
            log.error("pod %s: its task failed", pod.name, exc_info=error)
            self._stop(pod)

    def _owned(self, owner: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.owner == owner]

    def _sync_stateful_set(self, item: Manifest) -> None:
        """Pods 0 to n - 1, each under a name of its own; the others end."""
        name, replicas = item["metadata"]["name"], item["spec"]["replicas"]
        wanted = {f"{name}-{ordinal}" for ordinal in range(replicas)}
        for pod in self._owned(f"StatefulSet/{name}"):
            if pod.name not in wanted and not pod.terminating:
                self._stop(pod)
        for pod_name in sorted(wanted - set(self._pods)):
            self._start(pod_name, f"StatefulSet/{name}", item)

    def _sync_deployment(self, item: Manifest) -> None:
        """New pods beside the old ones; the old ones end when the new ones are ready."""
        name, replicas = item["metadata"]["name"], item["spec"]["replicas"]
        digest = revision_of(item["spec"]["template"])
        mine = [pod for pod in self._owned(f"Deployment/{name}") if not pod.terminating]
        current = [pod for pod in mine if pod.labels.get(_TEMPLATE_LABEL) == digest]
        for pod in current[replicas:]:
            self._stop(pod)
        for _ in range(replicas - len(current)):
            pod_name = f"{name}-{digest}-{next(self._serial)}"
            self._start(pod_name, f"Deployment/{name}", item, {_TEMPLATE_LABEL: digest})
        if sum(pod.ready for pod in current) >= replicas:
            for pod in mine:
                if pod not in current:
                    self._stop(pod)

    def _stop_orphans(self) -> None:
        owners = {f"{ref.kind}/{ref.name}" for ref in self._objects}
        for pod in self.pods:
            if pod.owner not in owners and not pod.terminating:
                self._stop(pod)

    def _start(
        self, name: str, owner: str, item: Manifest, labels: Mapping[str, str] | None = None
    ) -> None:
        template = copy.deepcopy(item["spec"]["template"])
        try:
            address = self._subnet.allocate()
        except AddressTaken as error:
            self._listener.say(name, str(error))
            return
        metadata = {
            **template["metadata"],
            "name": name,
            "namespace": item["metadata"].get("namespace", "default"),
            "uid": str(uuid.uuid4()),
            "creationTimestamp": timestamp(datetime.now(UTC)),
        }
        metadata["labels"] = {**metadata.get("labels", {}), **(labels or {})}
        document = {
            "metadata": metadata,
            "spec": {**template["spec"], "nodeName": _NODE},
            "status": {"podIP": address, "hostIP": "127.0.0.1"},
        }
        self._pods[name] = Pod(self._context(document), owner)
        self._changed()

    def _context(self, document: Manifest) -> PodContext:
        name = document["metadata"]["name"]
        folder = self._places.state / "pods" / name
        memory = self._places.memory / name
        volumes = Volumes(document, folder / "volumes", memory, self._places.shared, self._secrets)
        return PodContext(
            pod=document,
            folder=folder,
            logs=self._places.state / "logs",
            volumes=volumes,
            base_env={
                "OMP_NUM_THREADS": str(self._threads_each()),
                **os.environ,
                _HOSTS_ENV: str(self.hosts_file),
            },
            publications=self._publications,
            backoff=self._backoff,
            hurry=self._hurry,
            changed=self._changed,
            say=self._listener.say,
            output=self._listener.output,
            gives_up=self._gives_up,
        )

    def _stop(self, pod: Pod, grace_s: float | None = None) -> None:
        pod.deleted_at = timestamp(datetime.now(UTC))
        task = asyncio.create_task(self._end(pod, grace_s))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _end(self, pod: Pod, grace_s: float | None) -> None:
        await pod.stop(grace_s)
        del self._pods[pod.name]
        self._subnet.release(pod.ip)
        self._changed()

    def _threads_each(self) -> int:
        """A worker's share of the cores, for those whose manifests say nothing.

        A container on a cluster sees its own cores only. Here all see the same ones, and
        workers that each start a thread on every core slow each other down many times over.
        """
        sets = (obj for ref, obj in self._objects.items() if ref.kind == "StatefulSet")
        workers = sum(obj["spec"].get("replicas", 1) for obj in sets)
        return max(1, len(os.sched_getaffinity(0)) // max(1, workers))

    def _write_hosts(self) -> None:
        """What DNS is to a cluster: the addresses behind each Service."""
        hosts = {
            ref.name: self._addresses(item)
            for ref, item in self._objects.items()
            if ref.kind == "Service"
        }
        if hosts != self._hosts:
            self._hosts = hosts
            write_json(self.hosts_file, hosts)

    def _addresses(self, service: Manifest) -> list[str]:
        spec = service["spec"]
        everyone = spec.get("publishNotReadyAddresses", False)
        selector = spec["selector"].items()
        return [
            pod.ip
            for pod in self.pods
            if selector <= pod.labels.items() and (everyone or (pod.ready and not pod.terminating))
        ]
