"""Answers in OpenAI's error format."""

from dataclasses import replace

import msgspec

from pd_core.failures import Failure, FailureKind

MAX_MESSAGE_CHARS = 1000  # of an error: it may quote what the client sent
MAX_PARAM_CHARS = 200


class ApiError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: FailureKind = FailureKind.INVALID_REQUEST,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        message = message[:MAX_MESSAGE_CHARS]
        super().__init__(message)
        self.status = status
        self.param = param and param[:MAX_PARAM_CHARS]
        self.code = code
        self.headers = headers
        self.failure = Failure(kind, message)

    @classmethod
    def of(cls, failure: Failure, param: str | None = None) -> "ApiError":
        status = failure.traits.http_status
        made = cls(status, failure.message, param=param, code=failure.kind, kind=failure.kind)
        made.failure = replace(made.failure, retry_after_s=failure.retry_after_s)
        return made

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self._fields()})

    def event(self) -> bytes:
        """The last event of a stream that fails after its first byte."""
        return b"data: " + self.body() + b"\n\n"

    def _fields(self) -> dict[str, str | None]:
        return {
            "message": self.failure.message,
            "type": self.failure.traits.openai_type,
            "param": self.param,
            "code": self.code,
        }


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, but: str = "leave it out") -> ApiError:
    message = f"'{param}' with this value isn't supported yet; {but}."
    return invalid(param, message, "unsupported_parameter")
