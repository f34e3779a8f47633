"""Requests as OpenTelemetry's spans, sent to a collector by OTLP over HTTP.

Spans are made when a request is over, from its timeline: nothing is paid while tokens flow.
Workers tell the router durations, not times, so all of a trace is on one clock; the spans of
what workers did carry services of their own (docs/adr/0012).
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pd_router import traces
from pd_router.journal import Entry, Given, Record

log = logging.getLogger("pd_router.tracing")

CLOSE_S = 5.0
"""How long the last spans may take on their way, when the router ends."""
_NANOSECONDS = 1_000_000_000


class Tracing:
    """Records requests that are over. What the collector doesn't take is dropped after a
    while, and the log says so: no request waits for it, and what waits is bounded."""

    def __init__(
        self,
        endpoint: str,
        ratio: float,
        about: Mapping[str, str],
        processor: Callable[[str], SpanProcessor] = lambda url: BatchSpanProcessor(
            OTLPSpanExporter(url)
        ),
    ) -> None:
        """`endpoint`: as OTEL_EXPORTER_OTLP_ENDPOINT has it. `ratio`: of the requests whose
        client hasn't decided. `about`: attributes of the router's resource. Headers,
        certificates, names: by OTEL_… variables."""
        self._processor = processor(f"{endpoint.rstrip('/')}/v1/traces")
        base = Resource.create(dict(about))
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

    def record(self, record: Record, given: Given, entry: Entry) -> None:
        """One request that is over."""
        began_s = entry.ended_at - entry.total_s
        root = self._tracers[traces.ROUTER].start_span(
            traces.root_name(record.ask, entry.path),
            context=self._propagator.extract({k: v for k, v in given._asdict().items() if v}),
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(began_s),
        )
        if not root.is_recording():
            return
        document = entry.document()
        finishes = record.run.finishes() if record.run is not None else []
        root.set_attributes(traces.root_attributes(document, record.ask, finishes))
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


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
