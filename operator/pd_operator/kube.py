"""The Kubernetes API: the few calls that we make, each with a deadline and typed errors.

The only importer of `kubernetes`. It serves as the way to the server (configuration, TLS,
tokens, connections); objects are plain dicts, since its typed models cost three times as
much a call.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from kubernetes.aio import client, config

from pd_operator import apierrors
from pd_operator.podparts import Manifest
from pd_operator.resources import Resource

log = logging.getLogger("pd_operator.kube")

CALL_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 70.0
"""How long a watch may say nothing: bookmarks come every 60 s."""
SPEC_MANAGER = "pdcluster-operator"
STATUS_MANAGER = "pdcluster-operator-status"
REPLICAS_MANAGER = "pdcluster-operator-replicas"

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"
_MAX_EVENT_BYTES = 64 << 20
_WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `verb` and `resource` are for metrics and tests."""

    verb: str
    resource: Resource
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = _JSON
    timeout_s: float = CALL_TIMEOUT_S
    namespace: str = ""

    @property
    def is_write(self) -> bool:
        return self.method in _WRITES

    @property
    def url(self) -> str:
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path


@dataclass(frozen=True, slots=True)
class Response:
    code: int
    headers: Mapping[str, str]
    body: bytes


class Transport(Protocol):
    """How requests reach the server. Tests put faults in between."""

    async def send(self, request: Request) -> Response:
        """The response, whatever its status. Raises Unavailable when there is none."""
        ...

    def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The lines of a watch. Raises ApiError."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Listed:
    version: str
    items: "Items"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """`kind` is ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    object: Manifest


Observer = Callable[[Request, int, float], None]
"""Hears of each call: the request, the status (0: no answer) and the seconds."""
Guard = Callable[[Request], None]
"""Is asked right before each write, and raises when it mustn't be made."""


