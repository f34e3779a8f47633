"""One pod's life: its init containers in order, then its containers, until it is deleted."""

import asyncio
import shutil
from typing import Any

from pd_operator.local.container import Container, PodContext
from pd_operator.podparts import Manifest


class Pod:
    """A Pod object and the processes behind it."""

    def __init__(self, context: PodContext, owner: str) -> None:
        self._context = context
        self.owner = owner
        spec = context.pod["spec"]
        self._inits = [Container(item, context) for item in spec.get("initContainers", [])]
        self._containers = [Container(item, context) for item in spec["containers"]]
        self._initialized = False
        self.deleted_at = ""
        """When it was told to end, RFC 3339."""
        self._task = asyncio.create_task(self._run())

    @property
    def name(self) -> str:
        return self._context.name

    @property
    def ip(self) -> str:
        return str(self._context.pod["status"]["podIP"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self._context.pod["metadata"]["labels"])

    @property
    def terminating(self) -> bool:
        return bool(self.deleted_at)

    @property
    def ready(self) -> bool:
        return self._initialized and all(item.ready for item in self._containers)

    @property
    def pid(self) -> int | None:
        """The process of its first container, or of the init container that runs."""
        everyone = self._containers if self._initialized else self._inits
        return next((item.pid for item in everyone if item.pid is not None), None)

    @property
    def log(self) -> str:
        everyone = self._containers if self._initialized else [*self._inits, *self._containers]
        return str(everyone[0].log.path)

    @property
    def given_up(self) -> str:
        """The last words of a container that stays ended because no restart would help."""
        everyone = [*self._inits, *self._containers]
        return next((item.given_up for item in everyone if item.given_up), "")

    async def _run(self) -> None:
        for container in self._inits:
            if not await container.run_to_success():
                return
        self._initialized = True
        self._context.say(self.name, "starting")
        async with asyncio.TaskGroup() as group:
            for container in self._containers:
                group.create_task(container.run())

    async def stop(self, hard_grace_s: float | None = None) -> None:
        """Ends its processes and removes what was its own: within its own grace period,
        or, when the whole cluster goes, within `hard_grace_s` and without preStop pauses."""
        self._context.changed()
        grace_s = self._context.pod["spec"].get("terminationGracePeriodSeconds", 30)
        pre_stop = hard_grace_s is None
        if hard_grace_s is not None:
            grace_s = min(grace_s, hard_grace_s)
        everyone = [*self._inits, *self._containers]
        await asyncio.gather(*(item.stop(grace_s, pre_stop=pre_stop) for item in everyone))
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.volumes.remove()
        shutil.rmtree(self._context.folder, ignore_errors=True)

    def failed(self) -> BaseException | None:
        """What ended its task before its time: a bug of ours."""
        if not self._task.done() or self._task.cancelled() or self.terminating:
            return None
        return self._task.exception()

    def document(self) -> Manifest:
        """The Pod object as the API server would give it."""
        pod = self._context.pod
        metadata: dict[str, Any] = dict(pod["metadata"])
        if self.deleted_at:
            metadata["deletionTimestamp"] = self.deleted_at
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Initialized", "status": str(self._initialized)},
            {"type": "Ready", "status": str(self.ready)},
        ]
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": pod["spec"],
            "status": {
                "podIP": self.ip,
                "phase": "Running" if self._initialized else "Pending",
                "conditions": conditions,
                "initContainerStatuses": [item.document() for item in self._inits],
                "containerStatuses": [item.document() for item in self._containers],
            },
        }
