"""The KV plane of one worker: what the engine's core opens, hears of, and never waits for.

All methods and callbacks run in one event loop. Blocks may be reused
- of an import: after `on_import_released` (or, once committed, when the owner likes);
- of an export: after `on_export_done` or `on_export_failed`.
Each import ends in exactly one `on_committed` or `on_import_released`, each export in
exactly one `on_export_done` or `on_export_failed`.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import xxhash

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_core.kv import KvLayout
from pd_engine import exports as ex
from pd_engine import imports as im
from pd_engine.exports import ExportStats
from pd_engine.imports import ImportStats
from pd_engine.kv.bytcp import TcpTransport
from pd_engine.kv.channels import Channels, ChannelSettings
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.nixl import NixlTransport
from pd_engine.kv.receiver import KvReceiver, ReceiverSettings
from pd_engine.kv.sender import KvSender
from pd_engine.kv.shm import ShmTransport
from pd_engine.kv.transport import AUTO, Transport, choose
from pd_engine.transfer import ExportLimits, ImportLimits, TransferId
from pd_engine.types import RequestKey, TokenOut
from pd_proto.tls import Certificates
from pd_proto.tokens import Tokens
from pd_proto.v1 import engine_pb2 as pb

__all__ = ["ExportStats", "ImportStats", "KvCallbacks", "KvPlane", "KvSettings"]

log = logging.getLogger(__name__)

GRANT_BYTES = 16


class KvCallbacks(Protocol):
    """What the plane tells its owner. None may raise or block."""

    def on_committed(
        self, key: RequestKey, first: tuple[TokenOut, ...], stats: ImportStats
    ) -> None:
        """All KV of the prompt is in the grant's blocks, verified."""

    def on_import_failed(self, key: RequestKey, failure: Failure) -> None:
        """The grant is lost. Its blocks are not free before `on_import_released`."""

    def on_import_quarantined(self, key: RequestKey) -> None:
        """The grant ended within a receive: its blocks may still be written to."""

    def on_import_released(self, key: RequestKey) -> None:
        """No receive can touch the grant's blocks any more."""

    def on_export_sealed(self, key: RequestKey, stats: ExportStats) -> None:
        """All bytes and the seal are out."""

    def on_export_done(self, key: RequestKey, committed: bool) -> None:
        """The target's verdict came, or was not waited for any longer, or cancel_export."""

    def on_export_failed(self, key: RequestKey, failure: Failure) -> None:
        """The transfer ended before its seal was out."""


@dataclass(frozen=True, slots=True)
class KvSettings:
    imports: ImportLimits = field(default_factory=ImportLimits)
    exports: ExportLimits = field(default_factory=ExportLimits)
    receiver: ReceiverSettings = field(default_factory=ReceiverSettings)
    channels: ChannelSettings = field(default_factory=ChannelSettings)
    kv_rate_limit_bytes_s: float = 0.0  # of all exports together; 0: as fast as it goes
    tick_s: float = 0.25  # how often leases and deadlines are looked at
    quantization: str = "none"  # of what goes by tcp: none, int8, int4
    transport: str = "tcp"  # or another by name, or auto: the best that both ends can do
    auto: tuple[str, ...] = ("shm", "tcp")  # what auto may take, the best first

    @property
    def transports(self) -> tuple[str, ...]:
        """By which this worker's KV goes and comes."""
        return self.auto if self.transport == AUTO else (self.transport,)


