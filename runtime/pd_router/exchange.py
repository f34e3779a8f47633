"""One HTTP request and its answer over ASGI: the body, the client's going, the bytes out."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from pd_core.failures import FailureKind, RequestFailure
from pd_router.errors import ApiError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

BODY_DEADLINE_S = 60.0
JSON = b"application/json"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
)


class Pipe(Protocol):
    """Sends pieces of a body whose head is out, without waiting: soon, and before anything that
    the exchange then sends."""

    @property
    def blocked(self) -> bool:
        """The client reads too slowly, or has gone: nothing may be written now."""
        ...

    def write(self, before: bytes, text: bytes, after: bytes) -> None:
        """Three pieces that belong together. Only while it isn't blocked."""
        ...

    def take(self) -> bytes:
        """What hasn't been sent, for somebody else to send."""
        ...


class Exchange:
    """Says what was answered, so that errors after the first byte are told apart."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        closes: Callable[[], bool] = lambda: False,
    ) -> None:
        """`closes`: whether an answer that begins now ends its connection."""
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.http_version: str = scope["http_version"]
        self.client = ""  # whose API key it is, where keys are checked
        self.own_id = secrets.token_hex(12)
        self.status = 0  # 0: nothing sent yet
        self.complete = False  # the last byte is out
        self._scope = scope
        self._headers = dict(reversed(scope["headers"]))  # the first of a name counts
        self._receive = receive
        self._send = send
        self._closes = closes
        self.more_headers: Callable[[], Sequence[Header]] = tuple  # asked for at the start
        self._pipe: Pipe | None = None
        self._body_read = False
        self.request_id = self.own_id
        given = self.header(b"x-request-id")
        if given is not None and _REQUEST_ID.fullmatch(given):
            self.request_id = given.decode("ascii")

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    def allow(self, *methods: str) -> None:
        """ApiError for any other method."""
        if self.method not in methods:
            allowed = ", ".join(methods)
            raise ApiError(
                405,
                f"{self.method} isn't allowed on {self.path[:200]}; use {allowed}.",
                code="method_not_allowed",
                headers=((b"allow", allowed.encode()),),
            )

    async def read_body(self, limit: int) -> bytes:
        """The whole body: ApiError when it's too large, compressed, or comes too slowly."""
        encoding = self.header(b"content-encoding") or b"identity"
        if encoding.lower() != b"identity":
            message_text = "Compressed bodies aren't taken; leave Content-Encoding out."
            raise ApiError(415, message_text, code="unsupported_encoding")
        length = self.header(b"content-length")
        if length is not None and int(length) > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                while not self._body_read:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise RequestFailure(FailureKind.CLIENT_GONE, "The client went away.")
                    pieces.append(message["body"])
                    size += len(pieces[-1])
                    self._body_read = not message["more_body"]
                    if size > limit:
                        raise _too_large(limit)
        except TimeoutError:
            message_text = f"The body didn't arrive within {BODY_DEADLINE_S:.0f} s."
            raise ApiError(408, message_text, code="request_timeout") from None
        return b"".join(pieces)

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Calls back once when the client goes; None takes that back. Once the body is read."""
        self._scope["extensions"]["pdcluster.when_gone"](callback)

    @property
    def why_gone(self) -> str:
        """Of a client that has gone."""
        why: str = self._scope["extensions"]["pdcluster.why_gone"]()
        return why

    def make_room(self) -> bool:
        """Ends another client's stream that nobody reads, where there is one."""
        made: bool = self._scope["extensions"]["pdcluster.make_room"]()
        return made

    async def reply(
        self,
        status: int,
        body: bytes,
        headers: Sequence[Header] = (),
        content_type: bytes = JSON,
    ) -> None:
        """A whole answer."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, ((b"content-type", content_type), length, *headers))
        await self._finish(body)

    async def reply_error(self, error: ApiError) -> None:
        headers = list(error.headers)
        retry_after = error.failure.retry_after_s or error.failure.traits.retry_after_s
        if retry_after is not None:
            headers.append((b"retry-after", b"%d" % retry_after))
        if error.status == 408:
            headers.append((b"connection", b"close"))
        await self.reply(error.status, error.body(), headers)

    async def stream(self, chunk: bytes) -> None:
        """Some events of a stream; the first call sends the headers."""
        if not self.status:
            await self._start(200, _STREAM_HEADERS)
        elif self._pipe is not None:
            chunk = self._pipe.take() + chunk
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self, chunk: bytes) -> None:
        """The last events."""
        if not self.status:
            await self._start(200, _STREAM_HEADERS)
        elif self._pipe is not None:
            chunk = self._pipe.take() + chunk
        await self._finish(chunk)

    def pipe(self) -> Pipe | None:
        """The way for further events of this stream past ASGI; None where there is none."""
        if self.status != 200 or self.complete:
            return None
        self._pipe = self._scope["extensions"]["pdcluster.pipe"]()
        return self._pipe

    def abort(self) -> None:
        """Cuts the connection: for a client that doesn't read what it asked for."""
        self._scope["extensions"]["pdcluster.abort"]()

    async def _start(self, status: int, headers: Sequence[Header]) -> None:
        self.status = status
        own = (b"x-request-id", self.request_id.encode("ascii"))
        headers = [*headers, own, *self.more_headers()]
        if self._closes():
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _finish(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.complete = True


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {limit} bytes.",
        code=FailureKind.BODY_TOO_LARGE,
        kind=FailureKind.BODY_TOO_LARGE,
    )
