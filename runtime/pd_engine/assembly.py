"""Puts a worker together: model, pool, scheduler, KV plane, servers, announcements."""

import asyncio
import logging
import mmap
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc.aio

from pd_core.kv import KvLayout
from pd_engine import server, wire
from pd_engine.announce import Announcer
from pd_engine.archive import Archive, Policy, Stores
from pd_engine.blocks import BlockPool
from pd_engine.bundle import make_bundle
from pd_engine.core import EngineCore
from pd_engine.guide import Guides
from pd_engine.health import Health
from pd_engine.hostmemory import free_host_bytes
from pd_engine.kv import agents
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.plane import KvPlane, KvSettings
from pd_engine.kv.shm import SharedMemory
from pd_engine.kv.slots import DiskSlots, HostSlots, disk_slot_bytes
from pd_engine.limits import short_of_kv
from pd_engine.loading import Progress, unheard
from pd_engine.metrics import Metrics
from pd_engine.runner import Runner
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.settings import Settings
from pd_engine.speculate import Drafter, ModelGuesses, PromptLookup
from pd_engine.transfer import ImportLimits
from pd_proto.tls import Certificates
from pd_proto.tokens import Tokens
from pd_proto.v1 import engine_pb2 as pb

log = logging.getLogger("pd_engine.assembly")