class KvPlane:
    """Both sides of KV transfers. `pool_fd`: the pool's memory, where others may read it."""

    def __init__(
        self,
        layout: KvLayout,
        memory: KvMemory,
        worker: str,
        epoch: str,
        callbacks: KvCallbacks,
        settings: KvSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        pool_fd: int | None = None,
        certificates: Certificates | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        settings = settings or KvSettings()
        self._settings = settings
        by_tcp = TcpTransport(certificates, tokens)
        transports: dict[str, Transport] = {"tcp": by_tcp}  # it also says no
        if "shm" in settings.transports:
            transports["shm"] = ShmTransport(pool_fd, tokens)
        if "nixl" in settings.transports:
            transports["nixl"] = NixlTransport(memory, epoch, by_tcp)
        only = settings.transports[0] if "tcp" not in settings.transports else ""
        refused = f"{worker} takes KV by {only} alone" if only else ""
        self._transports = transports
        self._callbacks = callbacks
        self._clock = clock
        self._layout = layout
        self._imports = im.Imports(layout, xxhash.xxh3_64, settings.imports)
        self._exports = ex.Exports(layout, xxhash.xxh3_64, settings.exports)
        self._receiver = KvReceiver(
            self._imports,
            memory,
            worker,
            epoch,
            self._apply_imports,
            clock,
            settings.receiver,
            transports,
            refused,
        )
        self._channels = Channels(layout, worker, epoch, settings.channels, clock, transports)
        self._sender = KvSender(
            self._exports,
            memory,
            self._channels,
            self._apply_exports,
            clock,
            settings.kv_rate_limit_bytes_s,
            "" if settings.quantization == "none" else settings.quantization,
        )
        self._ticker: asyncio.Task[None] | None = None

    # ---- life -------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> str:
        """Listen (port 0: any) and keep the leases; returns the bound `host:port`."""
        address = await self._receiver.start(host, port)
        self._ticker = asyncio.get_running_loop().create_task(self._tick_for_ever())
        return address

    async def close(self) -> None:
        """Ends all transfers (their callbacks come) and all connections."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        for key in self._exports.open_keys:
            self.cancel_export(key)
        for key in self._imports.open_keys:
            self.cancel_import(key)
        await self._sender.close()
        await self._receiver.close()
        for transport in self._transports.values():
            await transport.close()

    @property
    def open_imports(self) -> int:
        return len(self._imports.open_keys)

    @property
    def open_exports(self) -> int:
        return len(self._exports.open_keys)

    @property
    def connections(self) -> int:
        """Accepted ones."""
        return self._receiver.connection_count

    @property
    def idle_connections(self) -> int:
        """Dialled ones that wait for their next transfer."""
        return self._channels.idle_count

    # ---- decode worker ----------------------------------------------------------------

    def open_import(
        self,
        key: RequestKey,
        request_id: str,
        attempt: int,
        block_ids: tuple[int, ...],
        prefix_blocks: int,
        choices: tuple[int, ...],
        now: float,
        *,
        token_count: int,
    ) -> bytes:
        """Give a grant on `block_ids` (the whole prompt's, prefix first); returns its secret."""
        grant = os.urandom(GRANT_BYTES)
        self._imports.open(
            key,
            grant,
            TransferId(request_id, attempt),
            block_ids=block_ids,
            prefix_blocks=prefix_blocks,
            choices=choices,
            token_count=token_count,
            now=now,
        )
        return grant

    def receiving(self, key: RequestKey) -> bool:
        """Whether a sender has begun to fill an open grant."""
        return self._imports.begun(key)

    def cancel_import(self, key: RequestKey) -> bool:
        """Take the grant back. True: its blocks are quarantined, `on_import_released`
        follows; False: they are free (it was called), or there was no such grant."""
        actions = self._imports.cancel(key)
        self._apply_imports(actions)
        return any(isinstance(a, im.Quarantined) for a in actions)

    # ---- prefill worker -----------------------------------------------------------------

    def open_export(
        self,
        key: RequestKey,
        request_id: str,
        attempt: int,
        target: pb.KvTarget,
        block_ids: tuple[int, ...],
        token_count: int,
        lease_s: float,
    ) -> None:
        """Start handing over; connects at once. RequestFailure: the target makes no sense."""
        to = ex.Target(
            target.kv_address,
            target.epoch,
            target.grant,
            target.prefix_tokens,
            choose(self._settings.transport, target.transport, self._settings.auto),
        )
        try:
            actions = self._exports.open(
                key,
                TransferId(request_id, attempt),
                to,
                block_ids=block_ids,
                token_count=token_count,
                lease_s=lease_s,
                now=self._clock(),
            )
        except ValueError as e:
            raise RequestFailure(FailureKind.TRANSFER_FAILED, str(e)) from e
        self._apply_exports(actions)

    def export_progress(
        self,
        key: RequestKey,
        computed_tokens: int,
        layer_start: int = 0,
        layer_end: int | None = None,
    ) -> None:
        """KV of layers [layer_start, layer_end) at positions < computed_tokens is final."""
        end = self._layout.layers if layer_end is None else layer_end
        self._apply_exports(
            self._exports.progress(key, computed_tokens, layer_start, end, self._clock())
        )

    def seal_export(self, key: RequestKey, first: tuple[TokenOut, ...], cached_tokens: int) -> None:
        """The whole prompt is final and token 0 of each choice drawn."""
        self._apply_exports(self._exports.seal(key, first, cached_tokens, self._clock()))

    def export_transport(self, key: RequestKey) -> str:
        """By which an open export goes; "" while that isn't known."""
        return self._sender.transport_of(key)

    def cancel_export(self, key: RequestKey) -> None:
        """Stop sending; `on_export_done(key, False)` follows, soon, whatever the target does."""
        self._apply_exports(self._exports.cancel(key))

    # ---- both -----------------------------------------------------------------------------

    def limit_rate(self, bytes_s: float) -> None:
        """From now on all exports together send at most so much (0: as fast as it goes).

        What a prefill worker makes, plus some, is enough: KV then arrives evenly, and not in
        bursts that take a core from the target's decode steps."""
        self._sender.pacer.bytes_s = bytes_s

    def renew(self, key: RequestKey) -> None:
        """The router still wants it."""
        now = self._clock()
        self._imports.renew(key, now)
        self._exports.renew(key, now)

    def tick(self) -> None:
        """Expire what is due; the plane does so by itself once started."""
        now = self._clock()
        self._apply_imports(self._imports.tick(now))
        self._apply_exports(self._exports.tick(now))
        self._receiver.tick(now)
        self._channels.tick(now)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            try:
                self.tick()
            except Exception:
                # A sweep that stops would leave blocks held for ever.
                log.exception("KV plane: a sweep failed")

    def _apply_imports(self, actions: Sequence[im.ImportAction]) -> None:
        for action in actions:
            match action:
                case im.Committed(key, first, stats, conn):
                    stats = replace(stats, transport=self._receiver.transport_of(conn))
                    self._tell(self._callbacks.on_committed, key, first, stats)
                case im.ImportFailed(key, failure):
                    log.info("KV import failed: %s", failure.message)
                    self._tell(self._callbacks.on_import_failed, key, failure)
                case im.Quarantined(key):
                    self._tell(self._callbacks.on_import_quarantined, key)
                case im.Released(key):
                    self._tell(self._callbacks.on_import_released, key)
                case im.Answer(conn, verdict, close):
                    self._receiver.answer(conn, verdict, close)

    def _apply_exports(self, actions: Sequence[ex.ExportAction]) -> None:
        for action in actions:
            match action:
                case ex.Engage(key, id, target):
                    self._sender.engage(key, id, target)
                case ex.Wake(key):
                    self._sender.wake(key)
                case ex.Cut(key):
                    self._sender.cut(key)
                case ex.ExportSealed(key, stats):
                    self._tell(self._callbacks.on_export_sealed, key, stats)
                case ex.ExportDone(key, committed):
                    self._tell(self._callbacks.on_export_done, key, committed)
                case ex.ExportFailed(key, failure):
                    log.info("KV export failed: %s", failure.message)
                    self._tell(self._callbacks.on_export_failed, key, failure)

    def _tell(self, callback: Callable[..., None], *what: object) -> None:
        try:
            callback(*what)
        except Exception:
            # The transfer's own state is consistent already, and others go on.
            log.exception("KV plane: %s failed", getattr(callback, "__name__", callback))
