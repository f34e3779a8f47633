"""Requests as OpenTelemetry's spans, sent to a collector by OTLP over HTTP.

Spans are made when a request is over, from its timeline: nothing is paid while tokens flow.
Workers tell the router durations, not times, so all of a trace is on one clock; the spans of
what workers did carry services of their own (docs/adr/0012).
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pd_router import traces
from pd_router.answer import Run
from pd_router.exchange import Exchange
from pd_router.journal import Entry, Record

log = logging.getLogger("pd_router.tracing")

CLOSE_S = 5.0
"""How long the last spans may take on their way, when the router ends."""
_PATH = "/v1/traces"
_UNKNOWN_CLIENT = 401
_TALKATIVE = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""Loggers that write down what clients sent, with a warning for each request."""
_MOST_TRACESTATE = 512  # bytes: W3C wants no more to be passed on
_NANOSECONDS = 1_000_000_000
_MOST_WAITING = 2048  # as OpenTelemetry has it
SENT, LOST = "sent", "lost"

Told = Callable[[str, int], None]
"""Hears how many spans were SENT or LOST, from any thread."""


class _Exporter(SpanExporter):
    """Tells what became of spans."""

    def __init__(self, exporter: SpanExporter, taken: Callable[[int], None], told: Told) -> None:
        self._exporter, self._taken, self._told = exporter, taken, told

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken(len(spans))
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._told(SENT if result is SpanExportResult.SUCCESS else LOST, len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class Counted(SpanProcessor):
    """Counts what becomes of spans. No more wait than the queue before the exporter holds: it
    would drop others for them, and tell nobody how many."""

    def __init__(
        self,
        exporter: SpanExporter,
        told: Told,
        processor: Callable[[SpanExporter], SpanProcessor] = BatchSpanProcessor,
    ) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._waiting = 0
        self._most = _most_waiting()
        self._processor = processor(_Exporter(exporter, self._taken, told))
        for result in (SENT, LOST):
            told(result, 0)

    def _taken(self, spans: int) -> None:
        with self._lock:
            self._waiting -= spans

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            is_full = self._waiting >= self._most
            self._waiting += not is_full
        if is_full:
            self._told(LOST, 1)
        else:
            self._processor.on_end(span)

    def shutdown(self) -> None:
        self._processor.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._processor.force_flush(timeout_millis)


def _most_waiting() -> int:
    with suppress(ValueError):
        return int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE, _MOST_WAITING))
    return _MOST_WAITING


class Tracing:
    """Records requests that are over. What the collector doesn't take is dropped after a
    while, counted, and the log says so: no request waits for it, and what waits is bounded."""

    def __init__(
        self,
        endpoint: str,
        ratio: float,
        model: str,
        router: str,
        told: Told = lambda *_: None,
        exporter: Callable[[str], SpanExporter] = OTLPSpanExporter,
        processor: Callable[[SpanExporter], SpanProcessor] = BatchSpanProcessor,
    ) -> None:
        """`endpoint`: as OTEL_EXPORTER_OTLP_ENDPOINT has it, or with its path. `ratio`: of the
        requests whose client hasn't decided. `model`: that is served; `router`: which one this
        is. Headers, certificates, names: by OTEL_… variables."""
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.ERROR)
        self._model = model
        url = f"{endpoint.rstrip('/').removesuffix(_PATH)}{_PATH}"
        self._processor = Counted(exporter(url), told, processor)
        base = Resource.create({"service.instance.id": router, **_version()})
        name = str(base.attributes["service.name"])
        if name.startswith("unknown_service"):
            name = "pdcluster"
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._tracers: dict[str, trace.Tracer] = {}
        for service in (traces.ROUTER, traces.PREFILL, traces.DECODE):
            own = base if service == traces.ROUTER else Resource.create({})
            resource = own.merge(Resource({"service.name": f"{name}-{service}"}))
            provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._tracers[service] = provider.get_tracer("pdcluster")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, record: Record, exchange: Exchange, entry: Entry) -> None:
        """One request that is over."""
        if entry.status == _UNKNOWN_CLIENT:
            return  # whoever has no key fills no queue
        began_s = entry.ended_at - entry.total_s
        root = self._tracers[traces.ROUTER].start_span(
            traces.root_name(record.ask, exchange.method, entry.path, self._model),
            context=self._propagator.extract(_carrier(exchange)),
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(began_s),
        )
        if not root.is_recording():
            return
        document = entry.document(considered=False)
        used = _used(record.run) if record.run is not None else None
        root.set_attributes(traces.root_attributes(document, record.ask, exchange.method, used))
        if document["failure"]:
            root.set_status(trace.StatusCode.ERROR, str(document["failure"]["kind"]))
        context = trace.set_span_in_context(root)
        for one in traces.children(document):
            ours = one.service == traces.ROUTER
            child = self._tracers[one.service].start_span(
                one.name,
                context=context,
                kind=trace.SpanKind.INTERNAL if ours else trace.SpanKind.SERVER,
                attributes=dict(one.attributes),
                start_time=_nanoseconds(began_s + one.start_s),
            )
            child.end(_nanoseconds(began_s + one.start_s + one.seconds))
        root.end(_nanoseconds(entry.ended_at))

    async def close(self) -> None:
        """Sends what is left, for a while."""
        sending = threading.Thread(target=self._processor.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, CLOSE_S)
        if sending.is_alive():
            log.warning("the last spans were not taken within %g s", CLOSE_S)


def _carrier(exchange: Exchange) -> dict[str, str]:
    """What the client told of its own trace."""
    found = {name: exchange.header(name.encode()) for name in ("traceparent", "tracestate")}
    state = found["tracestate"]
    if state is not None and len(state) > _MOST_TRACESTATE:
        del found["tracestate"]
    return {name: value.decode("latin-1") for name, value in found.items() if value}


def _used(run: Run) -> traces.Used:
    usage = run.usage()
    return traces.Used(usage.prompt, usage.completion, usage.cached, run.finishes())


def _version() -> dict[str, str]:
    """Images hold the code alone, without what pip says of it."""
    try:
        return {"service.version": version("pdcluster")}
    except PackageNotFoundError:
        return {}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
