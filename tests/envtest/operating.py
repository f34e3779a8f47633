"""The operator in the test's own loop, with a seam through which its API calls go."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_operator import apierrors, kube
from pd_operator.kube import Request, Response, Transport
from pd_operator.leadership import Terms
from pd_operator.metrics import Metrics
from pd_operator.podparts import Manifest
from pd_operator.resources import BY_KIND, CHILDREN, EVENT, LEASE, PDCLUSTER, POD
from pd_operator.service import Operator, Options
from tests.envtest import podstub
from tests.envtest.podstub import PodStub

_numbers = itertools.count(1)
BUSY_TERMS = Terms(duration_s=60, deadline_s=50, period_s=10, timeout_s=8)
"""For tests on a loaded machine that aren't about the lease."""


Send = Callable[[Request], Awaitable[Response]]
Stream = AsyncGenerator[bytes, None]


class Seam:
    """A transport that a test looks through, or interferes with: `on_send` gets the request
    and what sends it on, `on_stream` the request and the lines that come."""

    def __init__(
        self,
        inner: Transport,
        on_send: Callable[[Request, Send], Awaitable[Response]] | None = None,
        on_stream: Callable[[Request, Stream], Stream] | None = None,
    ) -> None:
        self.inner = inner
        self.on_send = on_send
        self.on_stream = on_stream
        self.writes: list[Request] = []

    async def send(self, request: Request) -> Response:
        if is_counted(request):
            self.writes.append(request)
        if self.on_send is not None:
            return await self.on_send(request, self.inner.send)
        return await self.inner.send(request)

    def stream(self, request: Request) -> Stream:
        lines = self.inner.stream(request)
        return lines if self.on_stream is None else self.on_stream(request, lines)

    async def close(self) -> None:
        await self.inner.close()


def is_counted(request: Request) -> bool:
    """Writes to what the operator manages."""
    return request.is_write and request.resource not in (LEASE, EVENT)


class CrashAfter:
    """Everything stops after so many writes have reached the server, as by SIGKILL: no answer
    is seen, nothing is sent any more. `crashed` comes first, `done` when the server is done."""

    def __init__(self, writes: int) -> None:
        self._left = writes
        self.crashed = asyncio.Event()
        self.done = asyncio.Event()
        self.at: Request | None = None

    async def __call__(self, request: Request, send: Send) -> Response:
        if self.crashed.is_set():
            await asyncio.Event().wait()
        if not is_counted(request):
            return await send(request)
        self._left -= 1
        last = self._left == 0
        if last:
            self.crashed.set()  # nothing else goes out meanwhile
            self.at = request
        response = await send(request)
        if last:
            self.done.set()
            await asyncio.Event().wait()
        return response


@asynccontextmanager
async def operating(
    kubeconfig: Path, namespace: str = "", *, clean: bool = True, **changes: Any
) -> AsyncIterator[tuple[Operator, Seam]]:
    """An operator at work. Each has a lease of its own unless the test names one.
    `clean` False: at the end it is cut off, as by SIGKILL."""
    seam = Seam(
        await kube.connect(str(kubeconfig)),
        changes.pop("on_send", None),
        changes.pop("on_stream", None),
    )
    number = next(_numbers)
    fields: dict[str, Any] = {
        "identity": f"test-{number}",
        "namespace": namespace,
        "lease_namespace": namespace or "default",
        "lease_name": f"operator-{number}",
        "terms": BUSY_TERMS,
        "handover_s": 0.01,
        **changes,
    }
    operator = Operator(seam, Options(**fields), Metrics())

    async def work() -> None:
        await operator.lead()
        await operator.run()

    task = asyncio.create_task(work())
    try:
        yield operator, seam
    finally:
        task.cancel()
        await asyncio.wait([task])
        if clean:
            await operator.close()
        else:
            await seam.close()
        if not task.cancelled():
            task.result()


# ---- the state of a namespace ---------------------------------------------------------


