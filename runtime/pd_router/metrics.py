"""What the router measures: prometheus metrics, and sketches that merge over routers."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from pd_core.failures import Failure, FailureKind
from pd_router.classes import NO_PROMISES, Promises
from pd_router.fleet import Role
from pd_router.histograms import Histogram
from pd_router.signals import Queued, Signals
from pd_router.types import GenerateRequest, Timeline

CONTENT_TYPE: str = CONTENT_TYPE_LATEST
_PREFIX = "pdcluster_router"
_NOTHING = Queued()


def prefill_pool(timeline: Timeline) -> str:
    """The pool that computed the prompt: `both` when it was the one that decoded."""
    return "both" if timeline.prefill_worker == timeline.decode_worker else "prefill"


def decode_pool(timeline: Timeline) -> str:
    return "both" if timeline.prefill_worker == timeline.decode_worker else "decode"


class Metrics:
    """One router's metrics, for one model. A class is one of `promises`, or empty."""

    def __init__(
        self,
        model: str,
        clock: Callable[[], float] = time.monotonic,
        promises: Promises = NO_PROMISES,
    ) -> None:
        self.registry = CollectorRegistry()
        self.model = model
        self._clock = clock
        self._promises = promises
        self._signals = Signals(uuid.uuid4().hex, clock())
        self._ttft = self._histogram("ttft", "Request in to first text out", "class")
        self._tpot = self._histogram("tpot", "Mean time between a choice's tokens", "class")
        self._itl = self._histogram("itl", "Time between two tokens of a choice", "class")
        self._queue = self._histogram("queue", "Wait in the router's admission", "class")
        self._grant_wait = self._histogram("grant_wait", "Wait for KV room on the decode worker")
        self._prefill = self._histogram("prefill", "Computing the prompt")
        self._prefill_queue = self._histogram("prefill_queue", "Wait on the prefill worker")
        self._transfer = self._histogram("transfer", "KV transfer, first frame to seal")
        self._exposed = self._histogram("transfer_exposed", "Token 0 to all KV at decode")
        self._pull = self._histogram("pull", "Copying a known prefix, or giving that up")
        self._total = self._histogram("request", "Request in to last byte out")
        self._requests = self._counter(
            "requests", "Answered requests", "status", "endpoint", "class"
        )
        self._goodput = self._counter(
            "goodput_requests",
            "Requests answered within what their class, else the PDCluster, promises",
            "class",
        )
        for one in promises.classes:  # a class whose promise was never kept has a series too
            self._goodput.labels(model, one.name)
        self._failures = self._counter("failures", "Failed requests by kind", "kind")
        self._unauthorized = self._counter(
            "unauthorized", "Requests without a right API key"
        ).labels(model)
        self._retries = self._counter("retries", "Attempts after the first, by why", "kind")
        self._hedges = self._counter("hedges", "Prompts computed twice at once", "outcome")
        self._lost = self._counter("workers_lost", "Workers that ended unasked", "pool")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens taken").labels(model)
        self._cached_tokens = self._counter("cached_tokens", "Prompt tokens not computed").labels(
            model
        )
        self._completion_tokens = self._counter("completion_tokens", "Tokens emitted").labels(model)
        self._pulls = self._counter("pulls", "Copies of known prefixes, by outcome", "outcome")
        self._pulled_tokens = self._counter(
            "pulled_tokens", "Prompt tokens whose KV was copied from another worker"
        ).labels(model)
        self._kv_bytes = self._counter("kv_bytes", "KV bytes handed over", "transport")
        self._start_events()
        self.running = self._gauge("running_requests", "Requests in the router now")
        self.ready = self._gauge("ready", "Whether a usable pair of workers is there")
        self._gateway_running = self._gateway("num_requests_running", "Sequences in decode")
        self._gateway_waiting = self._gateway("num_requests_waiting", "Requests that wait")
        self._gateway_kv = self._gateway("kv_cache_usage_perc", "KV in use on decode, 0 to 1")
        self._spans = self._counter(
            "trace_spans", "Spans of requests by what became of them", "result"
        )
        self._held = self._gauge(
            "held_requests", "Requests that wait for a worker, where there is none"
        )

    def _start_events(self) -> None:
        """From 0 on: `increase` and `rate` don't see the event that a series begins with."""
        for kind in FailureKind:
            self._failures.labels(self.model, kind.value)
            if Failure(kind, "").traits.retryable:
                self._retries.labels(self.model, kind.value)
        for outcome in ("won", "lost"):
            self._hedges.labels(self.model, outcome)
        for role in Role:
            self._lost.labels(self.model, role.value)
        for outcome in ("done", "computed", "cancelled"):
            self._pulls.labels(self.model, outcome)

    def unauthorized(self) -> None:
        self._unauthorized.inc()

    def spans(self, result: str, count: int) -> None:
        """So many were sent to the collector, or lost (tracing.Told)."""
        self._spans.labels(self.model, result).inc(count)

    def gateway(self, workers: Sequence[dict[str, Any]], queued: Queued) -> None:
        """What inference gateways read, under the names that they know: of all usable
        workers, and of what waits in this router."""
        usable = [worker for worker in workers if worker.get("usable")]
        running = sum(worker["running"] for worker in usable)
        waiting = sum(worker["queued"] + worker["waiting_grants"] for worker in usable)
        room = sum(worker["kv_tokens"] for worker in usable if worker["role"] != "prefill")
        used = sum(worker["kv_used_tokens"] for worker in usable if worker["role"] != "prefill")
        self._gateway_running.set(running)
        self._gateway_waiting.set(waiting + queued.requests)
        self._gateway_kv.set(used / room if room else 0.0)

    def _gateway(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", f"{text}.", ("model_name",), registry=self.registry)
        return gauge.labels(self.model)

    def _histogram(self, name: str, text: str, *more: str) -> Histogram:
        made = Histogram(f"{_PREFIX}_{name}_seconds", f"{text}, in seconds.", self.model, *more)
        self.registry.register(made)
        return made

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", f"{text}.", ("model", *labels), registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"{_PREFIX}_{name}", f"{text}.", ("model",), registry=self.registry)
        return gauge.labels(self.model)

    def gap_observer(self, timeline: Timeline) -> Callable[[float], None]:
        """Takes the times between tokens of a request whose workers are known, in seconds."""
        return self._itl.at(decode_pool(timeline), timeline.sla).observe

    def first_text(self, timeline: Timeline, ttft_s: float) -> None:
        self._ttft.at(prefill_pool(timeline), timeline.sla).observe(ttft_s)
        self._signals.first_text(timeline, ttft_s, self._clock())

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A request waits for the first worker meanwhile."""
        self._signals.hold(1)
        with self._held.track_inprogress():
            try:
                yield
            finally:
                self._signals.hold(-1)

    def turned_away(self) -> None:
        """A request was refused unread: there are too many."""
        self._signals.unread()

    def on_arrival(self, request: GenerateRequest) -> None:
        """A prompt that could be served is at the door (hooks.MetricsHooks)."""
        self._signals.arrived(len(request.token_ids), request.choices)

    def request_done(self, endpoint: str, status: int, total_s: float, sla: str = "") -> None:
        self._requests.labels(self.model, str(status), endpoint, sla).inc()
        self._total.at("router").observe(total_s)

    def answered(self, sla: str, timelines: Sequence[Timeline]) -> None:
        """A request had its whole answer: it's goodput if that came in time."""
        goals = self._promises.goals(sla)
        if all(goals.met(one.ttft_s, one.tpot_s) for one in timelines):
            self._goodput.labels(self.model, sla).inc()

    def failed(self, kind: FailureKind) -> None:
        self._failures.labels(self.model, kind.value).inc()

    def on_retry(self, failure: Failure) -> None:
        """An attempt failed and another follows (hooks.MetricsHooks)."""
        self._retries.labels(self.model, failure.kind.value).inc()

    def on_hedge(self, *, won: bool) -> None:
        """A hedge is over: `won` where it was first (hooks.MetricsHooks)."""
        self._hedges.labels(self.model, "won" if won else "lost").inc()

    def worker_lost(self, role: Role) -> None:
        """One ended, or fell silent, that hadn't said that it drains."""
        self._lost.labels(self.model, role.value).inc()

    def on_end(self, timeline: Timeline, failure: Failure | None) -> None:
        """hooks.MetricsHooks; all that ends is counted by generation_done and failed."""

    def generation_done(self, timeline: Timeline) -> None:
        """Counts one prompt's way through the workers, however it ended."""
        prefill, decode = prefill_pool(timeline), decode_pool(timeline)
        self._prompt_tokens.inc(timeline.prompt_tokens)
        self._cached_tokens.inc(timeline.cached_tokens)
        self._completion_tokens.inc(timeline.completion_tokens)
        self._queue.at("router", timeline.sla).observe(timeline.queue_s)
        self._signals.ended(timeline, self._clock())
        self._count_pulls(timeline)
        if timeline.ttft_s is None:
            return  # it didn't get as far as all that follows
        self._prefill_queue.at(prefill).observe(timeline.prefill_queue_s)
        self._prefill.at(prefill).observe(timeline.prefill_s)
        self._grant_wait.at(decode).observe(timeline.grant_wait_s)
        if timeline.pulled_from:
            self._pull.at(prefill).observe(timeline.pull_s)
        if timeline.kv_bytes:
            self._transfer.at(decode).observe(timeline.transfer_s)
            self._exposed.at(decode).observe(timeline.exposed_s)
            self._kv_bytes.labels(self.model, timeline.transport).inc(timeline.kv_bytes)
        if timeline.tpot_s is not None:
            self._tpot.at(decode, timeline.sla).observe(timeline.tpot_s)

    def _count_pulls(self, timeline: Timeline) -> None:
        """What became of copies that were to spare computing."""
        self._pulled_tokens.inc(timeline.pulled_tokens)
        ended = {
            "done": int(timeline.pulled_tokens > 0),
            "computed": timeline.pulls_failed,
            "cancelled": timeline.pulls_cancelled,
        }
        for outcome, count in ended.items():
            self._pulls.labels(self.model, outcome).inc(count)

    def expose(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def distributions(self) -> dict[str, dict[str, list[float]]]:
        """TTFT and ITL since the start. Who asks again later knows what came between."""
        return {"ttft": self._ttft.distribution(), "itl": self._itl.distribution()}

    def signals_json(
        self, queued: Queued = _NOTHING, workers: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        """What scaling goes by: see `signals`."""
        document = self._signals.document(self._clock(), queued, workers)
        return {"model": self.model} | document
