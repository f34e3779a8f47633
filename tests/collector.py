"""A collector of OpenTelemetry's spans, to be asked what came."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

DEADLINE_S = 30.0


class Span(NamedTuple):
    """One span as it came; times in seconds since 1970, ids in hexadecimal digits."""

    service: str
    resource: Mapping[str, Any]
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]
    error: str | None


class Collector:
    """What has come, and everything of it as bytes."""

    def __init__(self) -> None:
        self.url, self.port = "", 0
        self.raw = b""
        self.paths: set[str] = set()
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def take(self, path: str, body: bytes) -> None:
        spans = list(_spans(ExportTraceServiceRequest.FromString(body)))
        with self._changed:
            self.paths.add(path)
            self.raw += body
            self._spans += spans
            self._changed.notify_all()

    def trace(self, of: str, parent: str, least: int) -> tuple[Span, dict[str, Span]]:
        """The span that has this parent, and by their names those below it, of one trace;
        once so many spans have come. There are no others."""
        spans = [one for one in self.spans(least) if one.trace == of]
        [root] = [one for one in spans if one.parent == parent]
        below = {one.name: one for one in spans if one is not root}
        assert {one.parent for one in below.values()} == {root.id}
        return root, below

    def spans(self, least: int = 0) -> list[Span]:
        """Those that have come, once there are so many."""
        deadline = time.monotonic() + DEADLINE_S
        with self._changed:
            while len(self._spans) < least:
                assert self._changed.wait(deadline - time.monotonic()), self._spans
            return list(self._spans)


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for group in request.resource_spans:
        resource = {one.key: _value(one.value) for one in group.resource.attributes}
        for scope in group.scope_spans:
            for one in scope.spans:
                yield Span(
                    service=str(resource["service.name"]),
                    resource=resource,
                    name=one.name,
                    trace=one.trace_id.hex(),
                    id=one.span_id.hex(),
                    parent=one.parent_span_id.hex(),
                    kind=one.kind,
                    start_s=one.start_time_unix_nano / 1e9,
                    end_s=one.end_time_unix_nano / 1e9,
                    attributes={item.key: _value(item.value) for item in one.attributes},
                    error=one.status.message if one.status.code == one.status.STATUS_CODE_ERROR
                    else None,
                )  # fmt: skip


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, which) if which else None


@contextmanager
def collecting(
    host: str = "127.0.0.1", enter: Callable[[], None] = lambda: None
) -> Iterator[Collector]:
    """A collector on a port of its own; `enter` leads the thread that opens it into another
    network."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    opened: Future[ThreadingHTTPServer] = Future()

    def serve() -> None:
        try:
            enter()
            server = ThreadingHTTPServer((host, 0), Handler)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(server)
        server.serve_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    server = opened.result(DEADLINE_S)
    made.port = server.server_address[1]
    made.url = f"http://{host}:{made.port}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