# A prompt lets shorter ones go first for so many times what it takes alone.
_PATIENCE = 2.0
_RECOMPUTE_MAX_TOKENS = 4096
_STREAMS_CLOSE_S = 2.0
_TELL_S = 1.0
_FLUSH_S = 5.0  # within the margin that a pod's grace period has beyond the drain
_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}
_STORES = {
    "host": "engine.retention.hostMemory (--kv-host-bytes)",
    "disk": "engine.retention.disk (--kv-disk-bytes)",
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What takes time to make; made off the event loop."""

    runner: Runner
    pool: SharedMemory | None  # its pool's memory, if others may read it
    bundle: pb.TokenizerBundle
    guides: Guides | None  # None: the tokenizer is of a kind that no grammar goes with
    stores: Stores  # for KV beyond the pool
    certificates: Certificates | None = None  # None: it speaks to its peers without TLS
    tokens: Tokens | None = None  # None: nobody has to prove anything


def load(settings: Settings, progress: Progress = unheard) -> Loaded:
    """Loads the model and warms it up. ValueError or OSError say what is wrong with it."""
    _check_transport(settings)
    certificates = None
    if settings.tls_dir is not None and settings.tls_cluster is not None:
        certificates = Certificates(settings.tls_dir, settings.tls_cluster)
    tokens = None if settings.token_file is None else Tokens(settings.token_file)
    shared: list[SharedMemory] = []

    def pool_memory(size: int) -> mmap.mmap:
        shared.append(SharedMemory(size))
        return shared[0].mapping

    runner = Runner(
        settings.model,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        kv_cache_tokens=settings.kv_cache_tokens,
        kv_cache_fraction=settings.kv_cache_fraction,
        max_model_tokens=settings.max_model_tokens,
        threads=settings.threads,
        layer_group=1,  # the finest: KV leaves evenly, and an abandoned step ends soon
        draft_model_dir=settings.draft_model if settings.imports else "",
        pool_memory=pool_memory if "shm" in kv_settings(settings).transports else None,
        progress=progress,
    )
    _check_locked_memory(settings, runner.kv_buffer.nbytes)
    short = short_of_kv(runner.max_model_tokens, runner.num_blocks * settings.block_tokens)
    if short:
        log.warning("%s", short)
    progress("warm-up", 0, 0)
    runner.warmup()
    log.info(
        "attention=%s prefill_tokens_per_s=%.0f", runner.attention, runner.prefill_tokens_per_s
    )
    if runner.draft is not None:
        log.info("draft_model=%s price=%.3f", settings.draft_model, runner.draft.price)
    bundle = make_bundle(settings.model)
    guides, stores = _guides(bundle, runner), _stores(settings, runner.layout)
    pool = shared[0] if shared else None
    return Loaded(runner, pool, bundle, guides, stores, certificates, tokens)


def _drafter(runner: Runner) -> Callable[[list[int]], Drafter]:
    if runner.draft is None:
        return PromptLookup
    return partial(ModelGuesses, making=runner.draft.price)


def _stores(settings: Settings, layout: KvLayout) -> Stores:
    """ValueError when a store wouldn't hold one block, or not be had; OSError by the disk."""
    stores, size = Stores(), layout.block_bytes
    disk_size = disk_slot_bytes(size)
    for name, given, least in (
        ("host", settings.kv_host_bytes, size),
        ("disk", settings.kv_disk_bytes, disk_size),
    ):
        if 0 < given < least:
            raise ValueError(
                f"{_STORES[name]} is {given} bytes, and one KV block takes {least}; "
                f"write more, or leave it out"
            )
    if settings.kv_host_bytes:
        free = free_host_bytes()
        if settings.kv_host_bytes > free:
            raise ValueError(
                f"{_STORES['host']} is {settings.kv_host_bytes >> 20} MiB, and {free >> 20} MiB "
                f"of memory are free; give the worker more, or write less"
            )
        stores.host = HostSlots(settings.kv_host_bytes // size, size)
    if settings.kv_disk_bytes:
        folder, slots = Path(settings.kv_disk_folder), settings.kv_disk_bytes // disk_size
        _check_disk(folder, settings.kv_disk_bytes)
        stores.disk = DiskSlots(folder, slots, size, layout.layout_hash)
    return stores


def _check_disk(folder: Path, wanted: int) -> None:
    """ValueError when the disk could never hold so much. What is kept there already counts as
    room: it's of these bytes."""
    at = next((one for one in (folder, *folder.parents) if one.is_dir()), Path("/"))
    kept = sum(one.stat().st_blocks * 512 for one in folder.glob("*") if one.is_file())
    free = shutil.disk_usage(at).free + kept
    if wanted > free:
        raise ValueError(
            f"{_STORES['disk']} is {wanted >> 20} MiB, and {free >> 20} MiB are free on the disk "
            f"of {folder}; give it a larger one, or write less"
        )


def _guides(bundle: pb.TokenizerBundle, runner: Runner) -> Guides | None:
    try:
        return Guides(bundle.tokenizer_json, runner.vocab_size, bundle.eos_token_ids)
    except ValueError as error:
        log.warning("requests with a grammar are refused: its tokenizer can't be used: %s", error)
        return None


def _patience_s_per_token(runner: Runner) -> float:
    speed = runner.prefill_tokens_per_s
    return _PATIENCE / speed if speed > 0 else 0.0


def _auto(settings: Settings) -> tuple[str, ...]:
    """What `auto` may take. Pods share no memory: shm is for processes of one machine, as
    its backend tells by its hosts file. Without RDMA nixl would be a slower tcp; and as its
    reads know neither TLS nor quantization, whoever wants those doesn't get it unasked."""
    if os.environ.get("PD_HOSTS_FILE"):
        return "shm", "tcp"
    plain = settings.tls_dir is None and settings.kv_quantization == "none"
    if plain and agents.rdma_device() and not agents.missing():
        return "nixl", "tcp"
    return ("tcp",)


def _check_transport(settings: Settings) -> None:
    """ValueError when the transport that was asked for by name can't be had."""
    if settings.kv_transport != "nixl":
        return
    if missing := agents.missing():
        raise ValueError(f"--kv-transport=nixl: {missing}")
    if settings.tls_dir is not None:
        log.warning("KV goes by nixl, as asked for: what it reads is not encrypted")


def kv_settings(settings: Settings) -> KvSettings:
    """The plane's settings that a worker's flags decide."""
    return KvSettings(
        imports=ImportLimits(lease_s=settings.kv_lease_s),
        kv_rate_limit_bytes_s=settings.kv_rate_limit,
        quantization=settings.kv_quantization,
        transport=settings.kv_transport,
        auto=_auto(settings),
    )


def _check_locked_memory(settings: Settings, pool_bytes: int) -> None:
    """RDMA locks the pool into memory, as far as the process may. ValueError when nixl was
    asked for by name and can't; `auto` takes tcp then."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = limit == resource.RLIM_INFINITY or limit >= pool_bytes
    if enough or not agents.rdma_device() or "nixl" not in kv_settings(settings).transports:
        return
    problem = (
        f"RDMA locks the KV pool's {pool_bytes >> 20} MiB into memory, and {limit >> 20} MiB "
        f"may be locked: raise the container runtime's limit (RLIMIT_MEMLOCK, ulimit -l)"
    )
    if settings.kv_transport == "nixl":
        raise ValueError(f"--kv-transport=nixl: {problem}")
    log.warning("KV goes by tcp: %s", problem)


class Worker:
    """A running worker. Made in the event loop."""

    def __init__(self, settings: Settings, loaded: Loaded, epoch: str) -> None:
        self._settings = settings
        self._loaded = loaded
        self._epoch = epoch
        runner = loaded.runner
        metrics = Metrics(settings.served_name, settings.role, settings.worker_name)
        scheduler = Scheduler(
            SchedulerConfig(
                max_batch_tokens=settings.max_batch_tokens,
                chunk_tokens=settings.chunk_tokens,
                max_running=settings.max_running,
                max_queued=settings.max_queued,
                max_model_tokens=runner.max_model_tokens,
                recompute_max_tokens=_RECOMPUTE_MAX_TOKENS,
                draft_tokens=settings.draft_tokens,
                draft_price=runner.draft_price,
                draft_price_per_token=runner.draft_price_per_token,
                patience_s_per_token=_patience_s_per_token(runner),
            ),
            BlockPool(runner.num_blocks, settings.block_tokens),
            _drafter(runner),
        )
        metrics.follow(scheduler.load)
        self.core = EngineCore(settings, scheduler, runner, metrics)
        self.core.intake.guides = loaded.guides
        self._server: grpc.aio.Server | None = None
        self._announcer: Announcer | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._archiving: asyncio.Task[None] | None = None

    def _archive(self, memory: KvMemory) -> Archive | None:
        settings, stores = self._settings, self._loaded.stores
        policy = Policy(settings.kv_ttl_s, settings.kv_idle_share)
        if stores.host is None and policy == Policy():
            return None
        core, speed = self.core, self._loaded.runner.prefill_tokens_per_s
        return Archive(core.scheduler, memory, policy, stores, core.metrics, speed)

    async def start(self, health: Health) -> None:
        """Binds the ports, then announces itself. OSError when a port is taken."""
        settings, runner = self._settings, self._loaded.runner
        memory = KvMemory(runner.kv_buffer, runner.layout)
        archive = self.core.intake.archive = self._archive(memory)
        if archive is not None:
            self._archiving = asyncio.create_task(archive.run())
        plane = KvPlane(
            runner.layout,
            memory,
            settings.worker_name,
            self._epoch,
            self.core.callbacks,
            kv_settings(settings),
            pool_fd=self._loaded.pool.fd if self._loaded.pool is not None else None,
            certificates=self._loaded.certificates,
            tokens=self._loaded.tokens,
        )
        self.core.kv_address = await plane.start(settings.host, settings.kv_port)
        self.core.plane = plane
        self._server, port = await server.serve(
            self.core,
            self._epoch,
            settings.host,
            settings.work_port,
            self._loaded.certificates,
            self._loaded.tokens,
        )
        health.core = self.core
        self._announcer = Announcer(
            self.core,
            health,
            self._hello(port),
            self._loaded.bundle,
            settings.routers,
            self._loaded.certificates,
            self._loaded.tokens,
        )
        self._announcing = asyncio.create_task(self._announcer.run())

    async def drain(self, timeout_s: float) -> bool:
        """As the core's; routers are told at once."""
        draining = asyncio.create_task(self.core.drain(timeout_s))
        await asyncio.sleep(0)  # it has begun
        if self._announcer is not None:
            await self._announcer.tell_draining(_TELL_S)
        return await draining

    async def stop(self) -> None:
        """Closes streams and ports; what is pending on the streams is still written."""
        await self.core.stop()
        if self._server is not None:
            await self._server.stop(_STREAMS_CLOSE_S)
        for task in (self._announcing, self._archiving):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self.core.plane is not None:
            await self.core.plane.close()
        if self.core.intake.archive is not None:
            await self.core.intake.archive.flush(_FLUSH_S)
            self.core.intake.archive.close()

    def _hello(self, work_port: int) -> pb.Hello:
        settings, runner = self._settings, self._loaded.runner
        layout = runner.layout
        return pb.Hello(
            worker=settings.worker_name,
            epoch=self._epoch,
            role=_ROLES[settings.role],
            work_address=f"{settings.host}:{work_port}",
            kv_address=self.core.kv_address if settings.imports else "",
            transports=kv_settings(settings).transports,
            model=settings.served_name,
            model_hash=layout.model_hash,
            kv_format=wire.kv_format(layout),
            layout_hash=layout.layout_hash,
            capacity=pb.Capacity(
                kv_blocks=runner.num_blocks,
                max_model_tokens=runner.max_model_tokens,
                max_running=settings.max_running,
                max_queued=settings.max_queued,
            ),
            bundle_hash=self._loaded.bundle.bundle_hash,
            revision=settings.revision,
            prefill_tokens_per_s=runner.prefill_tokens_per_s,
            product=runner.product,
            shares_prefixes=self.core.sharing.exact,
        )