class Kube:
    """The verbs. All but `watch` end within their deadline."""

    def __init__(
        self,
        transport: Transport,
        *,
        guard: Guard = lambda _request: None,
        observer: Observer = lambda _request, _code, _seconds: None,
    ) -> None:
        self._transport = transport
        self._guard = guard
        self._observer = observer

    async def close(self) -> None:
        await self._transport.close()

    async def get(
        self, resource: Resource, namespace: str, name: str, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Manifest:
        path = resource.path(namespace, name)
        request = Request("get", resource, "GET", path, timeout_s=timeout_s, namespace=namespace)
        return await self._call(request)

    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        selector: str = "",
        version: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Listed:
        """All objects, at least as new as `version` ("0": any age; None: the newest)."""
        query = {"labelSelector": selector, "resourceVersion": version or ""}
        path = resource.path(namespace)
        request = Request("list", resource, "GET", path, _given(query), timeout_s=timeout_s)
        return _listed(await self._answer(request))

    async def watch(
        self,
        resource: Resource,
        namespace: str,
        *,
        version: str,
        selector: str = "",
        timeout_s: float,
    ) -> AsyncGenerator[WatchEvent, None]:
        """Events after `version`, until the server ends the stream or SILENCE_S without any."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "labelSelector": selector,
            "timeoutSeconds": str(int(timeout_s)),
        }
        path = resource.path(namespace)
        request = Request("watch", resource, "GET", path, _given(query), timeout_s=timeout_s + 30)
        began = time.monotonic()
        code = 0
        try:
            async with aclosing(self._transport.stream(request)) as lines:
                while (line := await _next(lines)) is not None:
                    code = 200
                    event = _decode(line)
                    if event.get("type") == "ERROR":
                        raise apierrors.from_status(event.get("object") or {})
                    yield WatchEvent(str(event.get("type")), event["object"])
        except apierrors.ApiError as error:
            code = error.code
            raise
        finally:
            self._observer(request, code, time.monotonic() - began)

    async def apply(
        self,
        resource: Resource,
        manifest: Manifest,
        *,
        manager: str = SPEC_MANAGER,
        subresource: str = "",
    ) -> Manifest:
        """Server-side apply. With metadata.uid and resourceVersion only to that very object."""
        namespace, name = _place(manifest)
        return await self._call(
            Request(
                "apply",
                resource,
                "PATCH",
                resource.path(namespace, name, subresource),
                {"fieldManager": manager, "force": "true"},
                manifest,
                _APPLY,
                namespace=namespace,
            )
        )

    async def patch(
        self, resource: Resource, namespace: str, name: str, change: Manifest
    ) -> Manifest:
        """A merge patch by the field manager of specs."""
        return await self._call(
            Request(
                "patch",
                resource,
                "PATCH",
                resource.path(namespace, name),
                {"fieldManager": SPEC_MANAGER},
                change,
                _MERGE,
                namespace=namespace,
            )
        )

    async def create(
        self, resource: Resource, manifest: Manifest, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Manifest:
        namespace, _ = _place(manifest)
        return await self._call(
            Request(
                "create",
                resource,
                "POST",
                resource.path(namespace),
                {"fieldManager": SPEC_MANAGER},
                manifest,
                timeout_s=timeout_s,
                namespace=namespace,
            )
        )

    async def replace(
        self, resource: Resource, manifest: Manifest, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Manifest:
        """Needs metadata.resourceVersion to be safe against other writers."""
        namespace, name = _place(manifest)
        return await self._call(
            Request(
                "update",
                resource,
                "PUT",
                resource.path(namespace, name),
                {"fieldManager": SPEC_MANAGER},
                manifest,
                timeout_s=timeout_s,
                namespace=namespace,
            )
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, version: str = ""
    ) -> Manifest:
        """Deletes this very object; what it owns goes in the background."""
        preconditions = _given({"uid": uid, "resourceVersion": version})
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": preconditions,
            "propagationPolicy": "Background",
        }
        path = resource.path(namespace, name)
        request = Request("delete", resource, "DELETE", path, body=body, namespace=namespace)
        return await self._call(request)

    async def _call(self, request: Request) -> Manifest:
        return _decode(await self._answer(request))

    async def _answer(self, request: Request) -> bytes:
        if request.is_write:
            self._guard(request)
        began = time.monotonic()
        code = 0
        try:
            response = await self._transport.send(request)
            code = response.code
        finally:
            self._observer(request, code, time.monotonic() - began)
        if not 200 <= code < 300:
            raise apierrors.from_response(code, response.headers, response.body)
        return response.body


class _List(msgspec.Struct):
    """A list whose items are still text."""

    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    items: list[msgspec.Raw] | None = None


class Items:
    """The objects of a list: text that is parsed one by one, whenever they are gone through.
    All at once would take five times the memory of the text."""

    def __init__(self, raw: list[msgspec.Raw]) -> None:
        self._raw = raw

    def __iter__(self) -> Iterator[Manifest]:
        for one in self._raw:
            yield _decode(one)

    def __bool__(self) -> bool:
        return bool(self._raw)


_LISTS = msgspec.json.Decoder(_List)


def _listed(body: bytes) -> Listed:
    try:
        found = _LISTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise apierrors.Unavailable(f"the answer is no list: {error}") from error
    return Listed(str(found.metadata.get("resourceVersion", "")), Items(found.items or []))


async def _next(lines: AsyncIterator[bytes]) -> bytes | None:
    """The next line, None at the end; silence is a failure."""
    try:
        async with asyncio.timeout(SILENCE_S):
            return await anext(lines, None)
    except TimeoutError:
        raise apierrors.Silent(f"nothing heard for {SILENCE_S:g} s") from None


def _place(manifest: Manifest) -> tuple[str, str]:
    metadata = manifest["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def _given(query: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in query.items() if value}


def _decode(body: bytes | msgspec.Raw) -> Manifest:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise apierrors.Unavailable(f"the answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise apierrors.Unavailable("the answer is no object")
    return found


class ApiTransport:
    """Requests over `kubernetes`' client. Proxies of the environment are not used."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)
        rest = self._client.rest_client
        self._connector = _Connector(limit=rest.maxsize, ssl=rest.ssl_context)
        # With `trust_env` each call reads ~/.netrc and costs twice as much.
        configuration.client_session_kwargs = {"trust_env": False, "connector": self._connector}

    async def send(self, request: Request) -> Response:
        timeout = aiohttp.ClientTimeout(total=request.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            answer = await self._start(request, timeout)
            return Response(answer.status, answer.headers, await answer.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise apierrors.Unavailable(_why(error, request.timeout_s)) from error

    async def stream(self, request: Request) -> AsyncGenerator[bytes, None]:
        timeout = aiohttp.ClientTimeout(
            total=request.timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S + 5
        )
        try:
            answer = await self._start(request, timeout)
            try:
                if answer.status != 200:
                    body = await answer.read()
                    raise apierrors.from_response(answer.status, answer.headers, body)
                async for line in _lines(answer.content):
                    yield line
            finally:
                answer.close()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise apierrors.Unavailable(_why(error, SILENCE_S)) from error

    async def close(self) -> None:
        await self._client.close()
        await self._connector.close()

    async def _start(
        self, request: Request, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        # Packing large lists costs both sides more than their way through a cluster's network.
        headers = {
            "Accept": _JSON,
            "Accept-Encoding": "identity",
            "Content-Type": request.content_type,
        }
        # Reads an in-cluster token again when it is older than a minute.
        await self._client.update_params_for_auth(
            headers, {}, ["BearerToken"], request.path, request.method, None
        )
        answer = await self._client.call_api(
            request.method,
            self._client.configuration.host + request.url,
            header_params=headers,
            body=request.body,
            _request_timeout=timeout,
        )
        response: aiohttp.ClientResponse = answer.response
        return response


class _Connector(aiohttp.TCPConnector):
    """Ends what is given up at once: TLS's good-byes wait for the other side for half a
    minute, and would outlive the loop."""

    def _release(
        self, key: ConnectionKey, protocol: ResponseHandler, *, should_close: bool = False
    ) -> None:
        if should_close or protocol.should_close:
            protocol.abort()
        super()._release(key, protocol, should_close=should_close)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: an object may be larger than aiohttp's own limit of a line."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
        if len(rest) > _MAX_EVENT_BYTES:
            raise apierrors.Unavailable("an event of the watch never ends")


def _why(error: BaseException, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return str(error) or type(error).__name__


async def connect(kubeconfig: str = "") -> ApiTransport:
    """By a kubeconfig file, by $KUBECONFIG, or as a pod with its service account."""
    configuration = client.Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG", "")
    if path:
        await config.load_kube_config(
            config_file=path, client_configuration=configuration, persist_config=False
        )
    elif "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=configuration)
    else:
        default = Path.home() / ".kube" / "config"
        await config.load_kube_config(
            config_file=str(default), client_configuration=configuration, persist_config=False
        )
    return ApiTransport(configuration)
