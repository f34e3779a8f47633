"""What admission promises to whom: SLA classes and rate limits, read from one document. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_CLASSES = 32
_BURST_S = 60.0
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class BadAdmission(ValueError):
    """The document isn't one of admission; the message names the field."""


@dataclass(frozen=True, slots=True)
class SlaClass:
    """A larger priority goes first; `share` of the work is the class's even when others
    with a larger priority would take it all. Goals in seconds; None: no promise, and no
    early refusal."""

    name: str = "default"
    priority: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A tenant's, over all routers. None: no limit. A burst is what may come at once: so
    many seconds' worth."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # prompt and asked-for output
    burst_s: float = _BURST_S


@dataclass(frozen=True, slots=True)
class Client:
    """One that has an API key. `sla` None: the first class; `limit` None: everybody's. Clients
    of a class share what it gets by their weights."""

    sla: str | None = None
    limit: RateLimit | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Promises:
    """All of it. The first class is for those who name none; `clients` are by name."""

    classes: tuple[SlaClass, ...] = (SlaClass(),)
    limit: RateLimit = RateLimit()
    clients: Mapping[str, Client] = field(default_factory=dict)

    def limit_of(self, tenant: str) -> RateLimit:
        """A tenant is a client, where there are clients."""
        client = self.clients.get(tenant)
        return self.limit if client is None or client.limit is None else client.limit

    def weight_of(self, tenant: str) -> float:
        client = self.clients.get(tenant)
        return 1.0 if client is None else client.weight

    def named(self, name: str | None) -> SlaClass | None:
        if name is None:
            return self.classes[0]
        return next((one for one in self.classes if one.name == name), None)

    @property
    def tightest_ttft_s(self) -> float | None:
        return min((c.ttft_s for c in self.classes if c.ttft_s is not None), default=None)


def read(document: Mapping[str, Any]) -> Promises:
    """From JSON: {"classes": [{"name", "priority", "ttft", "tpot", "share"}],
    "limits": {"requestsPerMinute", "tokensPerMinute", "burstSeconds"},
    "clients": {NAME: {"class", "limits", "weight"}}}; goals in seconds."""
    _only(document, {"classes", "limits", "clients"}, "admission")
    classes = tuple(_class(one, f"classes[{i}]") for i, one in enumerate(_list(document)))
    names = [one.name for one in classes]
    if len(set(names)) < len(names):
        raise BadAdmission("classes: two have the same name")
    if sum(one.share for one in classes) > 1.0 + 1e-9:
        raise BadAdmission("classes: their shares are more than 1 together")
    clients = document.get("clients", {})
    if not isinstance(clients, Mapping):
        raise BadAdmission("clients: an object")
    return Promises(
        classes or (SlaClass(),),
        _limit(document.get("limits", {}), "limits"),
        {name: _client(one, f"clients.{name}", names) for name, one in clients.items()},
    )


def _client(document: Any, where: str, classes: list[str]) -> Client:
    _only(document, {"class", "limits", "weight"}, where)
    name = document.get("class")
    if name is not None and name not in classes:
        raise BadAdmission(f"{where}.class: no class has the name {name!r}")
    limits = document.get("limits")
    limit = None if limits is None else _limit(limits, f"{where}.limits")
    return Client(name, limit, _number(document, "weight", where) or 1.0)


def _limit(document: Any, where: str) -> RateLimit:
    _only(document, {"requestsPerMinute", "tokensPerMinute", "burstSeconds"}, where)
    return RateLimit(
        _number(document, "requestsPerMinute", where),
        _number(document, "tokensPerMinute", where),
        _number(document, "burstSeconds", where) or _BURST_S,
    )


def _list(document: Mapping[str, Any]) -> list[Any]:
    found = document.get("classes", [])
    if not isinstance(found, list) or len(found) > MAX_CLASSES:
        raise BadAdmission(f"classes: a list of at most {MAX_CLASSES}")
    return found


def _class(document: Any, where: str) -> SlaClass:
    _only(document, {"name", "priority", "ttft", "tpot", "share"}, where)
    name, priority = document.get("name"), document.get("priority", 0)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadAdmission(f"{where}.name: lower-case letters, digits and dashes")
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > 1000:
        raise BadAdmission(f"{where}.priority: a whole number from -1000 to 1000")
    share = document.get("share", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise BadAdmission(f"{where}.share: a number from 0 to 1")
    ttft_s, tpot_s = (_number(document, key, where) for key in ("ttft", "tpot"))
    return SlaClass(name, priority, ttft_s, tpot_s, float(share))


def _number(document: Mapping[str, Any], key: str, where: str) -> float | None:
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise BadAdmission(f"{where}.{key}: a number above 0")
    return float(value)


def _only(document: Any, known: set[str], where: str) -> None:
    if not isinstance(document, Mapping):
        raise BadAdmission(f"{where}: an object")
    unknown = sorted(set(document) - known)
    if unknown:
        raise BadAdmission(f"{where}: unknown field {unknown[0]!r}")


NO_PROMISES = Promises()
