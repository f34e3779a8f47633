"""The prefill worker's side of KV transfers: what may be sent, in which frames. Pure.

An export is carried by one sender (`Engage` starts it): it asks `next_job`, does that,
reports it (`pushed`, `sealed`), asks again. The blocks are read by nobody else. An
export ends in exactly one of `ExportDone` and `ExportFailed`, and only when its sender
has `stopped`: from then on nothing reads the blocks.
"""

from dataclasses import dataclass

from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvLayout
from pd_engine.transfer import (
    Digest,
    DigestFactory,
    ExportLimits,
    KvRange,
    SealHead,
    TransferId,
    coverage_record,
)
from pd_engine.types import RequestKey, TokenOut

MEMORY_FRAMES = 4
"""So many times as large are frames that carry no bytes: then they are worth their message."""
MOST_MEMORY_FRAMES = 16
"""So many times as large at most, where there is so much to send at once. They grow with what
has gone: a target has nothing to do until the first is there."""


@dataclass(frozen=True, slots=True)
class Target:
    """A grant at a decode worker, which is (address, epoch)."""

    address: str
    epoch: str
    grant: bytes
    prefix_tokens: int = 0  # whole blocks of the target's
    transports: tuple[str, ...] = ("tcp",)  # to try, in order

    @property
    def by_memory(self) -> bool:
        """Frames carry no bytes then, so that larger ones cost less and delay nothing."""
        return self.transports[0] in ("shm", "nixl")


