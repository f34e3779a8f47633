"""A world for the scheduler's tests: a paged memory, a model, transfers, and clients that check.

The model's KV at a position is a hash of all tokens up to it, computed from the KV before it
as the block table finds it in the memory. A drawn token is a hash of all of that. So wrong,
stale, foreign or missing KV anywhere gives a wrong token, and each token is checked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_core.failures import Failure, FailureKind, RequestFailure
from pd_core.kv import prefix_hashes
from pd_engine.blocks import BlockPool
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.speculate import Drafter
from pd_engine.types import (
    Advanced,
    Batch,
    Finish,
    Finished,
    Granted,
    Mode,
    Prefilled,
    Request,
    RequestFailed,
    RequestKey,
    Row,
    Sampled,
    Sampling,
    SchedulerEvent,
    StepOutput,
    TokenOut,
    Tokens,
)

VOCAB = 13
GARBAGE = -1
LATE = -2


def kv_of(before: int, token: int) -> int:
    return hash((before, token))


def draw(kv: Sequence[int], choice: int) -> int:
    return hash((tuple(kv), choice)) % VOCAB


class Reference:
    """What the model writes for one choice, computed without any batch or pool."""

    def __init__(self, tokens: Sequence[int], choice: int) -> None:
        self.tokens = list(tokens)
        self._choice = choice
        self._kv: list[int] = []

    def kv(self, length: int) -> list[int]:
        while len(self._kv) < length:
            position = len(self._kv)
            self._kv.append(kv_of(self._kv[-1] if position else 0, self[position]))
        return self._kv[:length]

    def __getitem__(self, position: int) -> int:
        while len(self.tokens) <= position:
            self.tokens.append(draw(self.kv(len(self.tokens)), self._choice))
        return self.tokens[position]


@dataclass
class Client:
    """One request as its client sees it; checks each event."""

    req: Request
    limit: int  # tokens that its sequences may reach
    indices: dict[int, int] = field(default_factory=dict)  # of the last token, by choice
    finish: dict[int, Finish] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)  # positions of the prompt
    first: tuple[TokenOut, ...] | None = None
    cached_tokens: int | None = None
    grant: Granted | None = None
    received: int = 0  # blocks of the grant that have arrived, in order
    table: list[int] = field(default_factory=list)  # an EXPORT's blocks
    advanced: int = 0
    over: bool = False  # nothing may come any more
    failure: Failure | None = None
    refs: dict[int, Reference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.refs = {c: Reference(self.req.token_ids, c) for c in self.req.choices}
        self.indices = dict.fromkeys(self.req.choices, self.req.first_index - 1)

    def kv(self, length: int) -> list[int]:
        """The right KV of the first positions of token_ids."""
        return self.refs[self.req.choices[0]].kv(length)

    def expected(self, choice: int, index: int) -> TokenOut:
        sampling = self.req.sampling
        position = self.req.prompt_tokens + index
        token = self.refs[choice][position]
        finish = None
        if index + 1 >= sampling.max_tokens or position + 1 >= self.limit:
            finish = Finish.LENGTH
        if token in sampling.stop_token_ids and not sampling.ignore_eos:
            finish = Finish.STOP if index >= sampling.min_tokens else finish
        return TokenOut(choice, index, token, finish)

    def take(self, outs: Sequence[TokenOut]) -> None:
        for out in outs:
            assert out.choice not in self.finish, "a token after the end"
            assert out == self.expected(out.choice, self.indices[out.choice] + 1)
            self.indices[out.choice] = out.index
            if out.finish is not None:
                self.finish[out.choice] = out.finish

    def see(self, event: SchedulerEvent) -> None:
        assert not self.over, f"{event} after the end"
        match event:
            case Granted():
                assert self.req.mode is Mode.IMPORT
                assert self.grant is None
                self.grant = event
            case Advanced(computed_tokens=computed):
                assert self.req.mode is Mode.EXPORT
                assert self.advanced <= computed <= len(self.req.token_ids)
                self.advanced = computed
            case Prefilled(first=first, cached_tokens=cached):
                assert self.req.mode is not Mode.IMPORT
                assert self.first is None
                assert tuple(out.choice for out in first) == self.req.choices
                assert cached + len(self.computed) <= self.req.prompt_tokens
                self.first, self.cached_tokens = first, cached
                self.take(first)
            case Tokens(tokens=tokens):
                assert self.first is not None
                assert self.req.mode is not Mode.EXPORT
                self.take(tokens)
            case Finished():
                assert self.finish.keys() == set(self.req.choices)
                self.over = True
            case RequestFailed(failure=failure):
                self.over, self.failure = True, failure


class Guesses(Drafter):
    """A drafter that knows the model, and guesses wrong now and then: that, and all that it
    says of other choices than the first."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._noted = len(tokens)

    def note(self) -> None:
        self._noted += 1

    def draft(self, most: int, sequences: int, _price: float) -> list[int]:
        assert self._noted == len(self.tokens), "a token that it wasn't told of"
        assert sequences >= 1
        assert most >= 0
        known = Reference(self.tokens, 0)
        start, guesses = len(self.tokens), list[int]()
        for position in range(start, start + most):
            token = known[position]
            guesses.append(token if hash((position, token)) % 4 else (token + 1) % VOCAB)
        return guesses

    def wants(self, most: int, _sequences: int, _price: float) -> int:
        return min(most, len(self.tokens) % 4)

    def offer(self, guesses: Sequence[int]) -> None:
        assert list(guesses) == proposals(self.tokens, len(guesses)), "made for other tokens"


