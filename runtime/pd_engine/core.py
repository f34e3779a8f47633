"""The engine's heart: one event loop that ties scheduler, KV plane and runner together.

Everything but the model's step runs in the event loop, so scheduler and transfers need no
locks. The step runs in one thread of its own; while it runs, commands are accepted,
KV moves and heartbeats go out.
"""

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_engine import wire
from pd_engine.intake import Intake, Needs
from pd_engine.kv.plane import ExportStats, ImportStats, KvPlane
from pd_engine.metrics import Metrics
from pd_engine.outbox import Outbox
from pd_engine.pace import StepPace
from pd_engine.scheduler import Scheduler
from pd_engine.settings import Settings
from pd_engine.sharing import ByKey, Sharing
from pd_engine.types import (
    Advanced,
    Batch,
    Finished,
    Granted,
    Mode,
    Prefilled,
    PrefixChanges,
    RequestFailed,
    RequestKey,
    Row,
    SchedulerEvent,
    StepOutput,
    StepRunner,
    TokenOut,
    Tokens,
)
from pd_proto.v1 import engine_pb2 as pb

log = logging.getLogger("pd_engine.core")

_POLL_S = 0.25  # deadlines are looked at so often when nothing else happens
_STALL_S = 60.0


class _Abandoned(Exception):
    """Everybody whom the step in flight was for has gone."""


@dataclass(slots=True)
class _Live:
    """What the core keeps of a request beside the scheduler."""

    outbox: Outbox
    handle: int
    mode: Mode
    request: str
    target: pb.KvTarget | None = None
    lease_s: float = 0.0
    exporting: bool = False
    granted: bool = False  # an IMPORT whose KV has not come yet


@dataclass(slots=True)
class _StepClock:
    """When the step in flight began, and how long the last ones took."""

    began: float | None = None
    last_end: float = field(default_factory=time.monotonic)
    steps: int = 0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))