@dataclass(frozen=True, slots=True)
class ExportStats:
    """`transfer_s` is from the first frame's start to the seal's end."""

    kv_bytes: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class PushJob:
    """Send this rectangle from these pool blocks."""

    range: KvRange
    block_ids: tuple[int, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class SealJob:
    head: SealHead


@dataclass(frozen=True, slots=True)
class StopJob:
    """The export is over: report `stopped`."""


Job = PushJob | SealJob | StopJob


@dataclass(frozen=True, slots=True)
class Engage:
    """Start a sender."""

    key: RequestKey
    id: TransferId
    target: Target


@dataclass(frozen=True, slots=True)
class Wake:
    """`next_job` may have something new."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Cut:
    """End what the sender does right now, without waiting for its peer."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class ExportSealed:
    key: RequestKey
    stats: ExportStats


@dataclass(frozen=True, slots=True)
class ExportDone:
    """`committed`: the target said that it has all."""

    key: RequestKey
    committed: bool


@dataclass(frozen=True, slots=True)
class ExportFailed:
    key: RequestKey
    failure: Failure


ExportAction = Engage | Wake | Cut | ExportSealed | ExportDone | ExportFailed


@dataclass(slots=True)
class _Export:
    key: RequestKey
    id: TransferId
    target: Target
    block_ids: tuple[int, ...]
    token_count: int
    lease_s: float
    lease_until: float
    digest: Digest
    ready: list[int]  # by layer: blocks [0, n) are final
    sent: list[int]  # by layer: blocks [0, n) are out, or the target's prefix
    seal: tuple[tuple[TokenOut, ...], int] | None = None
    job: PushJob | SealJob | None = None
    send_until: float = 0.0
    kv_bytes: int = 0
    first_frame_at: float | None = None
    sealed_until: float | None = None
    outcome: ExportDone | ExportFailed | None = None
    abort: str = ""

    @property
    def all_sent(self) -> bool:
        return min(self.sent) == len(self.block_ids)


class Exports:
    """All exports of a prefill worker."""

    def __init__(
        self, layout: KvLayout, digest: DigestFactory, limits: ExportLimits | None = None
    ) -> None:
        self._layout = layout
        self._digest = digest
        self._limits = limits or ExportLimits()
        self._open: dict[RequestKey, _Export] = {}

    @property
    def open_keys(self) -> tuple[RequestKey, ...]:
        return tuple(self._open)

    def open(
        self,
        key: RequestKey,
        id: TransferId,
        target: Target,
        *,
        block_ids: tuple[int, ...],
        token_count: int,
        lease_s: float,
        now: float,
    ) -> list[ExportAction]:
        """Hand the KV of a prompt of `token_count` tokens in `block_ids` over to `target`."""
        if key in self._open:
            raise ValueError(f"export {key} is open already")
        blocks = self._layout.blocks_for(token_count)
        if token_count < 1 or len(block_ids) != blocks:
            raise ValueError(
                f"export {key}: {token_count} tokens need {blocks} blocks, got {len(block_ids)}"
            )
        if not 0 <= target.prefix_tokens <= token_count:
            raise ValueError(
                f"export {key}: a prefix of {target.prefix_tokens} tokens isn't "
                f"within {token_count} tokens"
            )
        prefix = self._layout.first_block(target.prefix_tokens, token_count)
        self._open[key] = _Export(
            key=key,
            id=id,
            target=target,
            block_ids=block_ids,
            token_count=token_count,
            lease_s=lease_s,
            lease_until=now + lease_s,
            digest=self._digest(),
            ready=[prefix] * self._layout.layers,
            sent=[prefix] * self._layout.layers,
        )
        return [Engage(key, id, target)]

    def progress(
        self,
        key: RequestKey,
        computed_tokens: int,
        layer_start: int,
        layer_end: int,
        now: float,
    ) -> list[ExportAction]:
        """KV of layers [layer_start, layer_end) at positions < computed_tokens is final."""
        export = self._open.get(key)
        if export is None or export.outcome is not None:
            return []
        if not 0 <= layer_start < layer_end <= self._layout.layers:
            raise ValueError(f"export {key}: no layers [{layer_start}, {layer_end})")
        if not 0 <= computed_tokens <= export.token_count:
            raise ValueError(
                f"export {key}: {computed_tokens} of {export.token_count} tokens computed"
            )
        whole = computed_tokens == export.token_count
        blocks = len(export.block_ids) if whole else computed_tokens // self._layout.block_tokens
        for layer in range(layer_start, layer_end):
            export.ready[layer] = max(export.ready[layer], blocks)
        self._renew(export, now)
        return [Wake(key)]

    def seal(
        self, key: RequestKey, first: tuple[TokenOut, ...], cached_tokens: int, now: float
    ) -> list[ExportAction]:
        """The prompt is computed and token 0 of each choice drawn."""
        export = self._open.get(key)
        if export is None or export.outcome is not None:
            return []
        if export.seal is not None:
            raise ValueError(f"export {key} is sealed already")
        export.seal = (first, cached_tokens)
        return self.progress(key, export.token_count, 0, self._layout.layers, now)

    # ---- the sender ---------------------------------------------------------------

    def next_job(self, key: RequestKey, now: float) -> Job | None:
        """What the sender does next; None: wait to be woken. `pushed` or `sealed` must
        follow a push or a seal that went out whole."""
        export = self._open[key]
        if export.outcome is not None:
            return StopJob()
        if export.job is not None:
            raise ValueError(f"export {key}: a job within a job")
        job = self._next_push(export) or self._next_seal(export)
        if job is not None:
            export.job = job
            export.send_until = now + self._limits.send_s
            if export.first_frame_at is None:
                export.first_frame_at = now
        return job

    def pushed(
        self, key: RequestKey, checksum: int, now: float, payload_bytes: int | None = None
    ) -> None:
        """The push is out, with a payload of another size than the job's if it says so."""
        export = self._open[key]
        job, export.job = export.job, None
        if not isinstance(job, PushJob):
            raise ValueError(f"export {key}: no push was going on")
        r = job.range
        for layer in range(r.layer_start, r.layer_end):
            export.sent[layer] = r.block_end
        size = job.payload_bytes if payload_bytes is None else payload_bytes
        export.kv_bytes += size
        export.digest.update(coverage_record(r, size, checksum))
        self._renew(export, now)

    def sealed(self, key: RequestKey, now: float) -> list[ExportAction]:
        """The seal is out. (Nothing to do when the verdict was faster than this word.)"""
        export = self._open[key]
        if export.sealed_until is not None:
            export.job = None
            return []
        if not isinstance(export.job, SealJob):
            raise ValueError(f"export {key}: no seal was going on")
        export.job = None
        export.sealed_until = now + self._limits.verdict_s
        started = now if export.first_frame_at is None else export.first_frame_at
        return [ExportSealed(key, ExportStats(export.kv_bytes, now - started))]

    def abort_reason(self, key: RequestKey) -> str:
        """What to tell the target of an export that ended here; "" when it knows."""
        return self._open[key].abort

    def stopped(self, key: RequestKey) -> list[ExportAction]:
        """The sender has ended and reads nothing any more."""
        export = self._open.pop(key)
        lost = Failure(FailureKind.INTERNAL, f"transfer {export.id}: the sender stopped by itself")
        return [export.outcome or ExportFailed(key, lost)]

    # ---- what ends an export --------------------------------------------------------

    def verdict(
        self, key: RequestKey, committed: bool, reason: str, now: float
    ) -> list[ExportAction]:
        """The target's last word."""
        export = self._open.get(key)
        if export is None or export.outcome is not None:
            return []
        actions: list[ExportAction] = []
        if committed and isinstance(export.job, SealJob):
            actions += self.sealed(key, now)
        if export.sealed_until is not None:
            return actions + self._end(export, ExportDone(key, committed), cut=False)
        if committed:
            reason = "the decode worker committed before the seal"
        message = f"transfer {export.id}: refused by the decode worker: {reason}"
        return self._end(export, self._failed(export, message), cut=True)

    def broken(self, key: RequestKey, failure: Failure) -> list[ExportAction]:
        """The connection ended, or could not be made."""
        export = self._open.get(key)
        if export is None or export.outcome is not None:
            return []
        if export.sealed_until is not None:
            return self._end(export, ExportDone(key, committed=False), cut=True)
        return self._end(export, ExportFailed(key, failure), cut=True)

    def cancel(self, key: RequestKey) -> list[ExportAction]:
        """The owner wants its blocks back: `ExportDone` follows once the sender stopped."""
        export = self._open.get(key)
        if export is None or export.outcome is not None:
            return []
        export.abort = "cancelled at the prefill worker"
        return self._end(export, ExportDone(key, committed=False), cut=True)

    def renew(self, key: RequestKey, now: float) -> None:
        export = self._open.get(key)
        if export is not None:
            self._renew(export, now)

    def tick(self, now: float) -> list[ExportAction]:
        """Expire leases and deadlines. To be called all the time, work or none."""
        actions: list[ExportAction] = []
        for export in list(self._open.values()):
            if export.outcome is None:
                actions += self._expire(export, now)
        return actions

    def _expire(self, export: _Export, now: float) -> list[ExportAction]:
        if export.sealed_until is not None:
            if now >= min(export.sealed_until, export.lease_until):
                return self._end(export, ExportDone(export.key, committed=False), cut=True)
            return []
        if now >= export.lease_until:
            export.abort = f"the lease of {export.lease_s:g} s wasn't renewed"
            message = f"transfer {export.id}: {export.abort}"
            failure = Failure(FailureKind.LEASE_EXPIRED, message)
            return self._end(export, ExportFailed(export.key, failure), cut=True)
        if export.job is not None and now >= export.send_until:
            message = (
                f"transfer {export.id}: {export.target.address} took no whole frame "
                f"in {self._limits.send_s:g} s"
            )
            return self._end(export, self._failed(export, message), cut=True)
        return []

    # ---- helpers ----------------------------------------------------------------------

    def _next_push(self, export: _Export) -> PushJob | None:
        """The earliest blocks that are final and unsent, of as many layers as share them.

        A piece that will grow when the step's next layer is final waits until it fills a
        frame: each frame takes some of the target's core, however small it is.
        """
        layers = range(self._layout.layers)
        waiting = [x for x in layers if export.sent[x] < export.ready[x]]
        if not waiting:
            return None
        start = min(waiting, key=lambda x: (export.sent[x], x))
        sent = export.sent[start]
        end = start + 1
        while end in layers and export.sent[end] == sent < export.ready[end]:
            end += 1
        grows = end in layers and export.sent[end] == sent
        blocks = min(export.ready[start:end]) - sent
        by_memory, frame_bytes = export.target.by_memory, self._limits.frame_bytes
        enough = frame_bytes * (MEMORY_FRAMES if by_memory else 1)
        if grows and (end - start) * blocks * self._layout.layer_bytes < enough:
            return None
        if by_memory:
            frame_bytes *= min(MOST_MEMORY_FRAMES, max(2, export.kv_bytes // frame_bytes))
        count = self._layers_a_frame(end - start, frame_bytes)
        ready = min(export.ready[start : start + count])
        slice_bytes = count * self._layout.layer_bytes
        fit = max(1, frame_bytes // slice_bytes)
        blocks = min(ready - sent, fit)
        return PushJob(
            KvRange(start, count, sent, blocks),
            export.block_ids[sent : sent + blocks],
            blocks * slice_bytes,
        )

    def _layers_a_frame(self, layers: int, frame_bytes: int) -> int:
        """All layers of a block if they fit into a frame, else even parts of them."""
        most = max(1, frame_bytes // self._layout.layer_bytes)
        frames = -(-layers // most)
        return -(-layers // frames)

    def _next_seal(self, export: _Export) -> SealJob | None:
        if export.seal is None or export.sealed_until is not None or not export.all_sent:
            return None
        first, cached_tokens = export.seal
        return SealJob(
            SealHead(
                grant=export.target.grant,
                id=export.id,
                token_count=export.token_count,
                payload_bytes=export.kv_bytes,
                coverage=export.digest.intdigest(),
                first=first,
                cached_tokens=cached_tokens,
            )
        )

    def _renew(self, export: _Export, now: float) -> None:
        export.lease_until = now + export.lease_s

    def _failed(self, export: _Export, message: str) -> ExportFailed:
        return ExportFailed(export.key, Failure(FailureKind.TRANSFER_FAILED, message))

    def _end(
        self, export: _Export, outcome: ExportDone | ExportFailed, *, cut: bool
    ) -> list[ExportAction]:
        export.outcome = outcome
        return [Cut(export.key) if cut else Wake(export.key)]
