"""The workers: who announced itself, how each fares, and the way to reach it.

Serves Control, where workers announce themselves and report; keeps one work stream
(`link`) to each process; decides who is usable. One task looks after time: lapsed
announcements, late workers, leases.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio

from pd_core.failures import Failure, FailureKind
from pd_core.identity import Part
from pd_core.kv import KvForm
from pd_core.proof import Purpose
from pd_proto import tls
from pd_proto.tokens import Tokens, admit, challenge
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from pd_router import policy, wire
from pd_router.breaker import Progress, State
from pd_router.fleet import LoadReport, Role, WorkerId, WorkerView, routers_seen
from pd_router.link import MAX_MESSAGE_BYTES, Handler, Link, LinkCallbacks, RouterIdentity
from pd_router.moves import Suspect
from pd_router.prefixes import PrefixIndex
from pd_router.pulls import Broken
from pd_router.records import Promise, Record, Work
from pd_router.types import Bundle, Limits

log = logging.getLogger("pd_router.workers")

_HELLO_DEADLINE_S = 10.0
_ROUTERS_WEIGHT = 0.1  # of a heartbeat's view, against those before
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_ROLES = {pb.ROLE_PREFILL: Role.PREFILL, pb.ROLE_DECODE: Role.DECODE, pb.ROLE_BOTH: Role.BOTH}


@dataclass(frozen=True, slots=True)
class WorkersConfig:
    """Durations in seconds. After `lapse_s` without a heartbeat a worker isn't counted on;
    one with work is late after `late_s` without a step, or longer (see breaker)."""

    model: str
    router: str
    heartbeat_s: float = 1.0
    lapse_s: float = 3.0
    late_s: float = 2.0
    forget_s: float = 60.0
    renew_s: float = 5.0
    check_s: float = 0.25
    settle_s: float = 0.0  # from its start, until the workers that there are have found it
    started_on_demand: bool = False  # where there is none, one may come all the same
    control_ports: tuple[int, ...] = ()  # of all processes of this router, where it has several


class Workers(engine_pb2_grpc.ControlServicer):
    """See the module."""

    def __init__(
        self,
        config: WorkersConfig,
        certificates: tls.Certificates | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self.config = config
        self._certificates = certificates
        self._tokens = tokens
        self.identity = RouterIdentity(config.router, str(uuid.uuid4()))
        self.prefixes = PrefixIndex()
        self.broken = Broken()
        self._guess = 1.0  # of routers, where no worker counts them
        self._told = 0
        self._records: dict[WorkerId, Record] = {}
        self._bundles: dict[str, Bundle] = {}
        self._current: Bundle | None = None
        self._on_bundle: list[Callable[[Bundle], None]] = []
        self._on_change: list[Callable[[], None]] = []
        self._on_lost: list[Callable[[Role], None]] = []
        self._server: grpc.aio.Server | None = None
        self._monitor: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        self._came = asyncio.Event()
        if config.settle_s <= 0:
            self._settled.set()

    # ---- life -------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Serves Control; returns the port. OSError when it is taken."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        engine_pb2_grpc.add_ControlServicer_to_server(self, server)
        bound = tls.listen(self._certificates, server, f"{host}:{port}")
        await server.start()
        self._server = server
        self._monitor = asyncio.create_task(self._look_after(), name="workers monitor")
        asyncio.get_running_loop().call_later(self.config.settle_s, self._settled.set)
        return bound

    async def close(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.gather(self._monitor, return_exceptions=True)
        for worker in list(self._records):
            self._remove(worker, "this router stops", lost=False)
        if self._server is not None:
            await self._server.stop(0.1)
        await asyncio.gather(*self._closing, return_exceptions=True)

    # ---- for sessions -------------------------------------------------------------------

    def views(self) -> list[WorkerView]:
        return [record.view for record in self._records.values()]

    def view(self, worker: WorkerId) -> WorkerView | None:
        record = self._records.get(worker)
        return record.view if record is not None else None

    @property
    def routers(self) -> float:
        """How many share these workers: as workers count them, never fewer than this one's own
        processes. Workers that are older than that leave it to be seen in the load."""
        return max(float(self._told or self._guess), float(len(self.config.control_ports)), 1.0)

    def on_lost(self, callback: Callable[[Role], None]) -> None:
        """A worker is gone, or another process in its place, and it hadn't said that it drains."""
        self._on_lost.append(callback)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back whenever a worker has become usable."""
        self._on_change.append(callback)

    def hello(self, worker: WorkerId) -> pb.Hello | None:
        record = self._records.get(worker)
        return record.hello if record is not None else None

    def open(
        self, worker: WorkerId, handler: Handler, tokens: int, blocks: int, sequences: int
    ) -> Work | None:
        """A side at a worker that will compute `tokens` and hold `blocks`; None: it's gone."""
        record = self._records.get(worker)
        handle = record.link.open(handler) if record is not None else None
        if record is None or handle is None:
            return None
        work = Work(record, handle, tokens, blocks, sequences)
        self._refresh(record)
        return work

    def chosen(self, *workers: WorkerId | None) -> None:
        """Something is to be opened there. Until it is, nothing more goes to one that gets a
        request at a time: several are chosen in one event."""
        for worker in workers:
            record = self._records.get(worker) if worker is not None else None
            if record is not None and record.breaker.state is State.HALF_OPEN:
                record.view.usable = False

    def promise(self, worker: WorkerId, tokens: int) -> Promise | None:
        """A prompt that will be sent to it; None: it's gone."""
        record = self._records.get(worker)
        if record is None:
            return None
        promise = Promise(record, tokens)
        if promise.probe:
            self._refresh(record)
        return promise

    def redeem(self, promise: Promise) -> None:
        """Its worker is now chosen for good, or another one."""
        promise.over()
        if promise.probe:
            self._refresh(promise.record)

    def answered(self, work: Work) -> None:
        """The worker has answered this request, if only that it can't."""
        if work.record.breaker.answered(work.probe):
            self._works_again(work.record)

    def computed(self, work: Work) -> None:
        """The worker has computed something for this request."""
        if work.record.breaker.succeeded(work.probe):
            self._works_again(work.record)

    def _works_again(self, record: Record) -> None:
        log.info("worker=%s works again", record.view.id.name)
        self._refresh(record)

    def blame(self, suspects: tuple[Suspect, ...], failure: Failure, now: float) -> None:
        """An attempt failed by the fault of one of these."""
        for worker, sent_at in suspects:
            record = self._records.get(worker)
            if record is None or not record.breaker.failed(1 / len(suspects), now, sent_at):
                continue
            if self._spares(record):
                why = f"too many of its requests failed, the last one: {failure.message}"
                record.breaker.trip(why, now, faulty=True)
                log.warning("worker=%s gets no new requests: %s", worker.name, why)
                self._refresh(record)

    def _spares(self, record: Record) -> bool:
        """Whether requests could do without it. Where all fail alike, who still tries is
        better than nobody; one that only gets a probe at a time takes nobody's place."""
        return any(
            other.view.usable
            and other.breaker.state is State.CLOSED
            and other.view.role is not Role.PREFILL
            for other in self._records.values()
            if other is not record
        )

    # ---- for the HTTP side ----------------------------------------------------------------

    def ready(self) -> bool:
        return policy.pair_usable(self.views())

    def expecting(self) -> bool:
        some = bool(self._records) or not self._settled.is_set()
        return some or self.config.started_on_demand

    async def settled(self) -> None:
        await self._settled.wait()

    async def decoding(self) -> None:
        while self.limits() is None:
            self._came.clear()
            await self._came.wait()

    def bundle(self) -> Bundle | None:
        return self._current

    def on_bundle(self, callback: Callable[[Bundle], None]) -> None:
        self._on_bundle.append(callback)

    def limits(self) -> Limits | None:
        """Of the usable decode worker that can take the longest request."""
        views = [v for v in self.views() if v.usable and v.role is not Role.PREFILL]
        if not views:
            return None
        best = max(views, key=lambda v: min(v.max_model_tokens, v.pool_tokens))
        return Limits(context_tokens=best.max_model_tokens, pool_tokens=best.pool_tokens)

    def snapshot(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [self._describe(record, now) for record in self._records.values()]

    def signals(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [_signals(record, now) for record in self._records.values()]

    def _describe(self, record: Record, now: float) -> dict[str, Any]:
        view, load = record.view, record.view.load
        return {
            "worker": view.id.name,
            "epoch": view.id.epoch,
            "role": view.role.value,
            "address": record.link.address,
            "revision": view.revision,
            "model_hash": view.kv.model_hash,
            "layout_hash": record.hello.layout_hash,
            "usable": view.usable,
            "why_unusable": record.why_unusable,
            "breaker": record.breaker.state.value,
            "heard_s_ago": round(now - record.heard, 3),
            "requests": record.link.live,
            "commands_waiting": record.link.commands_waiting,
            "pending_tokens": view.pending_tokens,
            "kv_used": view.kv_used,
            "prefixes": self.prefixes.count(view.id),
            "pool_tokens": view.pool_tokens,
            "max_model_tokens": view.max_model_tokens,
            "kv_token_bytes": view.kv_token_bytes,
            "kv_layers": view.kv_layers,
            "product": view.product,
            "load": {name: getattr(load, name) for name in LoadReport.__dataclass_fields__},
        }

    # ---- announcements ------------------------------------------------------------------

    async def Announce(
        self, request_iterator: AsyncIterator[pb.WorkerReport], context: Any
    ) -> None:
        """One worker's announcement: Hello first, heartbeats until it ends."""
        if self._certificates is not None:
            await self._certificates.admit(context, Part.WORKER)
        reports = aiter(request_iterator)
        asked = await challenge(self._tokens, context)
        try:
            async with asyncio.timeout(_HELLO_DEADLINE_S):
                first = await anext(reports, None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no Hello came")
            return
        given = first.hello.proof if first is not None else b""
        confirmation = await admit(self._tokens, Purpose.ANNOUNCE, asked, given, context)
        problem = "Hello must come first"
        if first is not None and first.HasField("hello"):
            problem = self._problem(first.hello)
        if first is None or problem:
            log.warning("an announcement is refused: %s", problem)
            await context.write(pb.RouterNotice(refusal=pb.Refusal(reason=problem)))
            return
        stream = object()
        record = self._announced(first.hello, stream)
        try:
            await self._follow(record, stream, reports, context, confirmation)
        finally:
            if record.stream is stream:
                record.stream = None
                self._refresh(record)
                log.info("worker=%s announcement ended", record.view.id.name)

    async def _follow(
        self,
        record: Record,
        stream: object,
        reports: AsyncIterator[pb.WorkerReport],
        context: Any,
        confirmation: bytes,
    ) -> None:
        config = self.config
        welcome = pb.Welcome(
            router=self.identity.name,
            router_epoch=self.identity.epoch,
            heartbeat_s=config.heartbeat_s,
            lapse_s=config.lapse_s,
            control_ports=config.control_ports,
            confirmation=confirmation,
        )
        await context.write(pb.RouterNotice(welcome=welcome))
        wanted = record.hello.bundle_hash
        if wanted and wanted not in self._bundles:
            want = pb.WantBundle(bundle_hash=wanted)
            await context.write(pb.RouterNotice(want_bundle=want))
        self._choose_bundle()
        async for report in reports:
            if record.stream is not stream:
                return  # the worker has announced itself anew
            which = report.WhichOneof("report")
            if which == "heartbeat":
                self._heartbeat(record, report.heartbeat)
            elif which == "bundle":
                self._bundle_came(record, report.bundle)

    def _problem(self, hello: pb.Hello) -> str:
        """Why a worker can't serve here; empty when it can."""
        if hello.model != self.config.model:
            return f"this router serves {self.config.model!r}, not {hello.model!r}"
        if hello.role not in _ROLES:
            return f"role {hello.role} is not known"
        if not (hello.worker and hello.epoch and hello.work_address and hello.model_hash):
            return "worker, epoch, work_address and model_hash must be set"
        if not (hello.kv_format.block_tokens and hello.capacity.kv_blocks):
            return "kv_format.block_tokens and capacity.kv_blocks must be at least 1"
        if not hello.capacity.max_model_tokens:
            return "capacity.max_model_tokens must be at least 1"
        return ""

    def _announced(self, hello: pb.Hello, stream: object) -> Record:
        worker = WorkerId(hello.worker, hello.epoch)
        for other in [w for w in self._records if w.name == worker.name and w != worker]:
            self._remove(other, "it restarted")
        record = self._records.get(worker)
        if record is None:
            record = self._records[worker] = self._new_record(worker, hello)
            record.link.start()
        record.stream = stream
        record.heard = time.monotonic()
        log.info(
            "worker=%s role=%s revision=%s announced",
            worker.name,
            record.view.role.value,
            hello.revision,
        )
        return record

    def _new_record(self, worker: WorkerId, hello: pb.Hello) -> Record:
        view = WorkerView(
            id=worker,
            role=_ROLES[hello.role],
            kv=_shared(KvForm.told(hello.model_hash, hello.kv_format)),
            kv_blocks=hello.capacity.kv_blocks,
            max_model_tokens=hello.capacity.max_model_tokens,
            revision=hello.revision,
            tokens_per_s=hello.prefill_tokens_per_s,
            product=hello.product,
            kv_token_bytes=hello.kv_format.block_bytes / hello.kv_format.block_tokens,
            kv_layers=max(hello.kv_format.layers, 1),
            shares_prefixes=hello.shares_prefixes,
        )
        callbacks = LinkCallbacks(
            changed=lambda: self._refresh(record), moved=lambda now: self._moved(record, now)
        )
        link = Link(
            worker, hello.work_address, self.identity, callbacks, self._certificates, self._tokens
        )
        progress = Progress(self.config.late_s, hello.prefill_tokens_per_s)
        record = Record(hello, view, link, progress)
        return record

    def _heartbeat(self, record: Record, beat: pb.Heartbeat) -> None:
        now = time.monotonic()
        record.heard = now
        record.lapsed = False
        record.heartbeats += 1
        record.draining = beat.state == pb.WORKER_STATE_DRAINING
        load = wire.load_from_pb(beat.load)
        if record.progress.heartbeat(record.view.load, load, now):
            record.breaker.alive(now)
        record.view.report(load)
        record.routers = beat.routers
        record.view.shares_prefixes = record.hello.shares_prefixes and not beat.altered
        self._told = max(self._told, beat.routers)
        if not self._told:
            self._guess += _ROUTERS_WEIGHT * (routers_seen(self.views()) - self._guess)
        self.prefixes.update(
            record.view.id, beat.prefix_gained, beat.prefix_lost, reset=beat.prefix_reset
        )
        self._refresh(record)

    # ---- bundles --------------------------------------------------------------------------

    def _bundle_came(self, record: Record, message: pb.TokenizerBundle) -> None:
        if message.bundle_hash != record.hello.bundle_hash or not message.tokenizer_json:
            log.warning("worker=%s sent a bundle that nobody asked for", record.view.id.name)
            return
        self._bundles[message.bundle_hash] = wire.bundle_from_pb(message)
        self._choose_bundle()

    def _choose_bundle(self) -> None:
        """The current one stays while a worker announces it; then the newest known."""
        announced = {record.hello.bundle_hash for record in self._records.values()}
        current = self._current
        if current is None or (announced and current.bundle_hash not in announced):
            for known in reversed(self._bundles.values()):
                if known.bundle_hash in announced:
                    self._current = known
                    break
        kept = announced | ({self._current.bundle_hash} if self._current else set())
        self._bundles = {h: b for h, b in self._bundles.items() if h in kept}
        if self._current is not None and self._current is not current:
            log.info("bundle=%s is current", self._current.bundle_hash[:12])
            for callback in self._on_bundle:
                callback(self._current)

    # ---- who is usable ----------------------------------------------------------------------

    def _moved(self, record: Record, now: float) -> None:
        record.progress.moved(now)

    def _refresh(self, record: Record) -> None:
        """Whether it may get new work, after anything that bears on it has changed."""
        was_usable = record.view.usable
        known = record.view.id in self._records
        record.view.usable = known and record.why_unusable is None
        record.view.reachable = known and record.shares
        if record.view.usable and not was_usable:
            if record.view.role is not Role.PREFILL:
                self._settled.set()
                self._came.set()
            for callback in self._on_change:
                callback()

    def _remove(self, worker: WorkerId, reason: str, *, lost: bool = True) -> None:
        record = self._records.pop(worker)
        if lost and not record.draining:
            for callback in self._on_lost:
                callback(record.view.role)
        record.view.usable = record.view.reachable = False
        self.prefixes.forget(worker)
        self._choose_bundle()
        log.info("worker=%s epoch=%s removed: %s", worker.name, worker.epoch, reason)
        task = asyncio.create_task(record.link.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _look_after(self) -> None:
        """Time's own task: nothing here waits for an event to come by."""
        check_s = self.config.check_s
        last = renewed = time.monotonic()
        while True:
            await asyncio.sleep(check_s)
            now = time.monotonic()
            # When this process itself stood still, heartbeats wait unread: nobody is late.
            stall_s = now - last - check_s
            last = now
            for record in list(self._records.values()):
                if stall_s > check_s:
                    record.heard += stall_s
                    record.progress.moved(now)
                try:
                    self._check(record, now)
                except Exception:  # one worker's trouble must not end the watch over all
                    log.exception("worker=%s cannot be checked", record.view.id.name)
            # One that has just started may not know them all yet; one that has left, does no more.
            heard = (r.routers for r in self._records.values() if r.stream and not r.lapsed)
            self._told = max(heard, default=0)
            if now - renewed >= self.config.renew_s:
                renewed = now
                for record in self._records.values():
                    record.link.renew()

    def _check(self, record: Record, now: float) -> None:
        silent_s = now - record.heard
        if record.stream is None and silent_s > self.config.forget_s:
            self._remove(record.view.id, f"silent for {silent_s:.0f} s")
            return
        if record.stream is None and record.draining and not record.link.bound:
            self._remove(record.view.id, "it has drained and ended")
            return
        if silent_s > self.config.lapse_s and not record.lapsed:
            record.lapsed = True
            self._move_on(record, f"no heartbeat for {silent_s:.1f} s")
            return
        view = record.view
        late = record.progress.late(view.load.step_s, view.pending_tokens, now)
        if late is not None:
            record.breaker.trip(late, now)
            self._move_on(record, late)
        elif (view.usable, view.reachable) != (
            record.why_unusable is None,
            record.shares,
        ):
            self._refresh(record)

    def _move_on(self, record: Record, why: str) -> None:
        """Its requests go elsewhere; it gets no new ones."""
        name = record.view.id.name
        log.warning("worker=%s is late: %s; requests=%d move on", name, why, record.link.live)
        self._refresh(record)
        record.link.fail_over(Failure(FailureKind.WORKER_LATE, f"worker {name}: {why}"))


def _signals(record: Record, now: float) -> dict[str, Any]:
    """What a worker last said of itself, without what this router has added since: several
    routers hear the same worker, and their documents merge."""
    view, load = record.view, record.view.load
    return {
        "worker": view.id.name,
        "epoch": view.id.epoch,
        "role": view.role.value,
        "revision": view.revision,
        "heard_s_ago": max(now - record.heard, 0.0),
        "heartbeats": record.heartbeats,
        "draining": record.draining,
        "usable": view.usable,
        "kv_tokens": view.pool_tokens,
        "kv_used_tokens": load.kv_used * view.block_tokens,
        "max_running": record.hello.capacity.max_running,
        "prefill_tokens_per_s": record.hello.prefill_tokens_per_s,
        "queued": load.queued,
        "running": load.running,
        "waiting_grants": load.waiting_grants,
        "pending_tokens": load.pending_tokens,
        "steps": load.steps,
        "busy_s": load.busy_s,
        "computed_tokens": load.computed_tokens,
    }


@lru_cache(maxsize=64)
def _shared(form: KvForm) -> KvForm:
    """One object for all equal forms: whom to pair is asked for each request."""
    return form
