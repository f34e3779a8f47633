"""One worker process of a world: the engine's own core, scheduler, KV plane, server and
announcer, on a model that checks what it reads."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

from pd_core.kv import KvLayout
from pd_engine import server
from pd_engine.announce import Announcer
from pd_engine.blocks import BlockPool
from pd_engine.core import EngineCore
from pd_engine.imports import Accept, Imports, ImportStats, Reject
from pd_engine.kv.channels import ChannelSettings
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.plane import KvPlane, KvSettings
from pd_engine.kv.receiver import ReceiverSettings
from pd_engine.limits import SchedulerConfig
from pd_engine.scheduler import Scheduler
from pd_engine.settings import parse
from pd_engine.transfer import ExportLimits, ImportLimits, PushHead, TransferId
from pd_engine.types import RequestKey, TokenOut
from pd_engine.wire import kv_format
from pd_proto.v1 import engine_pb2 as pb
from tests.simulation.loop import Clock, VirtualLoop
from tests.simulation.model import LAYOUT, Guesses, SimRunner, fingerprints
from tests.simulation.plan import Plan, blocks_by_hash

LEASE_S = 6.0
_ORPHANED_S = 3.0
_KEPT_S = 11.0  # the longest wait at either end, and some
_ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "both": pb.ROLE_BOTH}


class Wrong(AssertionError):
    """An invariant does not hold. Kept in a list: product code that catches what its
    callbacks raise must not hide it."""

    found: ClassVar[list[str]] = []

    def __init__(self, text: str) -> None:
        super().__init__(text)
        Wrong.found.append(text)


class NoMetrics:
    """Metrics that count nothing: a registry for each process would take longer than it runs."""

    busy_s = 0.0
    computed_tokens = 0
    computed_pairs = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class WatchedImports:
    """Looks over the shoulder of a plane's Imports: what is received where, for whom."""

    def __init__(self, imports: Imports, pool: BlockPool) -> None:
        self.receiving: dict[int, tuple[int, ...]] = {}  # connection -> pool blocks
        self._ids: dict[bytes, Any] = {}  # of open grants
        self._pool = pool
        open_, begin, end = imports.open, imports.push_begin, imports.push_end

        def watched_open(key: RequestKey, grant: bytes, id: Any, **more: Any) -> None:
            self._ids[grant] = id
            open_(key, grant, id, **more)

        def watched_begin(
            conn: int, head: PushHead, now: float, sender: KvLayout | None = None
        ) -> Accept | Reject:
            begun = begin(conn, head, now, sender)
            if isinstance(begun, Accept):
                if self._ids.get(head.grant) != head.id:
                    raise Wrong(f"a push of {head.id} was taken for {self._ids.get(head.grant)}")
                self.receiving[conn] = begun.block_ids
                self.check()
            return begun

        def watched_end(conn: int, checksum: int | None, now: float, misfit: str = "") -> Any:
            self.check()
            self.receiving.pop(conn, None)
            return end(conn, checksum, now, misfit)

        imports.open = watched_open
        imports.push_begin = watched_begin
        imports.push_end = watched_end

    def check(self) -> None:
        """Nothing is received into blocks that aren't set aside for it."""
        if not self.receiving:
            return
        set_aside = self._pool._granted | self._pool._quarantined
        for conn, blocks in self.receiving.items():
            if not set_aside.issuperset(blocks):
                raise Wrong(f"connection {conn} receives into {blocks}, which others may have")


class WatchedCore(EngineCore):
    """A core that looks at what it is handed."""

    counted: Callable[[], None] = lambda: None

    def on_committed(
        self, key: RequestKey, first: tuple[TokenOut, ...], stats: ImportStats
    ) -> None:
        if key in self._live and key in self.scheduler._held.granted:
            seq = self.scheduler._held.granted[key]
            runner = self._runner
            assert isinstance(runner, SimRunner)
            if not runner.holds(seq.table, fingerprints(seq.tokens)):
                raise Wrong(f"{seq.task.req.request_id}: committed with KV that is not P's")
            self.counted()
        super().on_committed(key, first, stats)


