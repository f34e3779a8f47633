"""Which requests there are, what blocks each holds, and how all of it is given back. Pure."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from pd_core.work import pairs
from pd_engine.blocks import BlockPool
from pd_engine.sequence import Sequence, Stage, Task
from pd_engine.types import Batch, Load, RequestKey, Row

_BY_RANK, _BY_TURN = attrgetter("rank"), attrgetter("turn")


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Blocks of a chain of hashes for who has its KV elsewhere. Those in `missing`, by place,
    have no content yet; nobody else writes them or takes them away."""

    hashes: tuple[bytes, ...]
    blocks: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Incoming:
    """A prefix that another worker sends a copy of: what of it was here, and what is written."""

    hashes: tuple[bytes, ...]
    prefix: list[int]
    granted: list[int]


class Holdings:
    """The scheduler's books. A sequence is waiting, running or granted, never two of these.

    What a step may read or write keeps its owner until the step ends, whatever happens to
    the request meanwhile: see `free`.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.tasks: dict[RequestKey, Task] = {}
        self.waiting: list[Sequence] = []  # by turn; they hold nothing
        self.running: list[Sequence] = []  # by rank; they have blocks and compute
        self.granted: dict[RequestKey, Sequence] = {}  # their KV is on the way
        self.exports: dict[RequestKey, list[int]] = {}  # computed, pinned for a transfer
        self.quarantine: dict[RequestKey, list[int]] = {}
        self.incoming: dict[RequestKey, Incoming] = {}
        self.loans: set[Loan] = set()
        self.flight: Batch | None = None
        self.steps: list[tuple[Sequence, Row]] = []  # of the batch in flight
        self.keys: dict[int, RequestKey] = {}  # of the batch in flight, by seq_id
        self._deferred: list[int] = []

    def knows(self, key: RequestKey) -> bool:
        return any(key in one for one in (self.tasks, self.exports, self.quarantine, self.incoming))

    def wait(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_BY_TURN)

    def run(self, seq: Sequence) -> None:
        insort(self.running, seq, key=_BY_RANK)

    # ---- the batch in flight ---------------------------------------------------------

    def take_off(self, batch: Batch, steps: list[tuple[Sequence, Row]]) -> None:
        self.flight, self.steps = batch, steps
        self.keys = {seq.id: seq.task.req.key for seq, _ in steps}

    def land(self, batch: Batch) -> list[tuple[Sequence, Row]]:
        """The step has ended: what was let go of meanwhile can have a new owner."""
        if self.flight is not batch:
            raise AssertionError(f"step {batch.step} isn't the one in flight")
        self.flight = None
        self.release_deferred()
        return self.steps

    def defer(self, blocks: list[int]) -> None:
        """These blocks keep one owner until the batch in flight, or in the making, has ended."""
        self._deferred += blocks

    def release_deferred(self) -> None:
        blocks, self._deferred = self._deferred, []
        self.pool.release(blocks)

    # ---- KV that comes back from elsewhere -------------------------------------------

    def lend(self, hashes: tuple[bytes, ...], tokens: int) -> Loan | None:
        """Blocks for the start of a request of so many tokens, or None where there's no room
        for all of it beside those that run."""
        pool = self.pool
        found = [pool.match_prefix((key,)) for key in hashes]
        missing = tuple(place for place, block in enumerate(found) if not block)
        more = pool.blocks_for(tokens) - len(hashes)
        if len(missing) + more > pool.available - len(self.running):
            pool.release([block for held in found for block in held])
            return None
        for place, block in zip(missing, pool.allocate(len(missing)), strict=True):
            found[place] = [block]
        loan = Loan(hashes, tuple(block for held in found for block in held), missing)
        self.loans.add(loan)
        return loan

    def repay(self, loan: Loan) -> None:
        """What was filled and registered stays in the cache, the rest is free."""
        self.loans.remove(loan)
        self.pool.release(loan.blocks)

    # ---- giving back -----------------------------------------------------------------

    def free(self, seq: Sequence) -> None:
        """A sequence lets go of its blocks; while a step runs they aren't given to others."""
        blocks = seq.table + seq.spare
        seq.forget()
        if self.flight is None:
            self.pool.release(blocks)
        else:
            self.defer(blocks)

    def retire(self, seq: Sequence) -> bool:
        """One choice has ended; True when it was the request's last one."""
        self.running.remove(seq)
        self.free(seq)
        seq.task.sequences.remove(seq)
        if seq.task.sequences:
            return False
        self.close(seq.task)
        return True

    def end(self, task: Task, quarantine: bool = False) -> None:
        """A request gives back all that it holds, wherever it is."""
        granted = self.granted.pop(task.req.key, None)
        if granted is not None:
            self._give_back_grant(granted, quarantine)
        for seq in task.sequences:
            for line in (self.running, self.waiting):
                if seq in line:
                    line.remove(seq)
            self.free(seq)
        self.close(task)

    def close(self, task: Task) -> None:
        """The request is over; its blocks are given back, or pinned as an export."""
        task.stage = Stage.OVER
        task.sequences = []
        del self.tasks[task.req.key]

    def _give_back_grant(self, seq: Sequence, quarantine: bool) -> None:
        prefix, own = seq.table[: seq.task.prefix_blocks], seq.table[seq.task.prefix_blocks :]
        own += seq.spare
        seq.forget()
        self.pool.release(prefix)
        if quarantine:
            self.pool.quarantine(own)
            self.quarantine[seq.task.req.key] = own
        else:
            self.pool.revoke(own)

    def release_export(self, key: RequestKey) -> None:
        task = self.tasks.get(key)
        if task is not None and task.exports:
            self.end(task)
        self.pool.release(self.exports.pop(key, []))

    def release_quarantine(self, key: RequestKey) -> None:
        self.pool.unquarantine(self.quarantine.pop(key, []))

    # ---- questions -------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Anybody waits for anything, or holds anything."""
        moving = self.exports or self.quarantine or self.incoming or self.loans
        return bool(self.tasks or self.flight or moving)

    def decoding(self) -> tuple[bool, float | None]:
        """Whether sequences decode, and how far apart their tokens may be, in seconds."""
        tasks = [seq.task for seq in self.running if seq.pending == 1]
        gaps = [task.req.tpot_s for task in tasks if task.req.tpot_s > 0]
        return bool(tasks), min(gaps, default=None)

    def load(self) -> Load:
        counts = self.pool.counts()
        grants = sum(seq.awaits_grant for seq in self.waiting)
        prompts = [seq for seq in self.waiting if not seq.awaits_grant]
        prompts += [seq for seq in self.running if seq.pending > 1]
        return Load(
            queued=len(self.waiting) - grants,
            running=len(self.running),
            waiting_grants=grants,
            pending_tokens=sum(seq.pending for seq in prompts),
            pending_pairs=int(sum(pairs(seq.pending, seq.computed) for seq in prompts)),
            kv_blocks=counts.total,
            kv_free=counts.free,
            kv_cached=counts.cached,
            kv_active=counts.active,
            kv_granted=counts.granted,
            kv_quarantined=counts.quarantined,
        )

    def check(self) -> None:
        """Raises AssertionError unless the books agree with the pool, block by block."""
        self.pool.check(self._owned())
        for line, key in ((self.waiting, _BY_TURN), (self.running, _BY_RANK)):
            if line != sorted(line, key=key):
                raise AssertionError("a queue is out of order")
        here = {*self.waiting, *self.running, *self.granted.values()}
        if len(here) != len(self.waiting) + len(self.running) + len(self.granted):
            raise AssertionError("a sequence is at two places")
        if here != {seq for task in self.tasks.values() for seq in task.sequences}:
            raise AssertionError("a sequence without a request, or the reverse")

    def _owned(self) -> Iterator[int]:
        yield from self._deferred
        for seq in (*self.waiting, *self.running):
            yield from seq.table
            yield from seq.spare
        for seq in self.granted.values():
            yield from seq.table[: seq.task.prefix_blocks]
        for blocks in self.exports.values():
            yield from blocks
        for incoming in self.incoming.values():
            yield from incoming.prefix
        for loan in self.loans:
            yield from loan.blocks
