"""What a worker exports to Prometheus (`pdcluster_engine_*`)."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from pd_core.failures import FailureKind
from pd_core.work import pairs
from pd_engine.kv.plane import ExportStats, ImportStats
from pd_engine.types import Batch, Load, Prefilled

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_BLOCK_STATES = ("free", "cached", "active", "granted", "quarantined")


class Metrics:
    """One registry a process, so that tests can have several."""

    def __init__(self, model: str, role: str, worker: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model": model, "pool": role, "worker": worker}
        self.busy_s = 0.0  # in steps, since the start
        self.computed_tokens = 0
        self.computed_pairs = 0  # of a token and one that it looks back on
        self._kept_blocks: Callable[[], dict[str, int]] = dict
        names = tuple(self._labels)

        def counter(name: str, text: str, *extra: str) -> Counter:
            return Counter(f"pdcluster_engine_{name}", text, names + extra, registry=self.registry)

        def gauge(name: str, text: str, *extra: str) -> Gauge:
            return Gauge(f"pdcluster_engine_{name}", text, names + extra, registry=self.registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(
                f"pdcluster_engine_{name}_seconds",
                text,
                names,
                buckets=_SECONDS,
                registry=self.registry,
            )

        self._blocks = gauge("kv_blocks", "KV blocks by state", "state")
        self._queued = gauge("queued_requests", "Requests that wait for their first step")
        self._running = gauge("running_sequences", "Sequences in decode")
        self._waiting = gauge("waiting_grants", "Requests that wait for KV room")
        self._pending = gauge("pending_tokens", "Prompt tokens still to compute")
        self._step = seconds("step", "Duration of a model step")
        self._step_tokens = counter("step_tokens", "Tokens computed in steps")
        self._prefill = seconds("prefill", "First step of a prompt to its first token")
        self._queue = seconds("queue", "Arrival of a prompt to its first step")
        self._grant = seconds("grant_wait", "Arrival of a reservation to its grant")
        self._transfer = seconds("kv_transfer", "First KV frame in to seal verified")
        self._generated = counter("generated_tokens", "Tokens drawn, without the first ones")
        self._drafted = counter("draft_tokens", "Tokens computed on a guess")
        self._accepted = counter("accepted_draft_tokens", "Guesses that turned out right")
        self._prompt = counter("prompts", "Prompts computed")
        self._cached = counter("cached_tokens", "Prompt tokens that a prefix hit spared")
        self._bytes = counter("kv_bytes", "KV bytes moved", "direction", "transport")
        self._exports = counter("exports", "Hand-overs by outcome", "outcome")
        self._kept = gauge("kv_kept_blocks", "KV blocks kept beyond the pool", "store")
        self._restored = counter("kv_restored_tokens", "Tokens whose KV came back", "store")
        self._restore = seconds("kv_restore", "Reading a request's KV back into the pool")
        self._declined = counter("kv_restores_declined", "Computing was faster", "store")
        self._archive_failures = counter(
            "kv_store_failures", "Writes, reads, and files that were deleted", "store"
        )
        self._copied = counter(
            "kv_copied_tokens", "Prefix tokens copied to or from others", "direction", "outcome"
        )
        self._failures = counter("failures", "Requests failed here, by kind", "kind")
        # From 0 on: `increase` and `rate` don't see the event that a series begins with.
        for kind in FailureKind:
            self._failures.labels(**self._labels, kind=kind.value)
        for direction in ("in", "out"):
            for outcome in ("done", "failed"):
                self._copied.labels(**self._labels, direction=direction, outcome=outcome)

    def follow(self, load: Callable[[], Load]) -> None:
        """Gauges read the scheduler's load when scraped."""
        self._load = load

    def follow_kept(self, kept: Callable[[], dict[str, int]]) -> None:
        """Likewise how many blocks each store beyond the pool holds."""
        self._kept_blocks = kept
        for store in kept():
            for counter in (self._declined, self._archive_failures):
                counter.labels(**self._labels, store=store)

    def scrape(self) -> bytes:
        load = self._load()
        own = self._labels
        for state in _BLOCK_STATES:
            self._blocks.labels(**own, state=state).set(getattr(load, f"kv_{state}"))
        self._queued.labels(**own).set(load.queued)
        self._running.labels(**own).set(load.running)
        self._waiting.labels(**own).set(load.waiting_grants)
        self._pending.labels(**own).set(load.pending_tokens)
        for store, blocks in self._kept_blocks().items():
            self._kept.labels(**own, store=store).set(blocks)
        return generate_latest(self.registry)

    def step(self, batch: Batch, seconds: float) -> None:
        self._step.labels(**self._labels).observe(seconds)
        computed = sum(len(row.token_ids) for row in batch.rows)
        drafted = sum(row.drafts for row in batch.rows)
        self._step_tokens.labels(**self._labels).inc(computed)
        self._drafted.labels(**self._labels).inc(drafted)
        self.busy_s += seconds
        # What requests need, not what is tried: of guesses, those that came true (`generated`).
        self.computed_tokens += computed - drafted
        looked_back = sum(pairs(len(row.token_ids), row.start) for row in batch.rows)
        self.computed_pairs += int(looked_back)

    def prefilled(self, event: Prefilled) -> None:
        own = self._labels
        self._prompt.labels(**own).inc()
        self._cached.labels(**own).inc(event.cached_tokens)
        self._queue.labels(**own).observe(event.queue_s)
        self._prefill.labels(**own).observe(event.prefill_s)

    def grant_wait(self, seconds: float) -> None:
        self._grant.labels(**self._labels).observe(seconds)

    def generated(self, tokens: int, guessed: int) -> None:
        """`guessed` of them came by guesses."""
        self._generated.labels(**self._labels).inc(tokens)
        self._accepted.labels(**self._labels).inc(guessed)
        self.computed_tokens += guessed

    def received(self, stats: ImportStats) -> None:
        labels = {"direction": "in", "transport": stats.transport}
        self._bytes.labels(**self._labels, **labels).inc(stats.kv_bytes)
        self._transfer.labels(**self._labels).observe(stats.transfer_s)

    def sent(self, stats: ExportStats, transport: str) -> None:
        labels = {"direction": "out", "transport": transport}
        self._bytes.labels(**self._labels, **labels).inc(stats.kv_bytes)

    def copied(self, tokens: int, *, outgoing: bool, ended: str) -> None:
        """A copy of a prefix has ended: `done` or `failed`."""
        labels = {"direction": "out" if outgoing else "in", "outcome": ended}
        self._copied.labels(**self._labels, **labels).inc(tokens)

    def restored(self, store: str, tokens: int, seconds: float) -> None:
        self._restored.labels(**self._labels, store=store).inc(tokens)
        self._restore.labels(**self._labels).observe(seconds)

    def archive_declined(self, store: str) -> None:
        self._declined.labels(**self._labels, store=store).inc()

    def archive_failure(self, store: str) -> None:
        self._archive_failures.labels(**self._labels, store=store).inc()

    def export_done(self, committed: bool) -> None:
        outcome = "committed" if committed else "aborted"
        self._exports.labels(**self._labels, outcome=outcome).inc()

    def failure(self, kind: FailureKind) -> None:
        self._failures.labels(**self._labels, kind=kind.value).inc()