class Worker:
    """A process from its start to its crash."""

    def __init__(self, plan: Plan, name: str, number: int, clock: Clock, random: Random) -> None:
        self.name = name
        self.role = plan.hosts[name]
        self.epoch = f"{name}/{number}"
        self.stopping = False
        self._plan = plan
        self._clock = clock
        self._random = random
        self.loop = VirtualLoop(clock, name, self._run_step)
        self.layout = replace(LAYOUT, block_tokens=plan.block_tokens[self.role])
        self.pool = BlockPool(plan.blocks[self.role], self.layout.block_tokens)
        self.runner = SimRunner(
            self.pool.num_blocks, random.getrandbits(32), self._check_write, self.layout
        )
        self.core: EngineCore | None = None
        self.imports: WatchedImports | None = None

        self.on_committed: Callable[[], None] = lambda: None
        self._orphans: dict[RequestKey, float] = {}
        self._given: dict[TransferId, float] = {}

    def start(self) -> None:
        self.loop.create_task(self._main())

    async def _main(self) -> None:
        plan, name = self._plan, self.name
        base = f"--role {self.role} --model x --served-name m --worker-name {name} --host {name}"
        settings = parse([*base.split(), f"--kv-lease-s={LEASE_S}", f"--routers={ROUTER}:7000"])
        config = SchedulerConfig(
            max_batch_tokens=32,
            chunk_tokens=plan.chunk_tokens,
            max_running=plan.max_running,
            max_queued=32,
            max_model_tokens=400,
            recompute_max_tokens=self._random.choice((0, 400)),
            decode_reserve_tokens=self._random.choice((1, 256)),
            draft_tokens=plan.draft_tokens,
        )
        scheduler = Scheduler(config, self.pool, Guesses)
        if plan.pulls:
            self._watch_copies(scheduler)
        metrics: Any = NoMetrics()
        core = WatchedCore(settings, scheduler, self.runner, metrics)
        core.counted = self.on_committed
        plane = KvPlane(
            self.layout,
            KvMemory(self.runner.kv_buffer, self.layout),
            name,
            self.epoch,
            core.callbacks,
            _kv_settings(plan),
            self._clock.monotonic,
        )
        self.imports = WatchedImports(plane._imports, self.pool)
        core.kv_address = await plane.start(name, 7002)
        core.plane = plane
        await server.serve(core, self.epoch, name, 7001)
        health: Any = SimpleNamespace(registered=False)
        announcer = Announcer(
            core, health, self._hello(core), pb.TokenizerBundle(), settings.routers
        )
        self.core = core
        await asyncio.gather(core.run(), announcer.run())

    def _hello(self, core: EngineCore) -> pb.Hello:
        return pb.Hello(
            worker=self.name,
            epoch=self.epoch,
            role=_ROLES[self.role],
            work_address=f"{self.name}:7001",
            kv_address=core.kv_address,
            transports=["tcp"],
            model="m",
            model_hash=self.layout.model_hash,
            kv_format=kv_format(self.layout),
            layout_hash=self.layout.layout_hash,
            shares_prefixes=True,
            capacity=pb.Capacity(
                kv_blocks=self.pool.num_blocks, max_model_tokens=400, max_running=8, max_queued=32
            ),
        )

    def _run_step(self, loop: VirtualLoop, func: Any, args: tuple[Any, ...]) -> Any:
        """A step takes its time; what it reads and writes happens at one moment of that."""
        random = self._random
        future = loop.create_future()
        took_s = random.uniform(0.001, 0.02)
        if self._plan.slow_steps and random.random() < 0.1:
            took_s = random.uniform(0.2, 1.5)
        outcome: list[Any] = []

        def compute() -> None:
            try:
                outcome.extend((func(*args), None))
            except Wrong:
                raise
            except Exception as error:
                outcome.extend((None, error))

        def land() -> None:
            result, error = outcome
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        loop.call_later(took_s * random.random(), compute)
        loop.call_later(took_s, land)
        return future

    # ---- judgement -----------------------------------------------------------------------

    def _watch_copies(self, scheduler: Scheduler) -> None:
        """What joins the prefix cache as a copy is what its hashes say."""
        right = blocks_by_hash(self._plan, self.layout.block_tokens)
        attach = scheduler.copies.attach

        def watched(key: RequestKey) -> None:
            names = scheduler._held.incoming[key].hashes
            attach(key)
            for name in names:
                block = self.pool.block_of(name)
                if block is None or not self.runner.holds([block], right[name]):
                    raise Wrong(f"{self.name}: a copy of another prefix, or of none, is kept")

        scheduler.copies.attach = watched

    def _check_write(self, block: int) -> None:
        owners = self.pool._owners[block]
        if owners != 1:
            raise Wrong(f"{self.name}: a step writes block {block}, which has {owners} owners")

    def check(self) -> None:
        """Every block is in one state, with the owners that it should have."""
        if self.core is None:
            return
        self.core.scheduler.check()
        assert self.imports is not None
        self.imports.check()
        self._check_copies(self.core)
        gone = {k for k in self.core.scheduler._held.tasks if k[0] not in self.core._streams}
        self._orphans = {k: self._orphans.get(k, self._clock.now) for k in gone}
        for key, since in self._orphans.items():
            if self._clock.now - since > _ORPHANED_S:
                raise Wrong(f"{self.name}: request {key} lives on without its router")

    def _check_copies(self, core: EngineCore) -> None:
        """What is read for another worker keeps an owner until it has been read."""
        assert core.plane is not None
        for key, export in core.plane._exports._open.items():
            if key in core.sharing and not all(self.pool._owners[b] for b in export.block_ids):
                raise Wrong(f"{self.name}: a copy is read from blocks that others may have")

    def check_leases(self, ended_at: Callable[[str], float | None], awake_since: float) -> None:
        """What was set aside for a transfer doesn't outlive its request by more than a lease."""
        plane = self.core.plane if self.core is not None else None
        if plane is None:
            return
        for held in (*plane._imports._by_key.values(), *plane._exports._open.values()):
            # A cancel that was lost (as gRPC loses none) leaves it waiting for room first.
            given_at = self._given.setdefault(held.id, self._clock.now)
            since = ended_at(held.id.request)
            if since is None:
                continue
            kept_s = self._clock.now - max(since, awake_since, given_at)
            if kept_s > _KEPT_S:
                raise Wrong(f"{self.name}: {held.id.request} ended {kept_s:.0f} s ago")

    def busy(self) -> str:
        """What it holds though nobody wants anything any more; empty when all came free."""
        core = self.core
        if core is None or core.plane is None:
            return ""
        load = core.scheduler.load()
        held = {
            "requests": len(core._live),
            "imports": core.plane.open_imports,
            "exports": core.plane.open_exports,
            "copies": int(core.sharing.busy),
            "active": load.kv_active,
            "granted": load.kv_granted,
            "quarantined": load.kv_quarantined,
            "receives": len(self.imports.receiving) if self.imports else 0,
        }
        return ", ".join(f"{count} {what}" for what, count in held.items() if count)

    def serves(self, request_id: str) -> bool:
        """Whether it still does anything for a request."""
        if self.core is None:
            return False
        return any(t.req.request_id == request_id for t in self.core.scheduler._held.tasks.values())


ROUTER = "router"


def _kv_settings(plan: Plan) -> KvSettings:
    """All waits are short, so that a world's end doesn't take long."""
    return KvSettings(
        imports=ImportLimits(
            lease_s=LEASE_S, first_frame_s=8.0, next_frame_s=5.0, payload_s=2.0, seal_s=4.0
        ),
        exports=ExportLimits(send_s=2.0, verdict_s=4.0, frame_bytes=plan.frame_bytes),
        receiver=ReceiverSettings(handshake_s=2.0, reply_s=2.0, idle_s=20.0, linger_s=0.5),
        channels=ChannelSettings(connect_s=2.0, abort_s=0.2, idle_s=5.0),
        tick_s=0.5,
        transport="tcp",
    )
