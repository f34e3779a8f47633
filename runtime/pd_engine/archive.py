"""KV that outlives its place in the pool: copies in host memory, and behind that on disk.

Every block that joins the prefix cache is copied to host memory, a few at a time beside the
steps, so the pool evicts without a thought. What is about to leave host memory is written to
disk first; all of it is when the worker drains. A request whose prefix is kept here waits
while it's read into the pool, where reading is faster than computing it again, by what both
have taken so far. Whoever owns a block, its hash says whose prefix it is: content-addressed,
salted by tenant, and checked when it comes from disk.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pd_core.kv import prefix_hashes
from pd_engine.holdings import Loan
from pd_engine.kv.memory import KvMemory
from pd_engine.kv.slots import Corrupt, DiskSlots, HostSlots
from pd_engine.metrics import Metrics
from pd_engine.scheduler import Scheduler
from pd_engine.shelf import Shelf
from pd_engine.types import Mode, PrefixChanges, Request

log = logging.getLogger("pd_engine.archive")

HOST, DISK = "host", "disk"

_PASS_BYTES = 4 << 20  # copied in one go: the event loop has other work
_PASS_PAUSE_S = 0.005
_POLL_S = 0.05
_AFTER_FAILURE_S = 1.0
_CLEAN_SHARE = 0.25  # of host memory, that could leave at once since it's on disk too
_SPILLED_A_PASS = 8  # blocks: then it is looked whether there is more to save
_READ_DEADLINE_S = 30.0
_SPEEDS = {HOST: 4e9, DISK: 1e9}  # bytes/s, until they've been measured
_LATEST_COUNTS = 0.3
_SECOND_CHANCE = 1.05  # a store that was slow is tried again after some time


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept. `ttl_s` since the last use, on every level; `idle_share` of the pool's
    blocks may be nobody's. Looked at every `tidy_s`."""

    ttl_s: float = float("inf")
    idle_share: float = 1.0
    tidy_s: float = 1.0


@dataclass(slots=True)
class Stores:
    """What there is beyond the pool. A disk is filled from host memory, and needs it."""

    host: HostSlots | None = None
    disk: DiskSlots | None = None


Slots = TypeVar("Slots", HostSlots, DiskSlots)


@dataclass(frozen=True, slots=True)
class _Store(Generic[Slots]):
    """Slots, and whose they are."""

    slots: Slots
    shelf: Shelf


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a block comes back from: a slot that nobody takes away meanwhile."""

    place: int
    store: str
    slot: int


@dataclass(slots=True, eq=False)
class Refill:
    """A request's prefix on its way back: for each missing place of the loan, its source."""

    loan: Loan
    sources: tuple[str, ...]
    of: str  # the request, as the log names it
    reading: bool = False  # the thread may write the loan's blocks
    over: bool = False  # nobody waits for it any more


@dataclass(slots=True)
class _Read:
    """What the thread did: the places that are filled, bytes and seconds by source."""

    good: list[int] = field(default_factory=list)
    corrupt: list[bytes] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    took_s: dict[str, float] = field(default_factory=dict)