class EngineCore:
    """Requests in (commands), events out (outboxes)."""

    def __init__(
        self, settings: Settings, scheduler: Scheduler, runner: StepRunner, metrics: Metrics
    ) -> None:
        self._settings = settings
        self.scheduler = scheduler
        self._runner = runner
        self.metrics = metrics
        self.plane: KvPlane | None = None
        self.intake = Intake()
        self._preparing: set[asyncio.Task[None]] = set()
        self.kv_address = ""
        self._live: dict[RequestKey, _Live] = {}
        self._streams: dict[int, Outbox] = {}
        self._next_stream = 1
        self._wake = asyncio.Event()
        self._clock = _StepClock()
        self._pace = StepPace(settings.max_step_s, runner.prefill_tokens_per_s)
        self._gone: set[RequestKey] = set()  # cancelled while the step in flight runs
        self._abandoned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._loop = asyncio.get_running_loop()
        self.draining = False
        self._stopping = False
        self.sharing = Sharing(self, settings.kv_lease_s, settings.kv_quantization == "none")
        self.callbacks = ByKey(self, self.sharing)
        """For the KV plane."""

    # ---- streams and commands ---------------------------------------------------

    def open_stream(self) -> tuple[int, Outbox]:
        number = self._next_stream
        self._next_stream += 1
        outbox = self._streams[number] = Outbox()
        return number, outbox

    def close_stream(self, number: int) -> None:
        """The router is gone: all its requests end and free what they hold."""
        outbox = self._streams.pop(number, None)
        if outbox is not None:
            outbox.close()
        for key in [key for key in self._live if key[0] == number]:
            self._cancel(key)
        self.sharing.close_stream(number)
        self._kick()

    def handle(self, stream: int, command: pb.Command) -> None:
        """Carries one command out. Never raises: a wrong command fails its own request."""
        which = command.WhichOneof("command")
        if which == "generate":
            self._generate(stream, command.generate)
        elif which == "prefill":
            self._prefill(stream, command.prefill)
        elif which == "pull":
            self.sharing.pull((stream, command.pull.handle), self._streams[stream], command.pull)
        elif which == "share":
            self.sharing.share((stream, command.share.handle), self._streams[stream], command.share)
        elif which == "cancel":
            self._cancel((stream, command.cancel.handle))
            self.sharing.cancel((stream, command.cancel.handle))
        elif which == "renew":
            self._renew((stream, handle) for handle in command.renew.handles)
        else:
            log.warning("unknown command=%s", which)

    def uses(self, key: RequestKey) -> bool:
        return key in self._live or key in self.sharing

    def commands_done(self) -> None:
        """Called after a message's commands: admits what can be, wakes the step loop."""
        self._poll()
        self._kick()

    def _generate(self, stream: int, message: pb.Generate) -> None:
        mode = Mode.LOCAL if message.prefill_here else Mode.IMPORT
        live = _Live(self._streams[stream], message.handle, mode, message.id.request)
        if self._settings.role == "prefill":
            self._refuse(live, FailureKind.INVALID_REQUEST, "a prefill worker doesn't decode")
        else:
            self._add(stream, message, live)

    def _prefill(self, stream: int, message: pb.Prefill) -> None:
        live = _Live(self._streams[stream], message.handle, Mode.EXPORT, message.id.request)
        live.target = message.target
        live.lease_s = message.lease_s or self._settings.kv_lease_s
        if self._settings.role == "decode":
            self._refuse(live, FailureKind.INVALID_REQUEST, "a decode worker doesn't export KV")
        else:
            self._add(stream, message, live)

    def _add(self, stream: int, message: pb.Generate | pb.Prefill, live: _Live) -> None:
        key = (stream, message.handle)
        if self.uses(key):
            self._refuse(live, FailureKind.INVALID_REQUEST, f"handle {message.handle} is in use")
            return
        now = time.monotonic()
        try:
            request = wire.request_from_pb(message, key, live.mode, self._runner.vocab_size, now)
        except RequestFailure as error:
            self._refuse(live, error.failure.kind, error.failure.message)
            return
        if len(self._preparing) >= self._settings.max_queued:
            why = f"{len(self._preparing)} requests are being prepared on this worker"
            self._refuse(live, FailureKind.NO_CAPACITY, why)
            return
        self._live[key] = live
        needs = self.intake.needs(request)
        if not needs.waits:
            self._enqueue(needs, live)
        else:
            task = self._loop.create_task(self._prepare(needs, live))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    async def _prepare(self, needs: Needs, live: _Live) -> None:
        """A request is queued when it has what it needs, if it's still wanted then."""
        key = needs.request.key
        try:
            await self.intake.fulfil(needs)
            if self._live.get(key) is live:
                self._enqueue(needs, live)
                self.commands_done()
        except RequestFailure as error:
            if self._live.get(key) is live:
                self._turn_away(key, live, error.failure)
        finally:
            self.intake.repay(needs)

    def _enqueue(self, needs: Needs, live: _Live) -> None:
        try:
            self.scheduler.add(needs.request, time.monotonic(), needs.hashes, needs.guide)
        except RequestFailure as error:
            self._turn_away(needs.request.key, live, error.failure)

    def _turn_away(self, key: RequestKey, live: _Live, why: Failure) -> None:
        del self._live[key]
        self._refuse(live, why.kind, why.message)

    def _refuse(self, live: _Live, kind: FailureKind, message: str) -> None:
        self.metrics.failure(kind)
        live.outbox.put(wire.failed_event(live.handle, Failure(kind, message)))
        live.outbox.flush()

    def _renew(self, keys: Iterable[RequestKey]) -> None:
        if self.plane is not None:
            for key in keys:
                self.plane.renew(key)

    def _cancel(self, key: RequestKey) -> None:
        """Ends a request without a word to the router; unknown keys are ended already."""
        live = self._live.pop(key, None)
        if live is None:
            return
        self._drop(key, live)
        if self._clock.began is not None:
            self._gone.add(key)
            self._abandoned = self.scheduler.flight_keys() <= self._gone

    def _drop(self, key: RequestKey, live: _Live) -> None:
        """Frees what a request holds, here and in the plane."""
        if live.granted and self.plane is not None:
            # Its blocks are freed by on_import_released, once no receive can touch them.
            self._live[key] = live
            live.outbox = Outbox()  # nobody listens
            self.plane.cancel_import(key)
            return
        if live.exporting and self.plane is not None:
            # on_export_done frees the blocks when the last send has returned.
            self._live[key] = live
            live.outbox = Outbox()
            live.target = None  # its end is no failure
            self.plane.cancel_export(key)
            return
        self.scheduler.cancel(key, time.monotonic())

    # ---- the step loop --------------------------------------------------------------

    async def run(self) -> None:
        """Steps while there is work; ends after `stop`."""
        while not self._stopping:
            self._poll()
            decodes, gap_s = self.scheduler.decoding()
            room = self._pace.prompt_tokens(decodes, gap_s)
            batch = self.scheduler.schedule(time.monotonic(), room)
            if batch is None:
                await self._idle()
                continue
            await self._run_step(batch)
        self._thread.shutdown(wait=False)

    async def _run_step(self, batch: Batch) -> None:
        self._open_exports(batch)
        self._gone.clear()
        self._abandoned = False
        consists = self._describe(batch) if self._settings.log_steps else ""
        began = self._clock.began = time.monotonic()
        try:
            output = await self._loop.run_in_executor(self._thread, self._step, batch)
        except _Abandoned:
            failure = Failure(FailureKind.CLIENT_GONE, "cancelled")
            events = self.scheduler.fail_batch(batch, failure, time.monotonic())
        except Exception as error:
            log.exception("step=%d failed", batch.step)
            failure = Failure(FailureKind.STEP_FAILED, f"{type(error).__name__}: {error}")
            events = self.scheduler.fail_batch(batch, failure, time.monotonic())
        else:
            events = self.scheduler.absorb(batch, output, time.monotonic())
            prompts = sum(len(row.token_ids) for row in batch.rows if not row.decodes)
            decodes = sum(row.decodes for row in batch.rows)
            self._pace.observe(prompts, decodes, time.monotonic() - began)
            # Nothing was computed by one that failed or was given up: it would look fast.
            self.metrics.step(batch, time.monotonic() - began)
        finally:
            ended = time.monotonic()
            self._clock.began = None
            self._clock.last_end = ended
        if consists:
            log.info("step=%d ms=%.1f %s", batch.step, (ended - began) * 1000, consists)
        self._clock.steps += 1
        self._clock.recent_s.append(ended - began)
        self._deliver(events)

    def _describe(self, batch: Batch) -> str:
        """Who decodes, how much is guessed, and which tokens of which prompts are computed."""
        decodes: list[str] = []
        prompts: list[str] = []
        for row in batch.rows:
            key = self.scheduler.key_of(row.seq_id)
            live = None if key is None else self._live.get(key)
            name = "" if live is None else live.request
            end = row.start + len(row.token_ids)
            (decodes if row.decodes else prompts).append(
                name if row.decodes else f"{name}[{row.start}:{end}]"
            )
        guesses = sum(row.drafts for row in batch.rows)
        return f"decode={','.join(decodes)} guesses={guesses} prefill={','.join(prompts)}"

    async def _idle(self) -> None:
        if not self._live:
            self._clock.last_end = time.monotonic()
        try:
            await asyncio.wait_for(self._wake.wait(), _POLL_S)
        except TimeoutError:
            return
        self._wake.clear()

    def _step(self, batch: Batch) -> StepOutput:
        """In the step's thread."""
        exports = [
            (key, row.start + len(row.token_ids))
            for row in batch.rows
            if (key := self.scheduler.key_of(row.seq_id)) is not None
            and (live := self._live.get(key)) is not None
            and live.exporting
        ]
        if all(row.decodes for row in batch.rows) and not exports:
            return self._runner.step(batch)

        def on_layers(first: int, end: int) -> None:
            if self._abandoned:
                raise _Abandoned
            if exports:
                self._loop.call_soon_threadsafe(self._layers_final, exports, first, end)

        return self._runner.step(batch, on_layers)

    def _layers_final(self, exports: list[tuple[RequestKey, int]], first: int, end: int) -> None:
        for key, computed_tokens in exports:
            live = self._live.get(key)
            if self.plane is not None and live is not None and live.exporting:
                self.plane.export_progress(key, computed_tokens, first, end)

    def _open_exports(self, batch: Batch) -> None:
        """A request's first chunk is about to run: its target is dialled meanwhile."""
        for row in batch.rows:
            key = self.scheduler.key_of(row.seq_id)
            live = self._live.get(key) if key is not None else None
            if key is None or live is None or live.target is None or live.exporting:
                continue
            if self.plane is None:
                continue
            if self._open_export(key, live, live.target, row) and row.start:
                # What the prefix cache had is final already.
                self.plane.export_progress(key, row.start)

    def _open_export(self, key: RequestKey, live: _Live, target: pb.KvTarget, row: Row) -> bool:
        if self.plane is None:
            raise AssertionError("an export without a KV plane")
        request = self.scheduler.request(key)
        blocks = self._runner.layout.blocks_for(len(request.token_ids))
        live.exporting = True
        try:
            self.plane.open_export(
                key,
                request.request_id,
                request.attempt,
                target,
                tuple(row.block_table[:blocks]),
                len(request.token_ids),
                live.lease_s,
            )
        except RequestFailure as error:
            live.exporting = False
            self.on_export_failed(key, error.failure)
            return False
        return True

    def _poll(self) -> None:
        self._deliver(self.scheduler.poll(time.monotonic()))

    def _kick(self) -> None:
        self._wake.set()

    # ---- scheduler's events -> routers ----------------------------------------------

    def _deliver(self, events: Iterable[SchedulerEvent]) -> None:
        touched: set[Outbox] = set()
        for event in events:
            live = self._live.get(event.key)
            if live is None:
                continue
            touched.add(live.outbox)
            match event:
                case Tokens(tokens=tokens, guessed=guessed):
                    self.metrics.generated(len(tokens), guessed)
                    for token in tokens:
                        live.outbox.put_token(wire.token_to_pb(token, live.handle))
                case Granted():
                    self._granted(event, live)
                case Prefilled():
                    self._prefilled(event, live)
                case RequestFailed(failure=failure):
                    self._request_failed(event.key, live, failure)
                case Finished():
                    self._live.pop(event.key, None)
                case Advanced():
                    pass  # on_layers said so already, layer by layer
        for outbox in touched:
            outbox.flush()

    def _granted(self, event: Granted, live: _Live) -> None:
        if self.plane is None:
            raise AssertionError("a grant without a KV plane")
        request = self.scheduler.request(event.key)
        live.granted = True
        grant = self.plane.open_import(
            event.key,
            request.request_id,
            request.attempt,
            event.block_ids,
            event.prefix_blocks,
            request.choices,
            time.monotonic(),
            token_count=len(request.token_ids),
        )
        self.metrics.grant_wait(event.wait_s)
        live.outbox.put(
            pb.Event(
                granted=pb.Granted(
                    handle=live.handle,
                    grant=grant,
                    prefix_tokens=event.prefix_blocks * self._runner.layout.block_tokens,
                    ttl_s=self._settings.kv_lease_s,
                    wait_s=event.wait_s,
                    kv_address=self.kv_address,
                )
            )
        )

    def _prefilled(self, event: Prefilled, live: _Live) -> None:
        self.metrics.prefilled(event)
        message = pb.Prefilled(
            handle=live.handle,
            first=wire.first_tokens(event.first),
            cached_tokens=event.cached_tokens,
            queue_s=event.queue_s,
            prefill_s=event.prefill_s,
        )
        if live.mode is Mode.EXPORT and live.exporting and self.plane is not None:
            message.transport = self.plane.export_transport(event.key)
            self.plane.seal_export(event.key, event.first, event.cached_tokens)
        # Token 0 goes out at once: the transfer's tail is hidden behind it.
        live.outbox.put(pb.Event(prefilled=message))

    def _request_failed(self, key: RequestKey, live: _Live, failure: Failure) -> None:
        self._live.pop(key, None)
        self.metrics.failure(failure.kind)
        live.outbox.put(wire.failed_event(live.handle, failure))
        if self.plane is None:
            return
        if live.exporting:
            self.plane.cancel_export(key)
        if live.granted:
            self.plane.cancel_import(key)

    # ---- the KV plane's callbacks -----------------------------------------------------

    def on_committed(
        self, key: RequestKey, first: tuple[TokenOut, ...], stats: ImportStats
    ) -> None:
        """D has all KV and token 0: decode begins."""
        live = self._live.get(key)
        if live is None:
            return
        live.granted = False
        self.metrics.received(stats)
        live.outbox.put(
            pb.Event(
                committed=pb.Committed(
                    handle=live.handle,
                    first=wire.first_tokens(first),
                    kv_bytes=stats.kv_bytes,
                    transfer_s=stats.transfer_s,
                    cached_tokens=stats.cached_tokens,
                    transport=stats.transport,
                )
            )
        )
        live.outbox.flush()
        self._deliver(self.scheduler.attach(key, first, time.monotonic()))
        self._kick()

    def on_import_failed(self, key: RequestKey, failure: Failure) -> None:
        """The blocks follow by on_import_released, maybe after a quarantine."""
        live = self._live.get(key)
        if live is not None:
            self._refuse(live, failure.kind, failure.message)
            live.outbox = Outbox()

    def on_import_quarantined(self, key: RequestKey) -> None:
        """A receive still writes into the blocks: nobody else may have them yet."""
        self.scheduler.cancel(key, time.monotonic(), quarantine=True)

    def on_import_released(self, key: RequestKey) -> None:
        self._live.pop(key, None)
        now = time.monotonic()
        self.scheduler.cancel(key, now)
        self.scheduler.release_quarantine(key)
        self.commands_done()

    def on_export_sealed(self, key: RequestKey, stats: ExportStats) -> None:
        log.debug("export=%s sealed bytes=%d seconds=%.4f", key, stats.kv_bytes, stats.transfer_s)
        transport = self.plane.export_transport(key) if self.plane is not None else ""
        self.metrics.sent(stats, transport)

    def on_export_done(self, key: RequestKey, committed: bool) -> None:
        """The target has answered, or its lease is over: the blocks are ours again."""
        live = self._live.pop(key, None)
        if live is None:
            return
        self.metrics.export_done(committed)
        if not committed and live.target is not None:
            # The decode worker tells the router too, if it knows of the grant at all.
            message = f"decode worker {live.target.worker} did not take the KV"
            self._refuse(live, FailureKind.TRANSFER_FAILED, message)
        self.scheduler.release_export(key)
        self.commands_done()

    def on_export_failed(self, key: RequestKey, failure: Failure) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            self._refuse(live, failure.kind, failure.message)
            self.scheduler.cancel(key, time.monotonic())
            self.commands_done()

    # ---- drain, stop, health ------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what runs, copies too; True when all ended in time."""
        self.draining = True
        self.scheduler.drain()
        until = time.monotonic() + timeout_s
        while (self._live or self.sharing.busy) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        finished = not (self._live or self.sharing.busy)
        why = "the worker's drain timeout is over"
        for key, live in list(self._live.items()):
            self._refuse(live, FailureKind.DRAINING, why)
            self._cancel(key)
        self.sharing.end_all(Failure(FailureKind.DRAINING, why))
        return finished

    async def stop(self) -> None:
        """Ends the loop; streams get what is pending."""
        self._stopping = True
        for outbox in self._streams.values():
            outbox.close()
        self._kick()

    def unhealthy(self) -> str | None:
        """Why liveness is red, or None. Load alone never makes it red."""
        now = time.monotonic()
        began = self._clock.began
        if began is not None:
            age_s = now - began
            if age_s > self._settings.step_timeout_s:
                return f"a step has been running for {age_s:.0f} s"
            return None
        load = self.scheduler.load()
        waiting = load.queued + load.running + load.waiting_grants
        if waiting and not load.kv_granted and now - self._clock.last_end > _STALL_S:
            return f"{waiting} requests wait and no step ran for {_STALL_S:.0f} s"
        return None

    @property
    def steps(self) -> int:
        """Steps since the start."""
        return self._clock.steps

    def prefixes(self) -> tuple[bytes, ...]:
        """Hashes of all prefixes that needn't be computed here."""
        return (self.intake.archive or self.scheduler).prefixes()

    def take_prefix_changes(self) -> PrefixChanges:
        return (self.intake.archive or self.scheduler).take_prefix_changes()

    def step_median_s(self) -> float:
        return statistics.median(self._clock.recent_s) if self._clock.recent_s else 0.0
