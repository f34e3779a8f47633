"""The worker tells every router that it is there, and how it fares.

Routers are found by name (headless DNS, or PD_HOSTS_FILE on one machine), looked up again
every two seconds; each gets a stream of its own that is dialled anew when it breaks.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pd_core.identity import Part
from pd_core.proof import Purpose
from pd_engine.core import EngineCore
from pd_engine.health import Health
from pd_engine.types import PrefixChanges
from pd_proto import tls
from pd_proto.tokens import Proof, Tokens
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc

log = logging.getLogger("pd_engine.announce")

_RESOLVE_S = 2.0
_DIAL_AGAIN_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_WELCOME_DEADLINE_S = 10.0
_MAX_PENDING_PREFIXES = 50_000
_OPTIONS = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)


async def resolve(name: str, port: int) -> set[str]:
    """Addresses `ip:port` behind a name; empty when it has none (yet)."""
    hosts_file = os.environ.get("PD_HOSTS_FILE")
    if hosts_file:
        try:
            hosts = json.loads(Path(hosts_file).read_text())
        except (OSError, ValueError) as error:
            log.warning("hosts file %s: %s", hosts_file, error)
            return set()
        if name in hosts:
            return {f"{ip}:{port}" for ip in hosts[name]}
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return set()
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }


def _host(address: str) -> str:
    return address.rpartition(":")[0]


@dataclass(slots=True)
class _PrefixFeed:
    """Prefix changes that one router hasn't been told; when too many, it starts afresh."""

    reset: bool = True
    pending: deque[PrefixChanges] = field(default_factory=deque)
    size: int = 0

    def add(self, changes: PrefixChanges) -> None:
        if self.reset:
            return
        self.pending.append(changes)
        self.size += len(changes.gained) + len(changes.lost)
        if self.size > _MAX_PENDING_PREFIXES:
            self.reset = True
            self.pending.clear()
            self.size = 0

    def fill(self, beat: pb.Heartbeat, everything: Callable[[], Sequence[bytes]]) -> None:
        """A gain and a loss of one hash keep their order: the last word counts."""
        if self.reset:
            self.reset = False
            beat.prefix_reset = True
            beat.prefix_gained.extend(everything())
            return
        last: dict[bytes, bool] = {}
        while self.pending:
            changes = self.pending.popleft()
            last.update(dict.fromkeys(changes.lost, False))
            last.update(dict.fromkeys(changes.gained, True))
        self.size = 0
        beat.prefix_gained.extend(h for h, held in last.items() if held)
        beat.prefix_lost.extend(h for h, held in last.items() if not held)


