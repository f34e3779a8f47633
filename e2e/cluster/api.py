"""A Kubernetes API as tests want it: plain dicts in and out, waits with deadlines.

The kubernetes package's models know no custom resources and lose fields that they don't
know, so only its transport and its kubeconfig loader are used.
"""

import base64
import json
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3.exceptions
import yaml
from kubernetes import client, config

Manifest = dict[str, Any]

CALL_DEADLINE_S = 30.0
POLL_S = 0.05
_TYPES = {
    "apply": "application/apply-patch+yaml",
    "json": "application/json-patch+json",
    "merge": "application/merge-patch+json",
}


class ApiError(Exception):
    """The API server said no; `code` and `reason` are its own."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


class Api:
    """Calls one API server as one user."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        settings = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=settings)
        settings.retries = False  # a test wants to see what a user would
        self._client = client.ApiClient(settings)
        self._kinds: dict[tuple[str, str], tuple[str, bool]] = {}

    def close(self) -> None:
        self._client.rest_client.close()

    # ---- one call -------------------------------------------------------------

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        query: dict[str, str] | None = None,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> Any:
        """The answer's JSON (or text); ApiError for a status of 400 and more, OSError where
        none comes."""
        headers: dict[str, str] = {"Accept": "application/json", "Content-Type": content_type}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        url = self._client.configuration.host + path
        if query:
            url += "?" + urlencode(query)
        try:
            answer = self._client.call_api(method, url, headers, body, _request_timeout=deadline_s)
            text = (answer.read() or b"").decode()
        except (client.ApiException, urllib3.exceptions.HTTPError) as error:
            raise ConnectionError(f"{method} {path}: {error}") from error
        if answer.status >= 400:
            raise _error(answer.status, text)
        return json.loads(text) if text.startswith(("{", "[")) else text

    # ---- objects --------------------------------------------------------------

    def path(
        self, api_version: str, kind: str, name: str = "", namespace: str = "", sub: str = ""
    ) -> str:
        """The path of an object or, without a name, of its kind."""
        plural, namespaced = self._kind(api_version, kind)
        parts = ["/api" if "/" not in api_version else "/apis", api_version]
        if namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (plural, name, sub) if part]
        return "/".join(parts)

    def get(self, api_version: str, kind: str, name: str, namespace: str = "") -> Manifest:
        return self._object("GET", self.path(api_version, kind, name, namespace))

    def find(self, api_version: str, kind: str, name: str, namespace: str = "") -> Manifest | None:
        """The object, or None where there is none."""
        try:
            return self.get(api_version, kind, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def items(
        self, api_version: str, kind: str, namespace: str = "", labels: str = ""
    ) -> list[Manifest]:
        """The objects, of all namespaces when none is named."""
        query = {"labelSelector": labels} if labels else {}
        found = self.call("GET", self.path(api_version, kind, namespace=namespace), query=query)
        return [{"apiVersion": api_version, "kind": kind, **item} for item in found["items"]]

    def create(self, manifest: Manifest, namespace: str = "") -> Manifest:
        namespace = manifest["metadata"].get("namespace", namespace)
        path = self.path(manifest["apiVersion"], manifest["kind"], namespace=namespace)
        return self._object("POST", path, manifest)

    def replace(self, manifest: Manifest, namespace: str = "", sub: str = "") -> Manifest:
        return self._object("PUT", self._path_of(manifest, namespace, sub), manifest)

    def apply(
        self,
        manifest: Manifest,
        namespace: str = "",
        *,
        manager: str = "test",
        force: bool = True,
        sub: str = "",
    ) -> Manifest:
        """Server-side apply."""
        return self._object(
            "PATCH",
            self._path_of(manifest, namespace, sub),
            manifest,
            content_type=_TYPES["apply"],
            query={"fieldManager": manager, "force": str(force).lower()},
        )

    def apply_file(self, file: Path, namespace: str = "") -> list[Manifest]:
        """Every document of a YAML file."""
        return [self.apply(document, namespace) for document in documents(file)]

    def patch(
        self,
        api_version: str,
        kind: str,
        name: str,
        body: Any,
        namespace: str = "",
        *,
        sub: str = "",
        type: str = "merge",
    ) -> Manifest:
        """A merge patch, or a JSON patch (`type="json"`); `sub="status"` for the status."""
        path = self.path(api_version, kind, name, namespace, sub)
        return self._object("PATCH", path, body, content_type=_TYPES[type])

    def delete(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str = "",
        *,
        propagation: str = "Background",
        uid: str = "",
        grace_s: int | None = None,
    ) -> None:
        """Deletes it if it's there."""
        body: Manifest = {"propagationPolicy": propagation}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            self.call("DELETE", self.path(api_version, kind, name, namespace), body)
        except ApiError as error:
            if error.code != 404:
                raise

    # ---- within ---------------------------------------------------------------

    def _object(self, method: str, path: str, body: Any = None, **options: Any) -> Manifest:
        answer = self.call(method, path, body, **options)
        if not isinstance(answer, dict):
            raise ApiError(500, "NotAnObject", f"{method} {path} answered {answer!r}")
        return answer

    def _path_of(self, manifest: Manifest, namespace: str, sub: str) -> str:
        metadata = manifest["metadata"]
        namespace = metadata.get("namespace", namespace)
        kind = manifest["kind"]
        return self.path(manifest["apiVersion"], kind, metadata["name"], namespace, sub)

    def _kind(self, api_version: str, kind: str) -> tuple[str, bool]:
        """(plural, namespaced), from the server's discovery. A custom resource appears there
        a moment after its definition was established, so an unknown kind is asked for again."""
        known = self._kinds.get((api_version, kind))
        if known is None:
            prefix = "/api" if "/" not in api_version else "/apis"
            for resource in self.call("GET", f"{prefix}/{api_version}")["resources"]:
                if "/" not in resource["name"]:
                    entry = (resource["name"], resource["namespaced"])
                    self._kinds[(api_version, resource["kind"])] = entry
            known = self._kinds.get((api_version, kind))
        if known is None:
            raise ApiError(404, "NotFound", f"the server knows no {kind} in {api_version}")
        return known


def wait_for(what: str, check: Callable[[], Any], deadline_s: float = CALL_DEADLINE_S) -> Any:
    """Polls until `check` gives something true, and returns that. What it raised last is told."""
    end = time.monotonic() + deadline_s
    problem: Exception | None = None
    while True:
        try:
            if found := check():
                return found
            problem = None
        except (ApiError, OSError, urllib3.exceptions.HTTPError) as error:
            problem = error
        if time.monotonic() > end:
            because = f" ({type(problem).__name__}: {problem})" if problem else ""
            raise TimeoutError(f"not within {deadline_s:g} s: {what}{because}")
        time.sleep(POLL_S)


def documents(file: Path) -> Iterator[Manifest]:
    """The objects in a YAML file, lists opened."""
    for document in yaml.safe_load_all(file.read_text()):
        if not document:
            continue
        if document.get("kind", "").endswith("List"):
            yield from document["items"]
        else:
            yield document


def install_crds(api: Api, files: Iterable[Path], deadline_s: float = CALL_DEADLINE_S) -> list[str]:
    """Applies CustomResourceDefinitions and waits until they serve; their names."""
    names = []
    for file in files:
        for manifest in api.apply_file(file):
            if manifest["kind"] == "CustomResourceDefinition":
                names.append(manifest["metadata"]["name"])
    for name in names:
        wait_for(f"{name} is established", partial(_served, api, name), deadline_s)
    return names


def _served(api: Api, name: str) -> bool:
    found = api.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", name)
    # At first the server gives null.
    conditions = found.get("status", {}).get("conditions") or []
    states = {c["type"]: c["status"] for c in conditions}
    if states.get("NamesAccepted") == "False":
        raise ApiError(409, "NamesNotAccepted", f"{name}: {found['status']['conditions']}")
    version = f"{found['spec']['group']}/{found['spec']['versions'][0]['name']}"
    if states.get("Established") != "True":
        return False
    served = api.call("GET", f"/apis/{version}")["resources"]
    return any(r["name"] == found["spec"]["names"]["plural"] for r in served)


def _error(code: int, text: str) -> ApiError:
    try:
        status = json.loads(text)
        return ApiError(code, status.get("reason", ""), status.get("message", text))
    except (ValueError, AttributeError):
        return ApiError(code, "", text)


def kubeconfig(url: str, authority: Path, token: str, namespace: str = "default") -> str:
    """A kubeconfig that stands alone, for one user with a bearer token."""
    authority_data = base64.b64encode(authority.read_bytes()).decode()
    cluster = {"server": url, "certificate-authority-data": authority_data}
    context = {"cluster": "test", "user": "test", "namespace": namespace}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
    )
