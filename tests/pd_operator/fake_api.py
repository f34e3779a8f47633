"""An API server in a few dicts, as a `kube.Transport`: versions, uids, preconditions, watches.

For what has to be quick or exactly timed; tests/envtest has the real one.
"""

import asyncio
import copy
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from pd_operator import apierrors
from pd_operator.kube import Request, Response
from pd_operator.podparts import Manifest

_AHEAD: dict[str, Any] = {
    "code": 504,
    "reason": "Timeout",
    "details": {"causes": [{"reason": "ResourceVersionTooLarge"}]},
}
CREATED = "2026-01-01T00:00:00Z"
Place = tuple[str, str, str]
"""Kind, namespace and name."""


@dataclass
class FakeApi:
    """`refuse` maps verbs to what they answer instead: a status, or no answer at all (0)."""

    objects: dict[Place, Manifest] = field(default_factory=dict)
    refuse: dict[str, int] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    asked: list[Request] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    """Watches from before this version get a 410."""

    def __post_init__(self) -> None:
        self._events: list[tuple[int, str, Manifest]] = []
        self._changed = asyncio.Condition()
        self._hung_up = 0

    # ---- by hand ------------------------------------------------------------------

    async def put(self, item: Manifest, *, told: bool = True) -> Manifest:
        """Creates or changes; `told` False: no watch hears of it."""
        place = _place(item)
        old = self.objects.get(place)
        self.version += 1
        uid = old["metadata"]["uid"] if old else f"uid-{self.version}"
        metadata = {"uid": uid, **item["metadata"], "resourceVersion": str(self.version)}
        made = {**copy.deepcopy(item), "metadata": metadata}
        self.objects[place] = made
        if told:
            await self._tell("MODIFIED" if old else "ADDED", made)
        return made

    async def remove(self, kind: str, namespace: str, name: str, *, told: bool = True) -> None:
        gone = self.objects.pop((kind, namespace, name))
        self.version += 1
        if told:
            metadata = {**gone["metadata"], "resourceVersion": str(self.version)}
            await self._tell("DELETED", {**gone, "metadata": metadata})

    async def bookmark(self) -> None:
        self.version += 1
        metadata = {"resourceVersion": str(self.version)}
        await self._tell("BOOKMARK", {"kind": "", "metadata": metadata})

    def restore(self, version: int) -> None:
        """A backup without anything: versions begin anew."""
        self.version = version
        self.objects.clear()
        self._events.clear()

    async def hang_up(self) -> None:
        """Ends every watch that is under way."""
        async with self._changed:
            self._hung_up += 1
            self._changed.notify_all()

    async def _tell(self, kind: str, item: Manifest) -> None:
        async with self._changed:
            self._events.append((self.version, kind, item))
            self._changed.notify_all()

    # ---- the transport ----------------------------------------------------------------

    async def send(self, request: Request) -> Response:
        self.asked.append(request)
        code = self.refuse.get(request.verb)
        if code is not None:
            if not code:
                raise apierrors.Unavailable("no answer")
            return _status(code)
        if request.resource.kind in self.absent:
            return _status(404)
        return await self._carry_out(request)

    async def _carry_out(self, request: Request) -> Response:
        kind, name = request.resource.kind, request.path.rpartition("/")[2]
        if request.verb == "list":
            if int(request.query.get("resourceVersion", 0)) > self.version:
                return Response(504, {}, json.dumps(_AHEAD).encode())
            items = [one for place, one in self.objects.items() if place[0] == kind]
            body = {"metadata": {"resourceVersion": str(self.version)}, "items": items}
            return Response(200, {}, json.dumps(body, separators=(",", ":")).encode())
        if request.verb == "create":
            place = (kind, request.namespace, request.body["metadata"]["name"])
            return (
                _status(409, "AlreadyExists")
                if place in self.objects
                else (await self._written(request.body, 201))
            )
        if request.verb == "apply":
            return await self._apply(request)
        found = self.objects.get((kind, request.namespace, name))
        if found is None:
            return _status(404)
        if request.verb == "get":
            return Response(200, {}, json.dumps(found).encode())
        checked = request.verb in ("update", "patch")
        wanted = request.body["metadata"].get("resourceVersion") if checked else ""
        if wanted and wanted != found["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        if request.verb == "patch":
            merged = {part: {**found[part], **request.body[part]} for part in request.body}
            return await self._written({**found, **merged}, 200)
        return await self._written(request.body, 200)

    async def _apply(self, request: Request) -> Response:
        """Whoever applies owns all: enough where one manager applies whole objects."""
        body = request.body
        place = _place(body)
        found = self.objects.get(place)
        metadata = {
            k: v for k, v in body["metadata"].items() if k not in ("uid", "resourceVersion")
        }
        wanted = body["metadata"].get("resourceVersion")
        if found is None:
            made = {**body, "metadata": {**metadata, "creationTimestamp": CREATED}}
            return await self._written(made, 201)
        if wanted and wanted != found["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        if request.path.endswith("/status"):
            return await self._written({**found, "status": body["status"]}, 200)
        spec = {**found.get("spec", {}), **body.get("spec", {})}
        merged = {**found["metadata"], **metadata}
        for field_ in ("annotations", "labels"):
            merged[field_] = {**found["metadata"].get(field_, {}), **metadata.get(field_, {})}
        made = {**found, **body, "metadata": merged, "spec": spec}
        same = {k: v for k, v in made.items() if found.get(k) != v}
        return (
            Response(200, {}, json.dumps(found).encode())
            if not same
            else (await self._written(made, 200))
        )

    async def _written(self, body: Manifest, code: int) -> Response:
        return Response(code, {}, json.dumps(await self.put(body)).encode())

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        self.asked.append(request)
        code = self.refuse.get("watch")
        if code is not None:
            raise apierrors.from_response(code, {}, b"{}") if code else apierrors.Unavailable("no")
        if request.resource.kind in self.absent:
            raise apierrors.NotFound("no such kind", code=404)
        seen, hung_up = int(request.query["resourceVersion"]), self._hung_up
        if seen < self.oldest or seen > self.version:
            error = _AHEAD if seen > self.version else {"code": 410, "reason": "Expired"}
            yield json.dumps({"type": "ERROR", "object": error}).encode()
            return
        while hung_up == self._hung_up:
            for version, kind, item in [one for one in self._events if one[0] > seen]:
                seen = version
                if kind == "BOOKMARK" or item["kind"] == request.resource.kind:
                    yield json.dumps({"type": kind, "object": item}).encode()
            async with self._changed:
                if hung_up == self._hung_up and not self._newer(seen):
                    await self._changed.wait()

    def _newer(self, seen: int) -> bool:
        return any(version > seen for version, _, _ in self._events)

    async def close(self) -> None:
        pass


def _place(item: Manifest) -> Place:
    metadata = item["metadata"]
    return item["kind"], metadata.get("namespace", ""), metadata["name"]


def _status(code: int, reason: str = "") -> Response:
    return Response(code, {}, json.dumps({"kind": "Status", "reason": reason}).encode())
