"""PURE. What can go wrong with one call of the Kubernetes API, as types to decide by."""

import json
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A call that didn't succeed. Its subclasses say what to do about it."""

    def __init__(self, message: str, *, code: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class NotFound(ApiError):
    """The object, or the whole kind, isn't there."""


class Conflict(ApiError):
    """What we know is out of date: look again, then decide again."""


class AlreadyExists(Conflict):
    """Something of that name is there already."""


class Gone(ApiError):
    """The version to continue from is no longer known: list again."""


class VersionAhead(Gone):
    """The server hasn't come to that version, and maybe never will (a restored backup)."""


class Throttled(ApiError):
    """Too many requests; `retry_after_s` says when to come back."""


class Unavailable(ApiError):
    """No answer, or the server's own trouble: the same call may succeed later."""


class Silent(Unavailable):
    """A watch that tells nothing, not even that there is nothing to tell."""


class Invalid(ApiError):
    """The server will never take this object as it is."""


class Forbidden(ApiError):
    """Not allowed, by RBAC or by an admission rule."""


_BY_CODE: dict[int, type[ApiError]] = {
    400: Invalid,
    401: Unavailable,  # a token that has just expired is read again
    403: Forbidden,
    404: NotFound,
    405: Invalid,
    409: Conflict,
    410: Gone,
    413: Invalid,
    415: Invalid,
    422: Invalid,
    429: Throttled,
}


def from_response(code: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error that a response outside 2xx means."""
    try:
        status = json.loads(body)
    except ValueError:
        status = {"message": body[:500].decode(errors="replace")}
    if not isinstance(status, dict):
        status = {}
    return _error(code, status, _seconds(headers.get("Retry-After", "")))


def from_status(status: Mapping[str, Any]) -> ApiError:
    """The error that an ERROR event in the middle of a watch means."""
    return _error(int(status.get("code") or 500), status, 0.0)


def _error(code: int, status: Mapping[str, Any], retry_after_s: float) -> ApiError:
    details = status.get("details") or {}
    retry_after_s = retry_after_s or float(details.get("retryAfterSeconds") or 0)
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or reason or f"status {code}")
    causes = details.get("causes") or []
    kind = _BY_CODE.get(code, Unavailable)
    if any(cause.get("reason") == "ResourceVersionTooLarge" for cause in causes):
        kind = VersionAhead
    elif reason == "AlreadyExists":
        kind = AlreadyExists
    elif code == 422 and any(cause.get("field") == "metadata.uid" for cause in causes):
        kind = Conflict  # the object of that name is another one by now
    elif code == 500 and "failed to create typed patch object" in message:
        kind = Invalid  # a field that the server doesn't know; it won't learn it
    return kind(message, code=code, retry_after_s=retry_after_s)


def _seconds(text: str) -> float:
    """Retry-After in seconds; its other form, a date, isn't used by API servers."""
    return float(text) if text.isdecimal() else 0.0
