"""The typed failures of a request, and the one HTTP status of each.

A failure is a value that travels: raised as `RequestFailure` inside a process, sent
as (kind, message) on the wire, shown to the client in OpenAI's error format.
"""

from dataclasses import dataclass
from enum import StrEnum


class FailureKind(StrEnum):
    """Why a request failed. The value is what travels on the wire."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_TOO_LONG = "context_length_exceeded"
    POOL_TOO_SMALL = "kv_pool_too_small"
    MODEL_NOT_FOUND = "model_not_found"
    BODY_TOO_LARGE = "body_too_large"
    OVERLOADED = "overloaded"
    NO_CAPACITY = "no_capacity"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    DEADLINE = "deadline_exceeded"
    CLIENT_GONE = "client_gone"
    WORKER_LOST = "worker_lost"
    WORKER_LATE = "worker_late"
    LAYOUT_MISMATCH = "layout_mismatch"
    TRANSFER_FAILED = "transfer_failed"
    LEASE_EXPIRED = "lease_expired"
    PREEMPTED = "preempted"
    STEP_FAILED = "step_failed"
    INTERNAL = "internal_error"


@dataclass(frozen=True, slots=True)
class FailureTraits:
    """What follows from a kind: the client's status, and whether another try may help."""

    http_status: int
    openai_type: str
    retryable: bool
    retry_after_s: int | None = None


_CLIENT = "invalid_request_error"
_SERVER = "server_error"
_TRAITS = {
    FailureKind.INVALID_REQUEST: FailureTraits(400, _CLIENT, retryable=False),
    FailureKind.CONTEXT_TOO_LONG: FailureTraits(400, _CLIENT, retryable=False),
    FailureKind.POOL_TOO_SMALL: FailureTraits(400, _CLIENT, retryable=False),
    FailureKind.MODEL_NOT_FOUND: FailureTraits(404, _CLIENT, retryable=False),
    FailureKind.BODY_TOO_LARGE: FailureTraits(413, _CLIENT, retryable=False),
    FailureKind.OVERLOADED: FailureTraits(429, "rate_limit_error", False, retry_after_s=1),
    FailureKind.NO_CAPACITY: FailureTraits(503, _SERVER, retryable=True, retry_after_s=1),
    FailureKind.NO_WORKERS: FailureTraits(503, _SERVER, retryable=False, retry_after_s=5),
    FailureKind.DRAINING: FailureTraits(503, _SERVER, retryable=True, retry_after_s=1),
    FailureKind.DEADLINE: FailureTraits(504, _SERVER, retryable=False),
    FailureKind.CLIENT_GONE: FailureTraits(499, _CLIENT, retryable=False),
    FailureKind.WORKER_LOST: FailureTraits(502, _SERVER, retryable=True),
    FailureKind.WORKER_LATE: FailureTraits(504, _SERVER, retryable=True),
    FailureKind.LAYOUT_MISMATCH: FailureTraits(503, _SERVER, retryable=True, retry_after_s=5),
    FailureKind.TRANSFER_FAILED: FailureTraits(502, _SERVER, retryable=True),
    FailureKind.LEASE_EXPIRED: FailureTraits(502, _SERVER, retryable=True),
    FailureKind.PREEMPTED: FailureTraits(503, _SERVER, retryable=True, retry_after_s=1),
    FailureKind.STEP_FAILED: FailureTraits(500, _SERVER, retryable=True),
    FailureKind.INTERNAL: FailureTraits(500, _SERVER, retryable=False),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure with a message that says what happened and, where it can, what to do."""

    kind: FailureKind
    message: str
    retry_after_s: int | None = None  # None: what the kind says

    @property
    def traits(self) -> FailureTraits:
        return _TRAITS[self.kind]

    @classmethod
    def from_wire(cls, kind: str, message: str) -> "Failure":
        """A kind that this version doesn't know becomes INTERNAL and keeps its name."""
        try:
            return cls(FailureKind(kind), message)
        except ValueError:
            return cls(FailureKind.INTERNAL, f"{kind}: {message}")


class RequestFailure(Exception):
    """Carries a Failure up to whoever answers the request."""

    def __init__(self, kind: FailureKind, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.failure = Failure(kind, message, retry_after_s)
