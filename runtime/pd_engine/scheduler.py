"""Continuous batching: which tokens of which requests a step computes, in which blocks. Pure.

A step is `schedule` (a Batch or None), the model's work, then `absorb` or `fail_batch`; at
most one batch is in flight. Everything else may be called at any time, also meanwhile.

Order. Prompts are admitted and computed by priority (larger first), then by when they are
due (`limits.due`): a short one ahead of a long one that came a little earlier. Admission is
in strict order: nobody who needs little room overtakes one whose turn it is and who needs
much. One exception: an IMPORT, which needs blocks but no computing, is granted ahead of
others as long as it takes nothing that those before it need. Once admitted, sequences are
ranked by priority, then by arrival. A preempted sequence keeps its turn and its rank.

Room. A LOCAL or EXPORT request gets the blocks of all its tokens when it's admitted, an
IMPORT also a reserve for decoding; after that decoding grows block by block. A sequence that
finds no block takes those of the last in rank behind it (preemption), or waits where it is
when there's nobody behind it. So the first in rank always moves as long as the pool can hold
it alone: granted, exported and quarantined blocks come back by the leases of their transfers.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_engine.blocks import BlockPool
from pd_engine.copies import Copies
from pd_engine.drafting import plan_tries
from pd_engine.holdings import Holdings, Loan
from pd_engine.limits import SchedulerConfig, due, grant_reserve, token_limit
from pd_engine.sequence import Sequence, Stage, Task, seen_tokens
from pd_engine.speculate import NOTHING, Drafter, PromptLookup, Try
from pd_engine.types import (
    Advanced,
    Batch,
    Finished,
    Granted,
    Guide,
    Load,
    Prefilled,
    PrefixChanges,
    Request,
    RequestFailed,
    RequestKey,
    Row,
    Sampled,
    SchedulerEvent,
    StepOutput,
    TokenOut,
    Tokens,
)

__all__ = ["Scheduler", "SchedulerConfig"]

Copy = tuple[Sequence, int, int]
"""On whose behalf a block is copied, source, destination."""


class Scheduler:
    """Requests in, batches and events out. Not thread-safe."""

    def __init__(
        self,
        cfg: SchedulerConfig,
        pool: BlockPool,
        drafter: Callable[[list[int]], Drafter] = PromptLookup,
    ) -> None:
        """`drafter` guesses for a sequence of these tokens, which will grow."""
        self.cfg = cfg
        self._drafter = drafter
        self.pool = pool
        self.draining = False
        self.last_progress = 0.0  # when a request last got further, or ended
        self._held = Holdings(pool)
        self.copies = Copies(self._held, cfg.max_queued)
        self._events: list[SchedulerEvent] = []
        self._arrivals = 0
        self._sequences = 0
        self._steps = 0

    # ---- requests ------------------------------------------------------------------

    def add(
        self,
        req: Request,
        now: float,
        hashes: Iterable[bytes] = (),
        guide: Guide | None = None,
    ) -> None:
        """Queues a request, or raises RequestFailure. `hashes`, where they're known: of its
        first whole blocks. `guide`: of its grammar, at the grammar's beginning."""
        held = self._held
        if self.draining:
            raise RequestFailure(FailureKind.DRAINING, "this worker is shutting down")
        if held.knows(req.key):
            raise RequestFailure(FailureKind.INVALID_REQUEST, f"request {req.key} exists already")
        limit = token_limit(req, self.cfg, self.pool)
        if len(held.waiting) >= self.cfg.max_queued:
            raise RequestFailure(
                FailureKind.NO_CAPACITY, f"{len(held.waiting)} requests wait on this worker"
            )
        if req.sampling.grammar and guide is None:
            message = "this worker can't keep to a grammar: its log says why"
            raise RequestFailure(FailureKind.INVALID_REQUEST, message)
        if guide is not None:
            for token in req.token_ids[req.prompt_tokens :]:
                guide.note(token)
        self._arrivals += 1
        task = Task(req, now, limit, due(req, self.cfg, now))
        rank = (-req.priority, self._arrivals, 0)
        tokens = list(req.token_ids)
        seen = seen_tokens(req)
        seq = Sequence(
            self._new_id(), task, rank, req.choices, tokens, seen, list(hashes), guide=guide
        )
        task.sequences.append(seq)
        held.tasks[req.key] = task
        held.wait(seq)

    def cancel(self, key: RequestKey, now: float, quarantine: bool = False) -> None:
        """Ends a request; no event of it comes any more. Unknown keys have ended already.

        `quarantine`: a transfer may still write an IMPORT's granted blocks, so nobody gets
        them before `release_quarantine`.
        """
        task = self._held.tasks.get(key)
        if task is not None:
            self._held.end(task, quarantine)
        self._held.release_export(key)
        self._events = [event for event in self._events if event.key != key]
        self.last_progress = now

    def drain(self) -> None:
        """Takes nothing new from now on; what has been accepted goes on."""
        self.draining = True

    # ---- transfers -----------------------------------------------------------------

    def attach(
        self, key: RequestKey, first: tuple[TokenOut, ...], now: float
    ) -> list[SchedulerEvent]:
        """An IMPORT's KV is complete, and these are its first tokens: it decodes from here."""
        self.last_progress = now
        seq = self._held.granted.get(key)
        if seq is None:  # it has ended meanwhile
            return self.take_events()
        task = seq.task
        wrong = task.wrong_first_tokens(first)
        if wrong is not None:
            self._fail(task, wrong)
            return self.take_events()
        del self._held.granted[key]
        self.pool.activate(seq.table[task.prefix_blocks :])
        self.pool.activate(seq.spare)
        seq.computed = len(seq.tokens)
        self._cache_whole_blocks(seq)
        task.stage, task.prefilled = Stage.ADMITTED, True
        self._fork(seq, first)
        return self.take_events()

    def release_export(self, key: RequestKey) -> None:
        """An EXPORT's transfer is over, well or not: it ends, and its blocks needn't stay."""
        self._held.release_export(key)

    def release_quarantine(self, key: RequestKey) -> None:
        """Nothing writes the blocks of this former IMPORT any more."""
        self._held.release_quarantine(key)

    def lend(self, hashes: tuple[bytes, ...], tokens: int) -> Loan | None:
        """See Holdings.lend; to be repaid when the request that it's for has been added."""
        return self._held.lend(hashes, tokens)

    def repay(self, loan: Loan) -> None:
        self._held.repay(loan)

    # ---- what waits ----------------------------------------------------------------

    def poll(self, now: float) -> list[SchedulerEvent]:
        """Fails what is late and grants IMPORTs. For after each change, before each schedule."""
        self.pool.now = now
        for task in [task for task in self._held.tasks.values() if now >= task.req.deadline]:
            message = f"not done after {now - task.added:.1f} s"
            # An IMPORT's KV may be coming in right now.
            self._fail(task, Failure(FailureKind.DEADLINE, message), quarantine=True)
        imports = [seq for seq in self._held.waiting if seq.awaits_grant]
        if imports:
            self._expire_imports(imports, now)
            self._grant_imports(now)
        return self.take_events()

    def _expire_imports(self, imports: list[Sequence], now: float) -> None:
        for seq in imports:
            task = seq.task
            if now >= task.req.grant_deadline:
                message = (
                    f"no room for {len(seq.tokens)} tokens within {now - task.added:.1f} s:"
                    f" {self.pool.available} of {self.pool.num_blocks} KV blocks are free"
                )
                self._fail(task, Failure(FailureKind.NO_CAPACITY, message))

    def _grant_imports(self, now: float) -> None:
        """In order, as far as nothing is taken that a sequence ahead needs."""
        blocks_ahead = slots_ahead = 0
        for seq in self._held.waiting.copy():
            if blocks_ahead >= self.pool.available:
                return
            if seq.awaits_grant:
                if self._grant(seq, blocks_ahead, slots_ahead, now):
                    continue
                blocks_ahead += grant_reserve(seq, self.cfg, self.pool)
            blocks_ahead += self.pool.blocks_for(len(seq.tokens))
            slots_ahead += seq.slots

    def _grant(self, seq: Sequence, blocks_ahead: int, slots_ahead: int, now: float) -> bool:
        """Sets an IMPORT's blocks aside, or changes nothing."""
        task, pool, held = seq.task, self.pool, self._held
        if not self._has_slot(seq, slots_ahead):
            return False
        whole = len(seq.tokens) // pool.block_tokens
        prefix = pool.match_prefix(seq.hash_blocks(whole, pool.block_tokens))
        missing = pool.blocks_for(len(seq.tokens)) - len(prefix)
        reserve = grant_reserve(seq, self.cfg, pool)
        if missing + reserve > pool.available - self._headroom(seq) - blocks_ahead:
            pool.release(prefix)
            return False
        seq.table = prefix + pool.grant(missing)
        seq.spare = pool.grant(reserve)
        seq.registered = task.prefix_blocks = len(prefix)
        held.waiting.remove(seq)
        held.granted[task.req.key] = seq
        self._note_admission(task, Stage.GRANTED, now)
        self._events.append(
            Granted(task.req.key, tuple(seq.table), len(prefix), wait_s=now - task.added)
        )
        return True

    def _note_admission(self, task: Task, stage: Stage, now: float) -> None:
        task.stage, task.admitted = stage, now
        self.last_progress = now

    def _has_slot(self, seq: Sequence, slots_ahead: int = 0) -> bool:
        """More choices than slots run when nothing else does."""
        used = slots_ahead + sum(other.slots for other in self._held.running)
        used += sum(other.slots for other in self._held.granted.values())
        return used == 0 or used + seq.slots <= self.cfg.max_running

    def _headroom(self, seq: Sequence) -> int:
        """Blocks that stay free for those that run ahead of it: one for each that will grow."""
        return sum(
            other.stalled or other.outgrows(self.pool.block_tokens)
            for other in self._held.running
            if other.rank < seq.rank
        )

    # ---- a step begins -------------------------------------------------------------

    def schedule(self, now: float, prompt_tokens: int | None = None) -> Batch | None:
        """The next step's work, or None. Decoding goes first, then prompts in chunks, as far
        as the configured most leaves them room, and at most `prompt_tokens`.

        What it has to report (a preempted sequence that is too long to compute again) comes
        with the next call that returns events.
        """
        held = self._held
        if held.flight is not None:
            raise AssertionError(f"step {held.flight.step} is still in flight")
        plan, copies = self._plan_decodes()
        tries: dict[int, Try] = {}
        if self.cfg.draft_tokens:
            tries = plan_tries(self.cfg, [seq for seq, _ in plan], self._room_ahead)
        decoded = len(plan) + sum(len(one.guesses) for one in tries.values())
        budget = self.cfg.max_batch_tokens - decoded
        if prompt_tokens is not None:
            budget = min(budget, prompt_tokens)
        plan += self._plan_prompts(self._admit_prompts(budget, now), budget)
        # A request may have failed after its first sequences were planned.
        steps = [
            (seq, seq.row(count, tries.get(seq.id, NOTHING)))
            for seq, count in plan
            if seq.task.stage is not Stage.OVER
        ]
        if not steps:
            held.release_deferred()
            return None
        self._steps += 1
        batch = Batch(
            self._steps,
            tuple(row for _, row in steps),
            tuple((src, dst) for seq, src, dst in copies if seq.task.stage is not Stage.OVER),
        )
        held.take_off(batch, steps)
        return batch

    def _plan_decodes(self) -> tuple[list[tuple[Sequence, int]], list[Copy]]:
        """One token of each sequence that decodes and has, or finds, room for it."""
        plan: list[tuple[Sequence, int]] = []
        copies: list[Copy] = []
        for seq in self._held.running.copy():
            if len(plan) >= self.cfg.max_batch_tokens:
                break
            # Without a table: preempted, or ended, a moment ago.
            if seq.pending == 1 and seq.table and self._make_room(seq, copies):
                plan.append((seq, 1))
        return plan, copies

    def _make_room(self, seq: Sequence, copies: list[Copy]) -> bool:
        """A block of its own for the next token, at the expense of the last in rank."""
        index = seq.computed // self.pool.block_tokens
        while index == len(seq.table) or self.pool.is_shared(seq.table[index]):
            if seq.spare or self.pool.available:
                self._add_block(seq, index, copies)
                continue
            seq.stalled = not self._preempt_behind(seq)
            if seq.stalled or seq.task.stage is Stage.OVER:
                return False
        seq.stalled = False
        return True

    def _add_block(self, seq: Sequence, index: int, copies: list[Copy]) -> None:
        block = seq.spare.pop() if seq.spare else self.pool.allocate(1)[0]
        if index == len(seq.table):
            seq.table.append(block)
            return
        # Copy on write. The step reads the source, which keeps this owner until the step ends.
        shared = seq.table[index]
        seq.table[index] = block
        copies.append((seq, shared, block))
        self._held.defer([shared])

    def _room_ahead(self, seq: Sequence, tokens: int) -> int:
        """Makes room for so many tokens behind the next one, or for as many as there is."""
        size = self.pool.block_tokens
        wanted = self.pool.blocks_for(seq.computed + 1 + tokens)
        while len(seq.table) < wanted:
            if not seq.spare and self.pool.available <= len(self._held.running):
                break
            self._add_block(seq, len(seq.table), [])
        return min(tokens, len(seq.table) * size - seq.computed - 1)

    def _preempt_behind(self, seq: Sequence) -> bool:
        """Takes the blocks of the last in rank behind `seq`; False when there's nobody.

        An EXPORT isn't preempted: its blocks are being sent, and it ends soon.
        """
        for victim in reversed(self._held.running):
            if victim.rank <= seq.rank:
                return False
            if not victim.task.exports:
                self._preempt(victim)
                return True
        return False

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue, to be computed again; if that's too much, back to the router."""
        length, limit = len(seq.tokens), self.cfg.recompute_max_tokens
        if seq.task.prefilled and length > limit:
            message = (
                f"the KV pool is full, and {length} tokens are too many to compute again here"
                f" (at most {limit})"
            )
            self._fail(seq.task, Failure(FailureKind.PREEMPTED, message))
            return
        self._held.running.remove(seq)
        self._held.free(seq)
        self._held.wait(seq)

    def _admit_prompts(self, budget: int, now: float) -> list[Sequence]:
        """Takes waiting prompts in, strictly in order, while the step has tokens for them.

        Not earlier: a prompt that waits may find more of its prefix in the cache. Returns all
        prompts that are being computed, in turn.
        """
        waiting = self._held.waiting
        prompts = [seq for seq in self._held.running if seq.pending > 1]
        prompts.sort(key=attrgetter("turn"))
        tokens_ahead = place = 0
        while waiting:
            seq = waiting[0]
            while place < len(prompts) and prompts[place].turn < seq.turn:
                tokens_ahead += self._chunk(prompts[place])
                place += 1
            if tokens_ahead >= budget or not self._admit(seq, now):
                break
            prompts.insert(place, seq)
        return prompts

    def _admit(self, seq: Sequence, now: float) -> bool:
        """Gives a sequence the blocks of all its tokens, or changes nothing."""
        if seq.awaits_grant or not self._has_slot(seq):  # poll grants when there's room
            return False
        task, pool, length = seq.task, self.pool, len(seq.tokens)
        whole = (length - 1) // pool.block_tokens  # so one token at least is computed
        prefix = pool.match_prefix(seq.hash_blocks(whole, pool.block_tokens))
        missing = pool.blocks_for(length) - len(prefix)
        if missing > pool.available - self._headroom(seq):
            pool.release(prefix)
            return False
        seq.table = prefix + pool.allocate(missing)
        seq.registered = len(prefix)
        seq.computed = len(prefix) * pool.block_tokens
        self._held.waiting.remove(seq)
        self._held.run(seq)
        if task.stage is Stage.WAITING:
            self._note_admission(task, Stage.ADMITTED, now)
            task.cached_tokens = min(seq.computed, task.req.prompt_tokens)
        elif not task.prefilled:  # again, after a preemption: what it computed itself is no hit
            task.cached_tokens = min(seq.computed, task.cached_tokens)
        return True

    def _chunk(self, seq: Sequence) -> int:
        """Tokens of a prompt that a step computes if nothing else is in it."""
        chunk = self.cfg.chunk_tokens
        return min(seq.pending, chunk) if chunk else seq.pending

    def _plan_prompts(self, prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """The next chunks within the budget. Unchunked, the first prompt may exceed it."""
        plan: list[tuple[Sequence, int]] = []
        for seq in prompts:
            count = self._chunk(seq)
            if self.cfg.chunk_tokens:
                count = min(count, budget)
            elif plan and count > budget:
                break
            if count <= 0:
                break
            plan.append((seq, count))
            budget -= count
        return plan

    # ---- a step ends ---------------------------------------------------------------

    def absorb(self, batch: Batch, output: StepOutput, now: float) -> list[SchedulerEvent]:
        """The step in flight has computed its rows and drawn these tokens."""
        self.pool.now = self.last_progress = now
        steps = self._held.land(batch)
        self._fail_undrawn(steps, output)
        tokens: dict[RequestKey, list[list[TokenOut]]] = {}
        ended: list[RequestKey] = []
        for seq, row in steps:
            task = seq.task
            if task.stage is Stage.OVER:
                continue
            if seq.guide is not None and seq.guide.problem:
                self._fail(task, Failure(FailureKind.INVALID_REQUEST, seq.guide.problem))
                continue
            if row.samples and task.prefilled:
                outs = self._later_tokens(seq, row, output.samples[seq.id])
                tokens.setdefault(task.req.key, []).append(outs)
                if outs[-1].finish is None:
                    if seq.drafter is not None and (guesses := output.proposals.get(seq.id)):
                        seq.drafter.offer(guesses)
                elif self._held.retire(seq):
                    ended.append(task.req.key)
                continue
            seq.computed += len(row.token_ids)
            self._cache_whole_blocks(seq)
            if task.exports:
                self._events.append(Advanced(task.req.key, seq.computed))
            if row.samples:
                self._first_tokens(seq, output.samples[seq.id], now)
        self._events += [
            Tokens(key, tuple(chain(*outs)), sum(map(len, outs)) - len(outs))
            for key, outs in tokens.items()
        ]
        self._events += [Finished(key) for key in ended]
        return self.take_events()

    def _later_tokens(self, seq: Sequence, row: Row, drawn: tuple[Sampled, ...]) -> list[TokenOut]:
        """A draw counts as long as all guesses before it were right; so does a guess's KV."""
        known = len(row.token_ids) - row.drafts
        outs: list[TokenOut] = []
        for sampled, guess in zip(drawn, (*row.token_ids[known:], None), strict=True):
            out = seq.task.token_out(seq.choices[0], len(seq.tokens) + 1, sampled)
            outs.append(out)
            if out.finish is not None:
                break
            seq.append(out.token)
            if out.token != guess:
                break
        seq.computed += known + len(outs) - 1
        self._cache_whole_blocks(seq)
        return outs

    def fail_batch(self, batch: Batch, failure: Failure, now: float) -> list[SchedulerEvent]:
        """The step in flight came to nothing: its requests fail, all others go on."""
        self.last_progress = now
        for seq, _ in self._held.land(batch):
            if seq.task.stage is not Stage.OVER:
                self._fail(seq.task, failure)
        return self.take_events()

    def take_events(self) -> list[SchedulerEvent]:
        """What happened since events were last returned."""
        events, self._events = self._events, []
        return events

    def _fail_undrawn(self, steps: list[tuple[Sequence, Row]], output: StepOutput) -> None:
        """A step that drew too little or too much fails those requests, and no others."""
        for seq, row in steps:
            drawn = len(output.samples.get(seq.id, ()))
            if drawn != len(row.samples) and seq.task.stage is not Stage.OVER:
                message = f"a step drew {drawn} tokens where {len(row.samples)} were asked for"
                self._fail(seq.task, Failure(FailureKind.INTERNAL, message))

    def _first_tokens(self, seq: Sequence, drawn: tuple[Sampled, ...], now: float) -> None:
        """The prompt is computed: an EXPORT is done here, the choices of a LOCAL go on."""
        task, key, length = seq.task, seq.task.req.key, len(seq.tokens) + 1
        task.prefilled = True
        first = tuple(
            task.token_out(choice, length, sampled)
            for choice, sampled in zip(seq.choices, drawn, strict=True)
        )
        queue_s, prefill_s = task.admitted - task.added, now - task.admitted
        self._events.append(Prefilled(key, first, task.cached_tokens, queue_s, prefill_s))
        self._held.running.remove(seq)
        if task.exports:
            self._held.exports[key] = seq.table
            self._held.close(task)
        else:
            self._fork(seq, first)

    def _fork(self, leader: Sequence, first: tuple[TokenOut, ...]) -> None:
        """Each choice that goes on becomes a sequence; they share the leader's blocks."""
        task, pool = leader.task, self.pool
        going = [out for out in first if out.finish is None]
        share = -(-len(leader.spare) // max(1, len(going)))
        task.sequences = [leader.fork(self._new_id(), i, out) for i, out in enumerate(going)]
        for place, seq in enumerate(task.sequences):
            pool.share(seq.table)
            seq.spare = leader.spare[place * share : (place + 1) * share]
            if self.cfg.draft_tokens:
                seq.drafter = self._drafter(seq.tokens)
            self._held.run(seq)
        pool.release(leader.table)
        if not going:
            pool.release(leader.spare)
            self._held.close(task)
            self._events.append(Finished(task.req.key))

    def _cache_whole_blocks(self, seq: Sequence) -> None:
        whole = seq.computed // self.pool.block_tokens
        if whole > seq.registered:
            hashes = seq.hash_blocks(whole, self.pool.block_tokens)
            for index in range(seq.registered, whole):
                self.pool.register(seq.table[index], hashes[index])
            seq.registered = whole

    def _fail(self, task: Task, failure: Failure, quarantine: bool = False) -> None:
        self._held.end(task, quarantine)
        self._events.append(RequestFailed(task.req.key, failure))

    def _new_id(self) -> int:
        self._sequences += 1
        return self._sequences

    # ---- questions -----------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Anything is held or waits."""
        return self._held.busy

    def request(self, key: RequestKey) -> Request:
        """KeyError when it has ended."""
        return self._held.tasks[key].req

    def key_of(self, seq_id: int) -> RequestKey | None:
        """Whose row this is in the batch in flight. May be asked in the step's thread."""
        return self._held.keys.get(seq_id)

    def flight_keys(self) -> frozenset[RequestKey]:
        """Whose rows are in the step in flight."""
        return frozenset(self._held.keys.values())

    def prefixes(self) -> tuple[bytes, ...]:
        """All hashes in the prefix cache."""
        return self.pool.prefixes()

    def take_prefix_changes(self) -> PrefixChanges:
        return self.pool.take_prefix_changes()

    def load(self) -> Load:
        return self._held.load()

    def decoding(self) -> tuple[bool, float | None]:
        return self._held.decoding()

    def check(self) -> None:
        """Raises AssertionError unless every block is accounted for."""
        self._held.check()
