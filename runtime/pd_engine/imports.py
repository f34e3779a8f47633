"""The decode worker's side of KV transfers: grants, leases, coverage, quarantine. Pure.

A grant ends in exactly one of two ways: `Committed` (all KV is here, verified), or
`Released` (nothing was attached, and no receive can touch its blocks any more). A
grant that ends while bytes are being received into its blocks is `Quarantined` first;
its `Released` follows when that receive has returned.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvLayout
from pd_engine.transfer import (
    AbortHead,
    Digest,
    DigestFactory,
    ImportLimits,
    KvRange,
    PushHead,
    SealHead,
    TransferId,
    Verdict,
    coverage_record,
    push_bytes,
)
from pd_engine.types import RequestKey, TokenOut

Connection = int
"""Number of an accepted connection, never reused within a process."""


@dataclass(frozen=True, slots=True)
class ImportStats:
    """`transfer_s` is from the first frame's arrival to the verified seal."""

    kv_bytes: int
    transfer_s: float
    cached_tokens: int
    transport: str = ""
    altered: bool = False  # quantized or converted: it isn't what the sender computed


@dataclass(frozen=True, slots=True)
class Accept:
    """Receive the push's payload into these layers of these pool blocks.

    Where the sender's KV looks otherwise, `tokens` of the payload's, from its token
    `skip_tokens` on, become those from token `offset_tokens` of the first block on: the
    blocks hold nothing else that is sent or had already."""

    key: RequestKey
    block_ids: tuple[int, ...]
    layer_start: int
    layer_count: int
    tokens: int
    skip_tokens: int = 0
    offset_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    key: RequestKey
    first: tuple[TokenOut, ...]
    stats: ImportStats
    conn: Connection = 0


@dataclass(frozen=True, slots=True)
class ImportFailed:
    """Comes before the grant's `Released`, unless it was cancelled by its owner."""

    key: RequestKey
    failure: Failure


@dataclass(frozen=True, slots=True)
class Quarantined:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Released:
    key: RequestKey


@dataclass(frozen=True, slots=True)
class Answer:
    """Send the verdict; with `close`, end the connection after it (and the receive that
    is going on there, if one is)."""

    conn: Connection
    verdict: Verdict
    close: bool


ImportAction = Committed | ImportFailed | Quarantined | Released | Answer


@dataclass(frozen=True, slots=True)
class Reject:
    """Take nothing of this push."""

    actions: tuple[ImportAction, ...]


@dataclass(slots=True)
class _Import:
    key: RequestKey
    grant: bytes
    id: TransferId
    block_ids: tuple[int, ...]
    prefix_blocks: int
    choices: tuple[int, ...]
    token_count: int
    lease_until: float
    progress_until: float
    awaited: str
    digest: Digest
    sender: KvLayout  # ours until one has sent something
    first_block: int  # of the sender's blocks
    have: list[int]  # by block from there on: bit l is set when layer l is here
    missing: int  # slices
    conn: Connection | None = None
    pending: PushHead | None = None
    kv_bytes: int = 0
    altered: bool = False
    first_frame_at: float | None = None


