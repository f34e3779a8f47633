"""Prefixes from worker to worker: this one takes copies (`pull`) and gives them (`share`).

A copy goes as a hand-over does, by grant, push, seal and commit, but ends in the prefix cache
instead of in a request, and nobody waits for it here: whoever asked computes the prompt when
it isn't there in time. What came quantized or
converted is never given on: it isn't what was computed.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Protocol

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_core.kv import PREFIX_HASH_BYTES
from pd_engine import wire
from pd_engine.archive import Refill
from pd_engine.intake import Intake
from pd_engine.kv.plane import ExportStats, ImportStats, KvCallbacks, KvPlane
from pd_engine.metrics import Metrics
from pd_engine.outbox import Outbox
from pd_engine.scheduler import Scheduler
from pd_engine.types import RequestKey, TokenOut
from pd_proto.v1 import engine_pb2 as pb

log = logging.getLogger("pd_engine.sharing")

Hashes = tuple[bytes, ...]


class Host(Protocol):
    """What it needs of the engine's core."""

    scheduler: Scheduler
    metrics: Metrics
    plane: KvPlane | None
    intake: Intake
    kv_address: str
    draining: bool

    def uses(self, key: RequestKey) -> bool:
        """Whether something here has this key."""
        ...

    def commands_done(self) -> None:
        """Blocks came free, or joined the cache."""
        ...


@dataclass(slots=True, eq=False)
class _Copy:
    """One on its way. Outgoing ones first wait for what is kept beyond the pool."""

    outbox: Outbox
    handle: int
    tokens: int
    outgoing: bool
    of: str  # the request that it's for
    moving: bool = True  # the plane has it
    had_tokens: int = 0  # of an incoming one: that were here already


