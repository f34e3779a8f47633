"""What the operator exports to Prometheus (`pdcluster_operator_*`)."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.keys import Key
from pd_operator.kube import Request
from pd_operator.resources import Resource
from pd_operator.scaling.telling import MOVES
from pd_operator.scaling.types import Decision
from pd_operator.series import Series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# What a rollout does.
_ROLLING = (
    *((operation, "StatefulSet") for operation in ("apply", "scale", "delete")),
    ("apply", "Deployment"),
)
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
        self._decisions = Series(
            "pdcluster_operator_scaling_decisions",
            "counter",
            "What was decided about the size of pools, look by look.",
            ["role", "decision", "reason"],
        )
        self._operations = Series(
            "pdcluster_operator_operations",
            "counter",
            "What was decided and done: objects applied, scaled and deleted.",
            ["operation", "kind"],
        )
        self._pools = Series(
            "pdcluster_operator_pool_replicas",
            "gauge",
            "Workers of a pool: how many there are to be (desired), are ready, drain, and are of"
            " an older revision (outdated).",
            ["role", "state"],
        )
        self.series = (self._decisions, self._operations, self._pools)

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

    def operated(self, key: Key, operation: rollout.Operation) -> None:
        self._operations.add(key, type(operation).__name__.lower(), operation.ref.kind)

    def decided(self, key: Key, decisions: Mapping[Role, Decision]) -> None:
        """Comes before a look's operations."""
        # Of rare events the first counts as well, which `increase` sees only from 0 on.
        if not self._operations.of(key):
            for operation, kind in _ROLLING:
                self._operations.start(key, operation, kind)
        known = set(self._decisions.of(key))
        for role, one in decisions.items():
            if (role.value, "scale", MOVES[0]) not in known and one.reason != "FixedReplicas":
                for reason in MOVES:
                    self._decisions.start(key, role.value, "scale", reason)
            self._decisions.add(key, role.value, type(one).__name__.lower(), one.reason)

    def pools(self, key: Key, counts: Mapping[Role, Mapping[str, int]]) -> None:
        """How many workers each pool of a PDCluster has, by state (`status.pool_counts`)."""
        for role in {values[0] for values in self._pools.of(key)} - {one.value for one in counts}:
            self._pools.end(key, role)
        for one, states in counts.items():
            for state, count in states.items():
                self._pools.set(key, one.value, state, to=count)

    def forget(self, key: Key) -> None:
        """The PDCluster is gone, or somebody else's: its series end."""
        for one in self.series:
            one.end(key)

    def render(self) -> bytes:
        own = "".join(line for one in self.series for line in one.lines())
        return generate_latest(self.registry) + own.encode()