class Archive:
    """Made and called in the event loop; only file and memory work runs in its thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: KvMemory,
        policy: Policy,
        stores: Stores,
        metrics: Metrics,
        prefill_tokens_per_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._policy = policy
        host, disk = stores.host, stores.disk
        if disk is not None and host is None:
            raise ValueError("a disk for KV without host memory to fill it from")
        self._host = _Store(host, Shelf(host.slots)) if host is not None else None
        self._disk = _Store(disk, Shelf(disk.slots)) if disk is not None else None
        self._metrics = metrics
        self._prefill_tokens_per_s = max(prefill_tokens_per_s, 1e-9)
        self._speeds = dict(_SPEEDS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="archive")
        self._told: set[bytes] = set()
        self._touched: dict[bytes, None] = {}
        self._broken = False  # the disk's last write failed
        if self._disk is not None:
            self._find(self._disk)
        metrics.follow_kept(self.kept)

    def _find(self, disk: _Store[DiskSlots]) -> None:
        now, shelf = time.monotonic(), disk.shelf
        for found in sorted(disk.slots.scan(), key=lambda one: -one.age_s):
            if found.key in shelf or found.age_s > self._policy.ttl_s:
                disk.slots.erase(found.slot)
                continue
            shelf.restore(found.slot, found.key, now - found.age_s)
            self._touched[found.key] = None
        log.info("disk=%s kept_blocks=%d of %d", disk.slots.path, len(shelf), shelf.slots)

    @property
    def _shelves(self) -> dict[str, Shelf]:
        """By store, where there is one; what is read fastest comes first."""
        stores = {HOST: self._host, DISK: self._disk}
        return {name: store.shelf for name, store in stores.items() if store is not None}

    def kept(self) -> dict[str, int]:
        """Blocks by store."""
        return {name: len(shelf) for name, shelf in self._shelves.items()}

    def __contains__(self, key: bytes) -> bool:
        return self._where(key) is not None

    def _where(self, key: bytes) -> str | None:
        return next((name for name, shelf in self._shelves.items() if key in shelf), None)

    # ---- what routers are told -----------------------------------------------------------

    def prefixes(self) -> tuple[bytes, ...]:
        """All hashes here or in the pool."""
        everything = dict.fromkeys(self._scheduler.prefixes())
        for shelf in self._shelves.values():
            everything |= dict.fromkeys(shelf)
        return tuple(everything)

    def take_prefix_changes(self) -> PrefixChanges:
        """As the scheduler's: here and the pool taken as one."""
        changes = self._scheduler.take_prefix_changes()
        touched, self._touched = self._touched, {}
        touched |= dict.fromkeys(changes.gained) | dict.fromkeys(changes.lost)
        held = {key for key in touched if self._in_pool(key) or key in self}
        gained = tuple(key for key in touched if key in held and key not in self._told)
        lost = tuple(key for key in touched if key not in held and key in self._told)
        self._told.update(gained)
        self._told.difference_update(lost)
        return PrefixChanges(gained, lost)

    def _in_pool(self, key: bytes) -> bool:
        return self._scheduler.pool.block_of(key) is not None

    # ---- copies go out -------------------------------------------------------------------

    async def run(self) -> None:
        """Copies and tidies up until cancelled."""
        tidied = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                self._save_some(now)
                if now - tidied >= self._policy.tidy_s:
                    tidied = now
                    self._tidy(now)
                    await self._look_for_the_file()
                await self._spill(now)
            except Exception:
                log.exception("keeping KV failed; it goes on")
                self._metrics.archive_failure(HOST)
                await asyncio.sleep(_AFTER_FAILURE_S)
            await asyncio.sleep(_PASS_PAUSE_S if self._scheduler.pool.fresh else _POLL_S)

    def _save_some(self, now: float) -> None:
        """From the pool to host memory. In the event loop: nothing else can evict meanwhile."""
        fresh = self._scheduler.pool.fresh
        if self._host is None:
            fresh.clear()
            return
        left = max(1, _PASS_BYTES // self._memory.layout.block_bytes)
        while fresh and left and not self._would_lose(self._host.shelf):
            key = fresh.popleft()
            block = self._scheduler.pool.block_of(key)
            if key in self._host.shelf:
                self._host.shelf.touch(key, now)
            elif block is not None and self._save(self._host, key, block, now):
                left -= 1

    def _would_lose(self, on_host: Shelf) -> bool:
        """Host memory is full of what isn't on disk yet, and will be."""
        if self._disk is None or self._broken or on_host.room:
            return False
        gone = on_host.next_to_leave()
        return gone is not None and gone not in self._disk.shelf

    def _save(self, host: _Store[HostSlots], key: bytes, block: int, now: float) -> bool:
        reserved = host.shelf.reserve()
        if reserved is None:
            return False
        slot, gone = reserved
        layers = self._memory.layout.layers
        host.slots.view(slot)[:] = self._memory.slices([block], 0, layers)[0]
        host.shelf.commit(slot, key, now)
        self._note(key, gone)
        return True

    def _note(self, *keys: bytes | None) -> None:
        self._touched.update((key, None) for key in keys if key is not None)

    def _tidy(self, now: float) -> None:
        """What is too old, or too much, leaves."""
        pool = self._scheduler.pool
        before = now - self._policy.ttl_s
        if not pool.fresh:  # else it is about to be copied
            pool.evict_cached(before, int(self._policy.idle_share * pool.num_blocks))
        if self._host is not None:
            for key in self._host.shelf.expired(before):
                self._host.shelf.drop(key)
                self._note(key)
        if self._disk is not None:
            for key in self._disk.shelf.expired(before):
                self._forget(self._disk, key)

    def _forget(self, disk: _Store[DiskSlots], key: bytes) -> None:
        """A block leaves the disk, unless it's read right now."""
        slot = disk.shelf.drop(key) if key in disk.shelf else None
        self._note(key)
        if slot is not None:  # whatever is written there next waits in the same thread
            self._thread.submit(disk.slots.erase, slot).add_done_callback(_erased)

    async def _look_for_the_file(self) -> None:
        """A disk's file that somebody deleted is made again; what was in it is lost."""
        if self._disk is None:
            return
        slots, loop = self._disk.slots, asyncio.get_running_loop()
        # In the thread, in turn with reads: those that have begun end with the old file.
        if not await loop.run_in_executor(self._thread, lambda: slots.gone):
            return
        lost = self._lose(self._disk)
        if lost or not self._broken:
            self._metrics.archive_failure(DISK)
            log.error("%s was deleted, and %d blocks of KV with it", slots.path, lost)
        try:
            await loop.run_in_executor(self._thread, slots.remake)
        except OSError as error:
            if not self._broken:
                log.error("KV can't be kept on disk, and isn't until it can: %s", error)
            self._broken = True
            return
        self._lose(self._disk)  # what was being read before
        self._broken = False
        log.info("%s is made again", slots.path)

    def _lose(self, disk: _Store[DiskSlots]) -> int:
        """Forgets what is on disk, but for what is read right now; how much that was."""
        had = list(disk.shelf)
        for key in had:
            disk.shelf.drop(key)
        self._note(*had)
        return len(had)

    async def _spill(self, now: float) -> None:
        """Writes what will leave host memory next to disk, a few blocks."""
        if self._host is None or self._disk is None:
            return
        host, disk = self._host.shelf, self._disk.shelf
        clean, left = host.room, _SPILLED_A_PASS
        enough = max(1, int(_CLEAN_SHARE * host.slots))
        for key in list(host) if clean < enough else ():
            if clean >= enough or not left:
                return
            if key in disk:
                clean += 1
            elif key in host:
                left -= 1
                if not await self._write(self._host, self._disk, key, now):
                    return
                clean += 1

    async def _write(
        self, host: _Store[HostSlots], disk: _Store[DiskSlots], key: bytes, now: float
    ) -> bool:
        """One block from host memory to disk."""
        reserved = disk.shelf.reserve()
        if reserved is None:
            return False
        slot, gone = reserved
        self._note(gone)
        view = host.slots.view(host.shelf.pin(key, None))
        loop = asyncio.get_running_loop()
        # A cancelled call leaves both slots as they are: the thread may still be at it.
        try:
            await loop.run_in_executor(self._thread, disk.slots.write, slot, key, view)
        except OSError as error:
            host.shelf.unpin(key)
            disk.shelf.abandon(slot)
            if isinstance(error, FileNotFoundError):
                await self._look_for_the_file()
                return False
            self._metrics.archive_failure(DISK)
            if not self._broken:
                log.error("KV can't be kept on disk, and isn't until it can: %s", error)
            self._broken = True
            return False
        host.shelf.unpin(key)
        disk.shelf.commit(slot, key, now)
        self._note(key)
        self._broken = False
        return True

    async def flush(self, within_s: float) -> None:
        """Before the end: what is in host memory alone goes to disk, used last first."""
        if self._host is None or self._disk is None:
            return
        await self._look_for_the_file()
        until = time.monotonic() + within_s
        pool = self._scheduler.pool
        while pool.fresh and (now := time.monotonic()) < until:
            self._save_some(now)
            await self._spill(now)
        on_host, on_disk = self._host.shelf, self._disk.shelf
        missing = [key for key in reversed(list(on_host)) if key not in on_disk]
        for done, key in enumerate(missing):
            now = time.monotonic()
            if now >= until or not await self._write(self._host, self._disk, key, now):
                log.warning("%d blocks of KV weren't written to disk", len(missing) - done)
                return
        log.info("flushed_blocks=%d to disk", len(missing))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        for store in (self._host, self._disk):
            if store is not None:
                store.slots.close()

    # ---- and come back -------------------------------------------------------------------

    def hashes(self, request: Request) -> tuple[bytes, ...]:
        """Of the whole blocks that a request may find: all but the token that is computed."""
        size = self._scheduler.pool.block_tokens
        end = len(request.token_ids) - (request.mode is not Mode.IMPORT)
        return tuple(prefix_hashes(request.token_ids[:end], size, request.cache_salt))

    def find(self, hashes: tuple[bytes, ...], tokens: int, of: str) -> Refill | None:
        """What to bring back for a request that begins with these blocks, which the log names
        `of`; None where that's nothing, where it wouldn't pay, or where there's no room."""
        sources: list[str] = []
        end = 0  # behind the last one that isn't in the pool
        for place, key in enumerate(hashes):
            if self._in_pool(key):
                continue
            source = self._where(key)
            if source is None or not self._pays(source):
                break
            sources.append(source)
            end = place + 1
        loan = self._scheduler.lend(hashes[:end], tokens) if sources else None
        return None if loan is None else Refill(loan, tuple(sources), of)

    def _pays(self, source: str) -> bool:
        layout = self._memory.layout
        read_s = layout.block_bytes / self._speeds[source]
        if read_s < layout.block_tokens / self._prefill_tokens_per_s:
            return True
        self._metrics.archive_declined(source)
        self._speeds[source] *= _SECOND_CHANCE
        return False

    async def bring(self, refill: Refill) -> None:
        """Reads it into the pool, where the request finds it then. Never raises for what is
        wrong with a store: then less comes back. After it, or when it was cancelled, `repay`."""
        now, loan, pinned = time.monotonic(), refill.loan, list[_Source]()
        for place, store in zip(loan.missing, refill.sources, strict=True):
            shelf, key = self._shelves[store], loan.hashes[place]
            if key not in shelf:  # it left between two turns of the loop
                break
            pinned.append(_Source(place, store, shelf.pin(key, now)))
        loop = asyncio.get_running_loop()
        refill.reading = True
        read = loop.run_in_executor(self._thread, self._read, loan, pinned)
        read.add_done_callback(lambda done: self._landed(refill, pinned, done))
        try:
            await asyncio.wait_for(asyncio.shield(read), _READ_DEADLINE_S)
        except TimeoutError:
            log.error("KV didn't come back within %.0f s; computing it", _READ_DEADLINE_S)

    def _read(self, loan: Loan, sources: Sequence[_Source]) -> _Read:
        """In the thread. Ends at the first block that can't be had: a prefix has no holes."""
        done = _Read()
        layers = self._memory.layout.layers
        for one in sources:
            key, began = loan.hashes[one.place], time.monotonic()
            target = self._memory.slices([loan.blocks[one.place]], 0, layers)[0]
            try:
                self._copy(one, key, target)
            except (Corrupt, OSError) as error:
                log.warning("kept KV is dropped: %s", error)
                done.corrupt.append(key)
                break
            done.good.append(one.place)
            done.moved[one.store] = done.moved.get(one.store, 0) + target.nbytes
            took_s = time.monotonic() - began
            done.took_s[one.store] = done.took_s.get(one.store, 0.0) + took_s
        return done

    def _copy(self, source: _Source, key: bytes, target: memoryview) -> None:
        if source.store == DISK and self._disk is not None:
            self._disk.slots.read(source.slot, key, target)
        elif source.store == HOST and self._host is not None:
            target[:] = self._host.slots.view(source.slot)
        else:
            raise AssertionError(f"there is no {source.store}")

    def _landed(
        self, refill: Refill, sources: Sequence[_Source], read: "asyncio.Future[_Read]"
    ) -> None:
        """The thread touches the blocks no more: what is good joins the cache."""
        loan, done = refill.loan, read.result()
        for one in sources:
            self._shelves[one.store].unpin(loan.hashes[one.place])
        for place in done.good:
            self._scheduler.pool.register(loan.blocks[place], loan.hashes[place])
        for key in done.corrupt:
            self._metrics.archive_failure(DISK)
            if self._disk is not None:
                self._forget(self._disk, key)
        for store, size in done.moved.items():
            self._learn(store, size, done.took_s[store], refill.of)
        refill.reading = False
        if refill.over:
            self._scheduler.repay(loan)

    def _learn(self, store: str, size: int, took_s: float, of: str) -> None:
        """How fast it is, and what came of it."""
        layout = self._memory.layout
        speed = size / max(took_s, 1e-9)
        self._speeds[store] += _LATEST_COUNTS * (speed - self._speeds[store])
        tokens = size // layout.block_bytes * layout.block_tokens
        self._metrics.restored(store, tokens, took_s)
        log.info(
            "restored request=%s tokens=%d from=%s seconds=%.4f; computing them takes about %.4f",
            of,
            tokens,
            store,
            took_s,
            tokens / self._prefill_tokens_per_s,
        )

    def repay(self, refill: Refill) -> None:
        """The request has been added, or is gone: the loan ends when nothing writes it."""
        refill.over = True
        if not refill.reading:
            self._scheduler.repay(refill.loan)


def _erased(done: "Future[None]") -> None:
    error = done.exception()
    if error is not None:
        log.error("expired KV couldn't be erased from disk: %s", error)
