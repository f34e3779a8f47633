"""What the operator exports to Prometheus (`pdcluster_operator_*`)."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.kube import Request
from pd_operator.resources import Resource
from pd_operator.scaling.types import Decision

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """One process's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconcile_s = Histogram(
            "pdcluster_operator_reconcile_seconds",
            "Time that one look at a PDCluster took, API calls included.",
            ["result"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._calls = Counter(
            "pdcluster_operator_api_calls",
            "Calls of the API server. Code 0: no answer.",
            ["verb", "kind", "code"],
            registry=self.registry,
        )
        self._call_s = Histogram(
            "pdcluster_operator_api_call_seconds",
            "Time that calls of the API server took, watches apart.",
            ["verb"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._restarts = Counter(
            "pdcluster_operator_watch_restarts",
            "Watches that ended otherwise than by their own time limit.",
            ["kind", "reason"],
            registry=self.registry,
        )
        self._decisions = Counter(
            "pdcluster_operator_scaling_decisions",
            "What was decided about the size of pools, look by look.",
            ["role", "decision", "reason"],
            registry=self.registry,
        )
        self._operations = Counter(
            "pdcluster_operator_operations",
            "What was decided and done: objects applied, scaled and deleted.",
            ["operation", "kind"],
            registry=self.registry,
        )

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A gauge whose value is asked for at each scrape."""
        gauge = Gauge(f"pdcluster_operator_{name}", text, registry=self.registry)
        gauge.set_function(value)

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconcile_s.labels(result).observe(seconds)

    def called(self, request: Request, code: int, seconds: float) -> None:
        self._calls.labels(request.verb, request.resource.kind, str(code)).inc()
        if request.verb != "watch":
            self._call_s.labels(request.verb).observe(seconds)

    def watch_restarted(self, resource: Resource, reason: str) -> None:
        self._restarts.labels(resource.kind, reason).inc()

    def operated(self, operation: rollout.Operation) -> None:
        kind = operation.ref.kind
        self._operations.labels(type(operation).__name__.lower(), kind).inc()

    def decided(self, decisions: Mapping[Role, Decision]) -> None:
        for role, one in decisions.items():
            self._decisions.labels(role.value, type(one).__name__.lower(), one.reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