class Sharing:
    """See the module. Everything runs in the event loop."""

    def __init__(self, host: Host, lease_s: float, exact: bool) -> None:
        """`exact`: this worker's blocks are as they were computed, until one comes quantized or
        converted."""
        self._host = host
        self._lease_s = lease_s
        self.exact = exact
        self._live: dict[RequestKey, _Copy] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._live

    @property
    def busy(self) -> bool:
        return bool(self._live)

    # ---- commands ----------------------------------------------------------------------

    def pull(self, key: RequestKey, outbox: Outbox, message: pb.Pull) -> None:
        """Sets blocks aside for a copy, and says so; or that it has the prefix, or no room."""
        host, hashes = self._host, tuple(message.hashes)
        copy = _Copy(outbox, message.handle, self._tokens(hashes), False, message.id.request)
        plane = self._plane(key, copy, hashes)
        if plane is None:
            return
        if host.draining:
            self._refuse(copy, FailureKind.DRAINING, "this worker is shutting down")
            return
        reserved = host.scheduler.copies.reserve(key, hashes)
        if reserved is None:
            why = f"no room for a copy of {copy.tokens} tokens"
            self._refuse(copy, FailureKind.NO_CAPACITY, why)
            return
        if reserved.complete:
            host.scheduler.copies.attach(key)
            nothing_new = pb.Committed(handle=copy.handle, cached_tokens=copy.tokens)
            copy.outbox.put(pb.Event(committed=nothing_new))
            copy.outbox.flush()
            return
        copy.had_tokens = reserved.prefix_blocks * host.scheduler.pool.block_tokens
        self._live[key] = copy
        ask = message.id
        grant = plane.open_import(
            key,
            ask.request,
            ask.attempt,
            reserved.block_ids,
            reserved.prefix_blocks,
            (),
            time.monotonic(),
            token_count=copy.tokens,
        )
        granted = pb.Granted(
            handle=copy.handle,
            grant=grant,
            prefix_tokens=reserved.prefix_blocks * host.scheduler.pool.block_tokens,
            ttl_s=self._lease_s,
            kv_address=host.kv_address,
        )
        copy.outbox.put(pb.Event(granted=granted))
        copy.outbox.flush()

    def share(self, key: RequestKey, outbox: Outbox, message: pb.Share) -> None:
        """Sends a copy, from the pool or from what is kept beyond it."""
        hashes = tuple(message.hashes)
        tokens, of = self._tokens(hashes), message.id.request
        copy = _Copy(outbox, message.handle, tokens, True, of, moving=False)
        plane = self._plane(key, copy, hashes)
        if plane is None:
            return
        if self._altered(copy):
            return
        self._live[key] = copy
        archive = self._host.intake.archive
        refill = archive.find(hashes, copy.tokens, copy.of) if archive is not None else None
        if refill is None:
            self._send(key, copy, hashes, message)
            return
        task = asyncio.get_running_loop().create_task(
            self._bring_and_send(key, copy, hashes, message, refill)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_and_send(
        self, key: RequestKey, copy: _Copy, hashes: Hashes, message: pb.Share, refill: Refill
    ) -> None:
        archive = self._host.intake.archive
        if archive is None:
            raise AssertionError("a refill without an archive")
        try:
            await archive.bring(refill)
            if self._live.get(key) is copy:
                self._send(key, copy, hashes, message)
        except Exception as error:
            log.exception("a copy couldn't be read back")
            if self._live.pop(key, None) is copy:
                self._refuse(copy, FailureKind.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            archive.repay(refill)

    def _send(self, key: RequestKey, copy: _Copy, hashes: Hashes, message: pb.Share) -> None:
        if self._altered(copy):  # while it was read back
            del self._live[key]
            return
        copies, plane = self._host.scheduler.copies, self._host.plane
        blocks = copies.pin(key, hashes)
        if blocks is None or plane is None:
            del self._live[key]
            why = f"its prefix of {copy.tokens} tokens isn't here any more"
            self._refuse(copy, FailureKind.TRANSFER_FAILED, why)
            return
        ask, lease_s = message.id, message.lease_s or self._lease_s
        copy.moving = True
        try:
            plane.open_export(
                key, ask.request, ask.attempt, message.target, blocks, copy.tokens, lease_s
            )
        except RequestFailure as error:
            self._forget(key)
            self._refuse(copy, error.failure.kind, error.failure.message)
            return
        plane.export_progress(key, copy.tokens)
        plane.seal_export(key, (), 0)

    def cancel(self, key: RequestKey) -> None:
        """Whoever asked wants it no more. Unknown keys have ended already."""
        copy, plane = self._live.get(key), self._host.plane
        if copy is None:
            return
        copy.outbox = Outbox()  # nobody listens
        if not copy.moving or plane is None:
            del self._live[key]
        elif copy.outgoing:
            plane.cancel_export(key)
        else:
            plane.cancel_import(key)

    def end_all(self, why: Failure) -> None:
        """What is under way is given up, and whoever asked is told why."""
        for key, copy in list(self._live.items()):
            copy.outbox.put(wire.failed_event(copy.handle, why))
            copy.outbox.flush()
            self.cancel(key)

    def close_stream(self, number: int) -> None:
        for key in [key for key in self._live if key[0] == number]:
            self.cancel(key)

    def _altered(self, copy: _Copy) -> bool:
        """Whether copies of what is here could be of something else; whoever asked is told."""
        if not self.exact:
            why = "KV came here quantized or converted: its copies wouldn't be what was computed"
            self._refuse(copy, FailureKind.INVALID_REQUEST, why)
        return not self.exact

    def _plane(self, key: RequestKey, copy: _Copy, hashes: Hashes) -> KvPlane | None:
        """None: it can't be done, and whoever asked has been told."""
        copies, plane = self._host.scheduler.copies, self._host.plane
        problem = ""
        if not hashes or len(set(hashes)) < len(hashes):
            problem = f"{len(hashes)} hashes, which must be different ones"
        elif any(len(one) != PREFIX_HASH_BYTES for one in hashes):
            problem = f"a hash that isn't of {PREFIX_HASH_BYTES} bytes"
        elif key in copies or self._host.uses(key):
            problem = f"handle {copy.handle} is in use"
        if problem:
            self._refuse(copy, FailureKind.INVALID_REQUEST, problem)
            return None
        if plane is None or copies.full or len(self._live) >= copies.most:
            self._refuse(copy, FailureKind.NO_CAPACITY, "too much is on its way already")
            return None
        return plane

    def _refuse(self, copy: _Copy, kind: FailureKind, message: str) -> None:
        self._host.metrics.copied(copy.tokens, outgoing=copy.outgoing, ended="failed")
        copy.outbox.put(wire.failed_event(copy.handle, Failure(kind, message)))
        copy.outbox.flush()

    def _tokens(self, hashes: Hashes) -> int:
        return len(hashes) * self._host.scheduler.pool.block_tokens

    # ---- the KV plane's callbacks --------------------------------------------------------

    def on_committed(
        self, key: RequestKey, first: tuple[TokenOut, ...], stats: ImportStats
    ) -> None:
        """All of it is here, and stays in the prefix cache."""
        del first
        copy, host = self._live.pop(key), self._host
        if stats.altered:
            host.scheduler.copies.give_up(key)
            self._refuse(copy, FailureKind.TRANSFER_FAILED, "the copy came quantized or converted")
            return
        host.scheduler.copies.attach(key)
        host.metrics.received(stats)
        host.metrics.copied(copy.tokens, outgoing=False, ended="done")
        committed = pb.Committed(
            handle=copy.handle,
            kv_bytes=stats.kv_bytes,
            transfer_s=stats.transfer_s,
            transport=stats.transport,
            cached_tokens=copy.had_tokens,
        )
        copy.outbox.put(pb.Event(committed=committed))
        copy.outbox.flush()
        host.commands_done()

    def on_import_failed(self, key: RequestKey, failure: Failure) -> None:
        """Its blocks follow by on_import_released, maybe after a quarantine."""
        copy = self._live[key]
        self._refuse(copy, failure.kind, failure.message)
        copy.outbox = Outbox()

    def on_import_quarantined(self, key: RequestKey) -> None:
        """A receive still writes into its blocks."""
        self._host.scheduler.copies.give_up(key, quarantine=True)

    def on_import_released(self, key: RequestKey) -> None:
        self._live.pop(key, None)
        self._host.scheduler.copies.give_up(key)
        self._host.scheduler.copies.release_quarantine(key)
        self._host.commands_done()

    def on_export_sealed(self, key: RequestKey, stats: ExportStats) -> None:
        plane = self._host.plane
        self._host.metrics.sent(stats, plane.export_transport(key) if plane is not None else "")

    def on_export_done(self, key: RequestKey, committed: bool) -> None:
        copy = self._live[key]
        self._forget(key)
        if committed:
            self._host.metrics.copied(copy.tokens, outgoing=True, ended="done")
        else:
            self._refuse(copy, FailureKind.TRANSFER_FAILED, "the other worker didn't take the copy")

    def on_export_failed(self, key: RequestKey, failure: Failure) -> None:
        copy = self._live[key]
        self._forget(key)
        self._refuse(copy, failure.kind, failure.message)

    def _forget(self, key: RequestKey) -> None:
        """Nothing reads its blocks any more."""
        del self._live[key]
        self._host.scheduler.copies.unpin(key)
        self._host.commands_done()


class ByKey:
    """The plane's callbacks, each to those whose transfer it is (`KvCallbacks`)."""

    def __init__(self, requests: KvCallbacks, copies: Sharing) -> None:
        self._requests = requests
        self._copies = copies

    def _of(self, key: RequestKey) -> KvCallbacks:
        return self._copies if key in self._copies else self._requests

    def on_committed(
        self, key: RequestKey, first: tuple[TokenOut, ...], stats: ImportStats
    ) -> None:
        if stats.altered:
            self._copies.exact = False
        self._of(key).on_committed(key, first, stats)

    def on_import_failed(self, key: RequestKey, failure: Failure) -> None:
        self._of(key).on_import_failed(key, failure)

    def on_import_quarantined(self, key: RequestKey) -> None:
        self._of(key).on_import_quarantined(key)

    def on_import_released(self, key: RequestKey) -> None:
        self._of(key).on_import_released(key)

    def on_export_sealed(self, key: RequestKey, stats: ExportStats) -> None:
        self._of(key).on_export_sealed(key, stats)

    def on_export_done(self, key: RequestKey, committed: bool) -> None:
        self._of(key).on_export_done(key, committed)

    def on_export_failed(self, key: RequestKey, failure: Failure) -> None:
        self._of(key).on_export_failed(key, failure)