class Watching:
    """Reads what exists, as the administrator."""

    def __init__(self, api: kube.Kube, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def objects(self) -> list[Manifest]:
        found = []
        for resource in (PDCLUSTER, *CHILDREN, POD):
            if resource.optional:
                continue
            listed = await self.api.list(resource, self.namespace)
            for item in listed.items:
                item["kind"] = resource.kind
                labels = item["metadata"].get("labels") or {}
                if resource is PDCLUSTER or "pdcluster.dev/cluster" in labels:
                    found.append(item)
        return found

    async def cluster(self, name: str) -> Manifest:
        return await self.api.get(PDCLUSTER, self.namespace, name)

    async def create(self, document: Manifest) -> Manifest:
        metadata = {**document["metadata"], "namespace": self.namespace}
        return await self.api.create(PDCLUSTER, {**document, "metadata": metadata})

    async def edit(self, name: str, spec: dict[str, Any]) -> Manifest:
        return await self.api.patch(PDCLUSTER, self.namespace, name, {"spec": spec})

    async def get(self, kind: str, name: str) -> Manifest:
        return await self.api.get(BY_KIND[kind], self.namespace, name)

    async def find(self, kind: str, name: str) -> Manifest | None:
        try:
            return await self.get(kind, name)
        except apierrors.NotFound:
            return None

    async def delete(self, kind: str, name: str) -> None:
        found = await self.get(kind, name)
        await self.api.delete(BY_KIND[kind], self.namespace, name, uid=found["metadata"]["uid"])

    async def until(
        self, what: str, true: Callable[[], Awaitable[bool]], deadline_s: float = 40.0
    ) -> None:
        """Polls: what is waited for is on a server, not in this process."""
        try:
            async with asyncio.timeout(deadline_s):
                while not await true():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            state = json.dumps([_brief(one) for one in await self.objects()], indent=1)
            raise AssertionError(f"not within {deadline_s:g} s: {what}\n{state}") from None

    async def until_ready(self, name: str, deadline_s: float = 40.0) -> None:
        """The status is about the present spec, and all of it is there and serves."""

        async def ready() -> bool:
            return is_settled(await self.cluster(name))

        await self.until(f"{name} is ready", ready, deadline_s)

    async def until_condition(
        self, name: str, kind: str, reason: str, deadline_s: float = 40.0
    ) -> Manifest:
        """The condition once it has that reason."""
        found: Manifest = {}

        async def there() -> bool:
            found.clear()
            found.update(condition(await self.cluster(name), kind))
            return found.get("reason") == reason

        await self.until(f"{name} is {kind}: {reason}", there, deadline_s)
        return found

    async def until_empty(self, deadline_s: float = 40.0) -> None:
        async def empty() -> bool:
            return not await self.objects()

        await self.until("nothing is left", empty, deadline_s)


def condition(document: Manifest, kind: str) -> Manifest:
    conditions = document.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == kind), {})


def is_settled(document: Manifest) -> bool:
    status = document.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", [])}
    if status.get("observedGeneration") != document["metadata"]["generation"]:
        return False
    wanted = {"Ready": "True", "Progressing": "False"}
    return all(conditions[kind]["status"] == status for kind, status in wanted.items())


def normalised(objects: list[Manifest]) -> list[Manifest]:
    """What two runs of the same story have in common: not what is drawn by chance."""
    made = [_normal({k: v for k, v in item.items() if k != "data"}) for item in objects]
    return sorted(made, key=lambda item: (item["kind"], item["metadata"]["name"]))


_LOCAL = frozenset(
    {
        # hashes and records of manifests, with uids in them
        "pdcluster.dev/applied", "pdcluster.dev/rendered",
        "uid", "resourceVersion", "creationTimestamp", "generation", "lastTransitionTime",
        "observedGeneration", "namespace", "clusterIP", "clusterIPs", "podIP", "podIPs",
        "startTime", "nodePort", "pdcluster.dev/token-since",
    }
)  # fmt: skip


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        made = {name: _normal(item) for name, item in value.items() if name not in _LOCAL}
        if "managedFields" in made:
            fields = made["managedFields"]
            made["managedFields"] = sorted(
                {(one["manager"], one["operation"], one.get("subresource", "")) for one in fields}
            )
        return made
    return [_normal(item) for item in value] if isinstance(value, list) else value


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two values differ, for messages."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            found
            for key in sorted(a.keys() | b.keys())
            for found in differences(a.get(key), b.get(key), f"{path}.{key}")
        ]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [found for n, (x, y) in pairs for found in differences(x, y, f"{path}[{n}]")]
    return [] if a == b else [f"{path}: {a!r} != {b!r}"]


def _brief(item: Manifest) -> dict[str, Any]:
    status = item.get("status", {}) if item["kind"] == PDCLUSTER.kind else {}
    return {
        "kind": item["kind"],
        "name": item["metadata"]["name"],
        "replicas": item.get("spec", {}).get("replicas"),
        "conditions": [
            f"{one['type']}={one['status']} {one['reason']}: {one.get('message', '')}"
            for one in status.get("conditions", [])
        ],
    }


@dataclass
class Scene:
    """One namespace with pods by a stub, an operator at work, and somebody who looks on."""

    there: Watching
    stub: PodStub
    operator: Operator
    seam: Seam

    def writes(self) -> list[str]:
        """What the operator has written, in short."""
        return [
            f"{one.verb} {one.resource.kind} {one.path.rpartition('/')[2]}"
            for one in self.seam.writes
        ]


@asynccontextmanager
async def scene(kubeconfig: Path, namespace: str, **changes: Any) -> AsyncIterator[Scene]:
    """`stub` gives options of the stub; the others are those of `operating`."""
    stub_options = changes.pop("stub", {})
    changes.setdefault("lease_namespace", namespace)
    scope = "" if changes.pop("cluster_wide", False) else namespace
    async with (
        looking_on(kubeconfig, namespace) as there,
        podstub.running(kubeconfig, namespace, **stub_options) as stub,
        operating(kubeconfig, scope, **changes) as (operator, seam),
    ):
        yield Scene(there, stub, operator, seam)


@asynccontextmanager
async def looking_on(kubeconfig: Path, namespace: str) -> AsyncIterator[Watching]:
    api = kube.Kube(await kube.connect(str(kubeconfig)))
    try:
        yield Watching(api, namespace)
    finally:
        await api.close()