class Imports:
    """All grants of a decode worker."""

    def __init__(
        self, layout: KvLayout, digest: DigestFactory, limits: ImportLimits | None = None
    ) -> None:
        self._layout = layout
        self._digest = digest
        self._limits = limits or ImportLimits()
        self._by_key: dict[RequestKey, _Import] = {}
        self._by_grant: dict[bytes, _Import] = {}
        self._receiving: dict[Connection, _Import] = {}  # doomed ones too

    @property
    def open_keys(self) -> tuple[RequestKey, ...]:
        return tuple(self._by_key)

    @property
    def quarantined_count(self) -> int:
        return sum(1 for i in self._receiving.values() if i.key not in self._by_key)

    def begun(self, key: RequestKey) -> bool:
        """Whether a frame has come for it."""
        entry = self._by_key.get(key)
        return entry is not None and entry.first_frame_at is not None

    def open(
        self,
        key: RequestKey,
        grant: bytes,
        id: TransferId,
        *,
        block_ids: tuple[int, ...],
        prefix_blocks: int,
        choices: tuple[int, ...],
        token_count: int,
        now: float,
    ) -> None:
        """Start a lease on `block_ids`, the blocks of the whole prompt of `token_count`
        tokens, of which the first `prefix_blocks` hold valid KV and aren't sent. No choices:
        nothing is drawn behind it, so the seal brings no first tokens."""
        if key in self._by_key or grant in self._by_grant:
            raise ValueError(f"import {key} is open already")
        blocks = self._layout.blocks_for(token_count)
        if token_count < 1 or len(block_ids) != blocks or not 0 <= prefix_blocks <= blocks:
            raise ValueError(
                f"import {key}: {token_count} tokens need {blocks} blocks, got "
                f"{len(block_ids)} of which {prefix_blocks} are a prefix"
            )
        if len(set(choices)) != len(choices):
            raise ValueError(f"import {key}: choices {choices} must be distinct")
        entry = _Import(
            key=key,
            grant=grant,
            id=id,
            block_ids=block_ids,
            prefix_blocks=prefix_blocks,
            choices=choices,
            token_count=token_count,
            lease_until=now + self._limits.lease_s,
            progress_until=now + self._limits.first_frame_s,
            awaited="first frame",
            digest=self._digest(),
            sender=self._layout,
            first_block=prefix_blocks,
            have=[0] * (blocks - prefix_blocks),
            missing=(blocks - prefix_blocks) * self._layout.layers,
        )
        self._by_key[key] = entry
        self._by_grant[grant] = entry

    def push_begin(
        self, conn: Connection, head: PushHead, now: float, sender: KvLayout | None = None
    ) -> Accept | Reject:
        """A push was announced on `conn`, by a sender with KV of a convertible layout (None:
        ours). After Accept its payload is received, and `push_end` must follow, whatever
        happens."""
        if conn in self._receiving:
            raise ValueError(f"connection {conn}: a push within a push")
        entry = self._by_grant.get(head.grant)
        if entry is None:
            return Reject((_unknown(conn, head.grant, head.id),))
        problem = self._stranger(entry, conn, head.id)
        if not problem:
            if entry.conn is None:
                self._expect(entry, sender or self._layout)
            problem = self._misfit(entry, head)
        if problem:
            return Reject(tuple(self._fail_from(entry, conn, problem)))
        entry.conn = conn
        entry.pending = head
        if entry.first_frame_at is None:
            entry.first_frame_at = now
        self._receiving[conn] = entry
        self._progress(entry, "payload", self._limits.payload_s, now)
        return self._accept(entry, head.range)

    def push_progress(self, conn: Connection, now: float) -> None:
        """Another slice of the payload is here."""
        entry = self._receiving.get(conn)
        if entry is not None:
            self._progress(entry, "payload", self._limits.payload_s, now)

    def push_end(
        self, conn: Connection, checksum: int | None, now: float, misfit: str = ""
    ) -> list[ImportAction]:
        """The receive has returned and writes no more. `checksum` is None if it was cut;
        `misfit` says what of its values can't be had in our precision."""
        entry = self._receiving.pop(conn, None)
        if entry is None or entry.pending is None:
            raise ValueError(f"connection {conn}: the end of a push that never began")
        head, entry.pending = entry.pending, None
        if self._by_key.get(entry.key) is not entry:
            return [Released(entry.key)]
        if checksum is None:
            return self._fail(entry, "the connection ended within a frame")
        if checksum != head.checksum:
            return self._fail(
                entry,
                f"checksum of {head.range} is {checksum:016x}, sent as {head.checksum:016x}",
            )
        if misfit:
            failure = Failure(FailureKind.LAYOUT_MISMATCH, f"transfer {entry.id}: {misfit}")
            return self._end(entry, failure, misfit)
        self._mark(entry, head.range)
        entry.kv_bytes += head.payload_bytes
        converted = entry.sender.dtype != self._layout.dtype
        entry.altered = entry.altered or converted or bool(head.quantization)
        entry.digest.update(coverage_record(head.range, head.payload_bytes, checksum))
        if entry.missing:
            self._progress(entry, "next frame", self._limits.next_frame_s, now)
        else:
            self._progress(entry, "seal", self._limits.seal_s, now)
        return []

    def seal(self, conn: Connection, head: SealHead, now: float) -> list[ImportAction]:
        """Commit if all that was promised is here, else fail closed."""
        entry = self._by_grant.get(head.grant)
        if entry is None:
            return [_unknown(conn, head.grant, head.id)]
        problem = self._stranger(entry, conn, head.id) or self._unsealable(entry, head)
        if problem:
            return self._fail_from(entry, conn, problem)
        self._forget(entry)
        started = now if entry.first_frame_at is None else entry.first_frame_at
        took_s, altered = now - started, entry.altered
        stats = ImportStats(entry.kv_bytes, took_s, head.cached_tokens, altered=altered)
        return [
            Committed(entry.key, head.first, stats, conn),
            Answer(conn, Verdict(head.grant, head.id, committed=True), close=False),
        ]

    def abort(self, conn: Connection, head: AbortHead) -> list[ImportAction]:
        """The sender gives up."""
        entry = self._by_grant.get(head.grant)
        if entry is None:
            # A late word on what has ended here: nothing to say about it.
            return []
        problem = self._stranger(entry, conn, head.id)
        if problem:
            return self._fail_from(entry, conn, problem)
        message = f"the prefill worker gave up: {head.reason}"
        entry.conn = None  # the sender needs no verdict on what it aborted itself
        return self._fail(entry, message)

    def connection_closed(self, conn: Connection) -> list[ImportAction]:
        """The connection is gone; a receive on it must have been ended by `push_end`."""
        if conn in self._receiving:
            raise ValueError(f"connection {conn} closed within a push")
        actions: list[ImportAction] = []
        for entry in [i for i in self._by_key.values() if i.conn == conn]:
            entry.conn = None
            actions += self._fail(entry, "the prefill worker's connection ended before the seal")
        return actions

    def renew(self, key: RequestKey, now: float) -> None:
        entry = self._by_key.get(key)
        if entry is not None:
            entry.lease_until = now + self._limits.lease_s

    def cancel(self, key: RequestKey) -> list[ImportAction]:
        """The owner gives the grant up. Nothing happens when it has ended already."""
        entry = self._by_key.get(key)
        return [] if entry is None else self._end(entry, None, "cancelled at the decode worker")

    def tick(self, now: float) -> list[ImportAction]:
        """Expire leases and deadlines. To be called all the time, work or none."""
        actions: list[ImportAction] = []
        for entry in list(self._by_key.values()):
            if now >= entry.lease_until:
                failure = Failure(
                    FailureKind.LEASE_EXPIRED,
                    f"transfer {entry.id}: the lease of {self._limits.lease_s:g} s wasn't renewed",
                )
                actions += self._end(entry, failure, failure.message)
            elif now >= entry.progress_until:
                actions += self._fail(entry, f"the {entry.awaited} didn't come in time")
        return actions

    # ---- checks: each returns what is wrong, or "" ------------------------------

    def _stranger(self, entry: _Import, conn: Connection, id: TransferId) -> str:
        if id != entry.id:
            return f"the grant is for {entry.id}, the frame for {id}"
        if entry.conn is not None and entry.conn != conn:
            return "frames came over two connections"
        return ""

    def _misfit(self, entry: _Import, head: PushHead) -> str:
        r, layers = head.range, self._layout.layers
        if min(r.layer_start, r.block_start) < 0 or min(r.layer_count, r.block_count) < 1:
            return f"{r}: an empty range"
        blocks = entry.sender.blocks_for(entry.token_count)
        if r.layer_end > layers or r.block_end > blocks:
            return f"{r}: outside of {layers} layers x {blocks} blocks"
        if r.block_start < entry.first_block:
            return f"{r}: within the prefix of {entry.first_block} blocks"
        fit = push_bytes(entry.sender, r, head.quantization)
        if fit is None:
            return f"{r}: quantization {head.quantization!r} isn't known here"
        if head.payload_bytes != fit:
            return f"{r}: {head.payload_bytes} bytes announced, {fit} fit"
        bits = _layer_bits(r)
        if any(entry.have[b - entry.first_block] & bits for b in _blocks(r)):
            return f"{r}: sent twice"
        return ""

    def _unsealable(self, entry: _Import, head: SealHead) -> str:
        if entry.pending is not None:
            return "a seal within a push"
        if entry.missing:
            total = len(entry.have) * self._layout.layers
            return f"sealed with {entry.missing} of {total} slices missing"
        if head.token_count != entry.token_count:
            return f"sealed {head.token_count} tokens, {entry.token_count} were granted"
        if head.payload_bytes != entry.kv_bytes:
            return f"sealed {head.payload_bytes} bytes, {entry.kv_bytes} came"
        if head.coverage != entry.digest.intdigest():
            return "the seal's coverage digest differs from what came"
        got = tuple(t.choice for t in head.first)
        if sorted(got) != sorted(entry.choices):
            return f"first tokens for choices {got}, {entry.choices} were granted"
        if head.cached_tokens > head.token_count:
            return f"{head.cached_tokens} cached tokens of {head.token_count}"
        return ""

    # ---- changes ----------------------------------------------------------------

    def _expect(self, entry: _Import, sender: KvLayout) -> None:
        """Its first frame tells whose blocks are counted from now on."""
        prefix_tokens = entry.prefix_blocks * self._layout.block_tokens
        entry.sender = sender
        entry.first_block = sender.first_block(prefix_tokens, entry.token_count)
        wanted = sender.blocks_for(entry.token_count) - entry.first_block
        entry.have = [0] * wanted
        entry.missing = wanted * sender.layers

    def _accept(self, entry: _Import, pushed: KvRange) -> Accept:
        """Where it goes: of its tokens those that are the prompt's and aren't here yet."""
        ours, theirs = self._layout.block_tokens, entry.sender.block_tokens
        start = pushed.block_start * theirs
        first = max(start, entry.prefix_blocks * ours)
        end = min(pushed.block_end * theirs, entry.token_count)
        block = first // ours
        return Accept(
            entry.key,
            entry.block_ids[block : self._layout.blocks_for(end)],
            pushed.layer_start,
            pushed.layer_count,
            tokens=end - first,
            skip_tokens=first - start,
            offset_tokens=first - block * ours,
        )

    def _mark(self, entry: _Import, pushed: KvRange) -> None:
        bits = _layer_bits(pushed)
        for block in _blocks(pushed):
            entry.have[block - entry.first_block] |= bits
        entry.missing -= pushed.slices

    def _progress(self, entry: _Import, awaited: str, within_s: float, now: float) -> None:
        entry.awaited = awaited
        entry.progress_until = now + within_s
        entry.lease_until = max(entry.lease_until, now + self._limits.lease_s)

    def _fail(self, entry: _Import, problem: str) -> list[ImportAction]:
        failure = Failure(FailureKind.TRANSFER_FAILED, f"transfer {entry.id}: {problem}")
        return self._end(entry, failure, problem)

    def _fail_from(self, entry: _Import, conn: Connection, problem: str) -> list[ImportAction]:
        """Fail a transfer for a frame on `conn`, which may not be the transfer's own."""
        actions = self._fail(entry, problem)
        if not any(isinstance(a, Answer) and a.conn == conn for a in actions):
            verdict = Verdict(entry.grant, entry.id, committed=False, reason=problem)
            actions.append(Answer(conn, verdict, close=True))
        return actions

    def _end(self, entry: _Import, failure: Failure | None, reason: str) -> list[ImportAction]:
        self._forget(entry)
        actions: list[ImportAction] = []
        if entry.pending is not None:
            actions.append(Quarantined(entry.key))
        if failure is not None:
            actions.append(ImportFailed(entry.key, failure))
        if entry.conn is not None:
            verdict = Verdict(entry.grant, entry.id, committed=False, reason=reason)
            actions.append(Answer(entry.conn, verdict, close=True))
        if entry.pending is None:
            actions.append(Released(entry.key))
        return actions

    def _forget(self, entry: _Import) -> None:
        del self._by_key[entry.key]
        del self._by_grant[entry.grant]


def _blocks(pushed: KvRange) -> Iterable[int]:
    return range(pushed.block_start, pushed.block_end)


def _layer_bits(pushed: KvRange) -> int:
    return ((1 << pushed.layer_count) - 1) << pushed.layer_start


def _unknown(conn: Connection, grant: bytes, id: TransferId) -> Answer:
    reason = f"transfer {id}: no such grant here (ended, or never given)"
    return Answer(conn, Verdict(grant, id, committed=False, reason=reason), close=True)