def proposals(tokens: Sequence[int], count: int) -> list[int]:
    """What the draft model of these tests says behind these tokens."""
    return [hash((*tokens, number)) % VOCAB for number in range(count)]


class World:
    """Scheduler, memory and clients. Each `check` is cheap enough to follow each action."""

    def __init__(self, cfg: SchedulerConfig, num_blocks: int, block_tokens: int) -> None:
        self.cfg = cfg
        self.now = 100.0
        self.pool = BlockPool(num_blocks, block_tokens)
        self.scheduler = Scheduler(cfg, self.pool, Guesses)
        self.memory = [[GARBAGE] * block_tokens for _ in range(num_blocks)]
        self.clients: dict[RequestKey, Client] = {}
        self.batch: Batch | None = None
        self.output: StepOutput | None = None
        self.quarantined: dict[RequestKey, list[int]] = {}
        self.told_prefixes: set[bytes] = set()
        self.hashed: dict[bytes, list[int]] = {}  # the right content of a cached block
        self.steps = 0

    # ---- clients -------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int],
        *,
        mode: Mode = Mode.LOCAL,
        max_tokens: int = 4,
        choices: Sequence[int] = (0,),
        priority: int = 0,
        resumed: int = 0,
        deadline: float = math.inf,
        grant_deadline: float = math.inf,
        stop: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        salt: bytes = b"",
        tpot_s: float = 0.0,
    ) -> Client | Failure:
        """`resumed`: so many tokens of the (only) choice have been emitted elsewhere."""
        prompt, number = list(tokens), len(self.clients)
        reference = Reference(prompt, choices[0])
        for position in range(len(prompt), len(prompt) + resumed):
            reference[position]
        req = Request(
            key=(1, number),
            request_id=f"r{number}",
            attempt=1,
            token_ids=tuple(reference.tokens),
            prompt_tokens=len(prompt),
            choices=tuple(choices),
            sampling=Sampling(
                max_tokens=max_tokens,
                stop_token_ids=tuple(stop),
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
            ),
            mode=mode,
            deadline=deadline,
            grant_deadline=grant_deadline,
            priority=priority,
            cache_salt=salt,
            tpot_s=tpot_s,
        )
        try:
            self.scheduler.add(req, self.now)
        except RequestFailure as refusal:
            return refusal.failure
        limit = self.cfg.max_model_tokens
        if mode is not Mode.EXPORT:
            limit = min(limit, self.pool.tokens + 1)
        client = self.clients[req.key] = Client(req, limit)
        return client

    def cancel(self, client: Client, quarantine: bool = False) -> None:
        waiting = client.grant is not None and client.first is None and not client.over
        self.scheduler.cancel(client.req.key, self.now, quarantine=quarantine)
        client.over = True
        if quarantine and waiting:
            self._quarantine(client)

    def _quarantine(self, client: Client) -> None:
        assert client.grant is not None
        self.quarantined[client.req.key] = [
            *client.grant.block_ids[client.grant.prefix_blocks :],
        ]

    def see(self, events: Sequence[SchedulerEvent]) -> None:
        for event in events:
            client = self.clients[event.key]
            late = isinstance(event, RequestFailed) and event.failure.kind is FailureKind.DEADLINE
            if late and self.transferring(client):
                self._quarantine(client)  # the scheduler did by itself
            client.see(event)
            if isinstance(event, Granted):
                for block in event.block_ids[event.prefix_blocks :]:
                    self.memory[block] = [GARBAGE] * self.pool.block_tokens

    # ---- transfers -----------------------------------------------------------------

    def transferring(self, client: Client) -> bool:
        return client.grant is not None and client.first is None and not client.over

    def receive(self, client: Client, blocks: int) -> None:
        """So many more of the granted blocks arrive. Before that they hold garbage."""
        assert client.grant is not None
        own = client.grant.block_ids[client.grant.prefix_blocks :]
        for block in own[client.received : client.received + blocks]:
            self.memory[block] = self._sent(client, own.index(block))
            client.received += 1

    def _sent(self, client: Client, index: int) -> list[int]:
        """What arrives for one of the granted blocks."""
        assert client.grant is not None
        size = self.pool.block_tokens
        start = (client.grant.prefix_blocks + index) * size
        right = client.kv(len(client.req.token_ids))[start : start + size]
        return right + [GARBAGE] * (size - len(right))

    def attach(self, client: Client) -> None:
        assert client.grant is not None
        self.receive(client, len(client.grant.block_ids))
        index = client.req.first_index
        first = tuple(client.expected(choice, index) for choice in client.req.choices)
        client.take(first)
        client.first = first
        self.see(self.scheduler.attach(client.req.key, first, self.now))

    def late_bytes(self) -> None:
        """What is in quarantine is still being written."""
        for blocks in self.quarantined.values():
            for block in blocks:
                self.memory[block] = [LATE] * self.pool.block_tokens

    def release_quarantine(self, key: RequestKey) -> None:
        del self.quarantined[key]
        self.scheduler.release_quarantine(key)

    def exported(self) -> list[Client]:
        """EXPORTs whose blocks must stay: computing, or waiting for their release."""
        return [
            client
            for client in self.clients.values()
            if client.req.mode is Mode.EXPORT and not client.over and client.table
        ]

    def release_export(self, client: Client) -> None:
        self.scheduler.release_export(client.req.key)
        client.over = True

    # ---- steps ---------------------------------------------------------------------

    def poll(self) -> None:
        self.see(self.scheduler.poll(self.now))

    def begin_step(self, early: bool = False) -> bool:
        """False when there's nothing to do. `early`: the model works at once, else at the end."""
        self.poll()
        self.batch = self.scheduler.schedule(self.now)
        while self.batch is None:
            events = self.scheduler.take_events()
            if not events:
                return False
            self.see(events)  # somebody ended, so others may go on
            self.poll()
            self.batch = self.scheduler.schedule(self.now)
        self._check_batch(self.batch)
        self.output = self._compute(self.batch) if early else None
        return True

    def end_step(self) -> None:
        assert self.batch is not None
        batch, output = self.batch, self.output or self._compute(self.batch)
        self.batch = self.output = None
        self.see(self.scheduler.absorb(batch, output, self.now))
        self.steps += 1

    def fail_step(self) -> None:
        assert self.batch is not None
        batch, self.batch, self.output = self.batch, None, None
        failure = Failure(FailureKind.STEP_FAILED, "injected")
        self.see(self.scheduler.fail_batch(batch, failure, self.now))

    def step(self) -> bool:
        if not self.begin_step():
            return False
        self.end_step()
        self.check()
        return True

    def _check_batch(self, batch: Batch) -> None:
        sizes = [len(row.token_ids) for row in batch.rows]
        assert sizes
        assert min(sizes) >= 1
        if self.cfg.chunk_tokens:
            assert sum(sizes) <= self.cfg.max_batch_tokens
            assert max(sizes) <= max(1 + self.cfg.draft_tokens, self.cfg.chunk_tokens)
        else:  # one prompt may be larger than the budget
            assert sum(sizes) - max(sizes) <= self.cfg.max_batch_tokens
        assert len({row.seq_id for row in batch.rows}) == len(sizes)
        for row in batch.rows:
            key = self.scheduler.key_of(row.seq_id)
            assert key is not None
            client = self.clients[key]
            if client.req.mode is Mode.EXPORT:
                client.table = list(row.block_table)

    def _compute(self, batch: Batch) -> StepOutput:
        size = self.pool.block_tokens
        for source, destination in batch.copies:
            self.memory[destination] = list(self.memory[source])
        written: set[tuple[int, int]] = set()
        drawn: dict[int, tuple[Sampled, ...]] = {}
        for row in batch.rows:
            kv = [
                self.memory[row.block_table[position // size]][position % size]
                for position in range(row.start)
            ]
            key = self.scheduler.key_of(row.seq_id)
            assert key is not None
            for offset, token in enumerate(row.token_ids):
                position = row.start + offset
                kv.append(kv_of(kv[-1] if kv else 0, token))
                place = (row.block_table[position // size], position % size)
                assert place not in written, "two rows write one place"
                written.add(place)
                self.memory[place[0]][place[1]] = kv[-1]
                if position < self.clients[key].req.prompt_tokens:
                    self.clients[key].computed.add(position)
            known = len(kv) - row.drafts
            if row.samples:
                drawn[row.seq_id] = tuple(
                    Sampled(spec.choice, draw(kv[: known + (i if row.drafts else 0)], spec.choice))
                    for i, spec in enumerate(row.samples)
                )
        behind = {
            row.seq_id: proposals(self._text_behind(row, drawn[row.seq_id]), row.proposals)
            for row in batch.rows
            if row.proposals
        }
        return StepOutput(drawn, behind)

    def _text_behind(self, row: Row, drawn: tuple[Sampled, ...]) -> list[int]:
        """All tokens of a row's sequence once the step is over."""
        text = list(row.text)
        known = len(row.token_ids) - row.drafts
        for sampled, guess in zip(drawn, (*row.token_ids[known:], None), strict=True):
            text.append(sampled.token)
            if sampled.token != guess:
                break
        room = len(row.block_table) * self.pool.block_tokens
        assert row.start + len(row.token_ids) + row.proposals <= room, "no room for guesses"
        return text

    # ---- invariants ----------------------------------------------------------------

    def check(self) -> None:
        self.late_bytes()
        self.scheduler.check()
        load = self.scheduler.load()
        states = (load.kv_free, load.kv_cached, load.kv_active, load.kv_granted)
        assert sum(states) + load.kv_quarantined == load.kv_blocks == self.pool.num_blocks
        changes = self.scheduler.take_prefix_changes()
        assert not set(changes.gained) & self.told_prefixes
        assert set(changes.lost) <= self.told_prefixes
        self.told_prefixes = (self.told_prefixes - set(changes.lost)) | set(changes.gained)
        assert self.told_prefixes == set(self.scheduler.prefixes())
        self._check_cache()
        for client in self.exported():
            self._check_export(client)
        for client in self.clients.values():
            if self.transferring(client):
                self._check_import(client)

    def _check_cache(self) -> None:
        """Each block in the prefix cache holds exactly what its hash promises."""
        size = self.pool.block_tokens
        for key, block in self.pool._block_of.items():
            if key not in self.hashed:
                self._hash_clients()
            assert self.memory[block] == self.hashed[key], f"block {block} isn't what it says"
        assert all(len(content) == size for content in self.hashed.values())

    def _hash_clients(self) -> None:
        size = self.pool.block_tokens
        for client in self.clients.values():
            for choice, reference in client.refs.items():
                length = max(
                    len(client.req.token_ids),
                    client.req.prompt_tokens + client.indices[choice] + 1,
                )
                kv = reference.kv(length)
                tokens = reference.tokens[:length]
                salt = client.req.cache_salt
                for i, key in enumerate(prefix_hashes(tokens, size, salt)):
                    self.hashed[key] = kv[i * size : (i + 1) * size]

    def _check_export(self, client: Client) -> None:
        size = self.pool.block_tokens
        for position, kv in enumerate(client.kv(client.advanced)):
            assert self.memory[client.table[position // size]][position % size] == kv

    def _check_import(self, client: Client) -> None:
        """Nobody else writes what was granted, and the prefix stays."""
        assert client.grant is not None
        for index, block in enumerate(client.grant.block_ids[client.grant.prefix_blocks :]):
            arrived = index < client.received
            untouched = [GARBAGE] * self.pool.block_tokens
            assert self.memory[block] == (self._sent(client, index) if arrived else untouched)
        size = self.pool.block_tokens
        prefix = client.kv(client.grant.prefix_blocks * size)
        for position, kv in enumerate(prefix):
            assert self.memory[client.grant.block_ids[position // size]][position % size] == kv

    def finish(self) -> None:
        """Nothing new comes: all must end, and give everything back, in bounded time."""
        bound = 50 + sum(
            len(c.req.choices) * (len(c.req.token_ids) + c.req.sampling.max_tokens)
            for c in self.clients.values()
        )
        for _ in range(50 * bound):
            if not self._finish_once():
                break
        assert not self.scheduler.busy
        for client in self.clients.values():
            assert client.over, f"{client.req} never ended"
        counts = self.pool.counts()
        assert (counts.active, counts.granted, counts.quarantined) == (0, 0, 0)

    def _finish_once(self) -> bool:
        """One round of what goes on without new requests; False when nothing was left."""
        moved = self.batch is not None or self.begin_step()
        if self.batch is not None:
            self.end_step()
        for client in list(self.clients.values()):
            if self.transferring(client):
                self.attach(client)
                moved = True
        for client in self.exported():
            if client.first is not None:
                self.release_export(client)
                moved = True
        for key in list(self.quarantined):
            self.release_quarantine(key)
            moved = True
        self.check()
        return moved
