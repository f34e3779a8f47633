"""The API server's audit log: which requests were made, by whom. Tests count writes with it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True)
class Request:
    """One request that was answered (or, of a watch, that began)."""

    verb: str  # get, list, watch, create, update, patch, delete, deletecollection
    user: str  # system:serviceaccount:NAMESPACE:NAME, or admin
    agent: str
    path: str
    group: str
    resource: str  # the plural, as in `statefulsets`
    subresource: str
    namespace: str
    name: str
    code: int


class Audit:
    """What was logged since it was made, or since `forget`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._from = 0
        self.forget()

    def forget(self) -> None:
        """What has been up to now counts no more."""
        self._from = self._log.stat().st_size if self._log.exists() else 0

    def requests(
        self, *, user: str = "", namespace: str = "", resource: str = "", verb: str = ""
    ) -> list[Request]:
        """All requests that match what is given; `user` matches by its end, so that a
        ServiceAccount is found by `NAMESPACE:NAME`."""
        return [
            one
            for one in self._read()
            if one.user.endswith(user)
            and namespace in ("", one.namespace)
            and resource in ("", one.resource)
            and verb in ("", one.verb)
        ]

    def writes(self, *, user: str = "", namespace: str = "", resource: str = "") -> list[Request]:
        """The writes among them, also those that changed nothing or were refused."""
        found = self.requests(user=user, namespace=namespace, resource=resource)
        return [one for one in found if one.verb in WRITES]

    def _read(self) -> Iterator[Request]:
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._from)
            for line in log:
                if not line.endswith(b"\n"):
                    return  # is being written
                event = json.loads(line)
                begins = event["stage"] == "ResponseStarted"
                if begins == (event["verb"] == "watch"):
                    yield _request(event)


def _request(event: dict[str, object]) -> Request:
    def table(key: str) -> dict[str, object]:
        found = event.get(key)
        return found if isinstance(found, dict) else {}

    target, answer = table("objectRef"), table("responseStatus")
    code = answer.get("code")
    return Request(
        verb=str(event["verb"]),
        user=str(table("user").get("username", "")),
        agent=str(event.get("userAgent", "")),
        path=str(event["requestURI"]),
        group=str(target.get("apiGroup", "")),
        resource=str(target.get("resource", "")),
        subresource=str(target.get("subresource", "")),
        namespace=str(target.get("namespace", "")),
        name=str(target.get("name", "")),
        code=code if isinstance(code, int) else 0,
    )