class Announcer:
    """Keeps one announcement stream to each router."""

    def __init__(
        self,
        core: EngineCore,
        health: Health,
        hello: pb.Hello,
        bundle: pb.TokenizerBundle,
        routers: Sequence[str],
        certificates: tls.Certificates | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        self._core = core
        self._health = health
        self._hello = hello
        self._bundle = bundle
        self._certificates = certificates
        self._tokens = tokens
        split = (router.rpartition(":") for router in routers)
        self._routers = [(host, int(port)) for host, _, port in split]
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._ports: dict[str, tuple[int, ...]] = {}  # by host: of routers of several processes
        self._feeds: dict[str, _PrefixFeed] = {}
        self._welcomed: dict[str, str] = {}  # by address: epochs of routers that hear us now
        self._drains = asyncio.Event()
        self._told: set[str] = set()  # addresses that have heard that it drains

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._follow_routers()
                await asyncio.sleep(_RESOLVE_S if self._streams else 0.2)
        finally:
            for task in self._streams.values():
                task.cancel()
            await asyncio.gather(*self._streams.values(), return_exceptions=True)

    async def tell_draining(self, most_s: float) -> None:
        """Draining has begun: each router hears so before this returns, or `most_s` are over.
        Else a worker with nothing to finish would seem to have died."""
        self._drains.set()
        until = time.monotonic() + most_s
        while self._welcomed.keys() - self._told and time.monotonic() < until:
            await asyncio.sleep(0.005)

    async def _follow_routers(self) -> None:
        found = await self._named()
        for address in found - self._streams.keys():
            self._feeds[address] = _PrefixFeed()
            self._streams[address] = asyncio.create_task(self._keep_announced(address))
        # A router whose name went away but whose stream lives still drains: its stream ends
        # by itself. One that cannot be reached and has no name any more is forgotten.
        for address in list(self._streams.keys() - found):
            if self._streams[address].done():
                del self._streams[address]
                del self._feeds[address]
        hosts = {_host(address) for address in self._streams}
        self._ports = {host: ports for host, ports in self._ports.items() if host in hosts}

    async def _named(self) -> set[str]:
        """Where routers are now, as far as names and the routers themselves tell."""
        found: set[str] = set()
        for host, port in self._routers:
            found |= await resolve(host, port)
        hosts = {_host(address) for address in found}
        return found | {f"{h}:{port}" for h in hosts for port in self._ports.get(h, ())}

    async def _keep_announced(self, address: str) -> None:
        failures = 0
        while True:
            try:
                channel = tls.dial(self._certificates, address, Part.ROUTER, _OPTIONS)
                async with channel:
                    await self._announce(address, channel)
                failures = 0
            except (grpc.RpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
                if failures == 0:
                    log.info("router=%s announcement ended: %s", address, reason)
                failures += 1
            if failures > 3 and not await self._still_named(address):
                return
            await asyncio.sleep(_DIAL_AGAIN_S[min(failures, len(_DIAL_AGAIN_S) - 1)])

    async def _still_named(self, address: str) -> bool:
        return address in await self._named()

    async def _announce(self, address: str, channel: grpc.aio.Channel) -> None:
        call = engine_pb2_grpc.ControlStub(channel).Announce()
        async with asyncio.timeout(_WELCOME_DEADLINE_S):
            notice, proof = await self._say_hello(call)
        if notice is grpc.aio.EOF:
            raise TimeoutError("the router ended the stream without a Welcome")
        if notice.HasField("refusal"):
            log.error("router=%s refuses this worker: %s", address, notice.refusal.reason)
            raise TimeoutError(notice.refusal.reason)
        if not notice.HasField("welcome"):
            raise TimeoutError("the router's first notice is not a Welcome")
        if proof is not None and (why := proof.stranger(notice.welcome.confirmation)):
            raise TimeoutError(f"not announced: {why}")
        log.info("router=%s announced", address)
        self._ports[_host(address)] = tuple(notice.welcome.control_ports)
        self._health.registered = True
        self._feeds[address].reset = True
        writing = asyncio.Lock()  # a call takes one write at a time
        every_s = notice.welcome.heartbeat_s or 1.0
        self._welcomed[address] = notice.welcome.router_epoch or address
        beats = asyncio.create_task(self._beat(address, call, writing, every_s))
        notices = asyncio.create_task(self._serve_notices(call, writing))
        try:
            await asyncio.wait({beats, notices}, return_when=asyncio.FIRST_COMPLETED)
            if notices.done():
                notices.result()
                return
            # Without heartbeats nothing is announced, whatever the stream looks like.
            error = beats.exception()
            if not isinstance(error, grpc.RpcError | asyncio.InvalidStateError):
                log.error("router=%s heartbeats ended", address, exc_info=error)
            raise TimeoutError("heartbeats ended")
        finally:
            del self._welcomed[address]
            for task in (beats, notices):
                task.cancel()
            await asyncio.gather(beats, notices, return_exceptions=True)

    async def _say_hello(self, call: grpc.aio.StreamStreamCall) -> tuple[Any, Proof | None]:
        """What the router says to it, and the proof that it is to confirm."""
        proof = await self._tokens.answer(Purpose.ANNOUNCE, call) if self._tokens else None
        if isinstance(proof, str):
            raise TimeoutError(f"not announced: {proof}")
        hello = self._hello
        if proof is not None:
            hello = pb.Hello()
            hello.CopyFrom(self._hello)
            hello.proof = proof.given
        await call.write(pb.WorkerReport(hello=hello))
        return await call.read(), proof

    async def _serve_notices(self, call: grpc.aio.StreamStreamCall, writing: asyncio.Lock) -> None:
        # grpc.aio takes either reads or iteration on a call, and the Welcome was read.
        while (notice := await call.read()) is not grpc.aio.EOF:
            if notice.HasField("want_bundle"):
                async with writing:
                    await call.write(pb.WorkerReport(bundle=self._bundle))

    async def _beat(
        self, address: str, call: grpc.aio.StreamStreamCall, writing: asyncio.Lock, every_s: float
    ) -> None:
        seq = 0
        while True:
            seq += 1
            async with writing:
                beat = self._heartbeat(address, seq)
                await call.write(pb.WorkerReport(heartbeat=beat))
            if beat.state == pb.WORKER_STATE_DRAINING:
                self._told.add(address)
                await asyncio.sleep(every_s)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._drains.wait(), every_s)

    def _heartbeat(self, address: str, seq: int) -> pb.Heartbeat:
        core = self._core
        changes = core.take_prefix_changes()
        if changes.gained or changes.lost:
            for feed in self._feeds.values():
                feed.add(changes)
        load = core.scheduler.load()
        beat = pb.Heartbeat(
            seq=seq,
            routers=len(set(self._welcomed.values())),  # one may have several addresses
            altered=not core.sharing.exact,
            state=pb.WORKER_STATE_DRAINING if core.draining else pb.WORKER_STATE_READY,
            load=pb.Load(
                queued=load.queued,
                running=load.running,
                waiting_grants=load.waiting_grants,
                pending_tokens=load.pending_tokens,
                kv_blocks=load.kv_blocks,
                kv_free=load.kv_free,
                kv_cached=load.kv_cached,
                kv_active=load.kv_active,
                kv_granted=load.kv_granted,
                kv_quarantined=load.kv_quarantined,
                step_s=core.step_median_s(),
                steps=core.steps,
                busy_s=core.metrics.busy_s,
                computed_tokens=core.metrics.computed_tokens,
                computed_pairs=core.metrics.computed_pairs,
                pending_pairs=load.pending_pairs,
            ),
        )
        self._feeds[address].fill(beat, core.prefixes)
        return beat
