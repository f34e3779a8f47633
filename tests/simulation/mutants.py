"""Deliberate defects of the product: each must make some world go wrong.

A defect is one wrong line in one place; what it replaces is put back afterwards.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pd_core.failures import Failure
from pd_engine import imports
from pd_engine.blocks import BlockPool
from pd_engine.copies import Copies
from pd_engine.core import EngineCore
from pd_engine.exports import Exports
from pd_engine.holdings import Holdings
from pd_engine.imports import Imports
from pd_engine.kv import frames, receiver, tcp
from pd_engine.scheduler import Scheduler
from pd_engine.sequence import Sequence
from pd_engine.sharing import Sharing
from pd_router.link import Link
from pd_router.moves import CancelSide, CloseSide, OpenDecode
from pd_router.walk import Walk

Change = tuple[Any, str, Any]
"""(owner, attribute, what it becomes)."""


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def skip_payload_checksum() -> list[Change]:
    """D believes that what came is what was sent."""
    real = Imports.push_end

    def push_end(self: Any, conn: int, checksum: int | None, now: float, misfit: str = "") -> Any:
        entry = self._receiving.get(conn)
        if checksum is not None and entry is not None and entry.pending is not None:
            checksum = entry.pending.checksum
        return real(self, conn, checksum, now, misfit)

    return [(Imports, "push_end", push_end)]


def skip_frame_checksum() -> list[Change]:
    return [(tcp, "checked", lambda _, body: body)]


def skip_coverage() -> list[Change]:
    """D commits with holes."""
    return [(Imports, "_unsealable", _always(""))]


def converted_to_the_block_start() -> list[Change]:
    """D puts what comes in the midst of its block to the block's start."""
    real = Imports._accept

    def accept(self: Any, entry: Any, pushed: Any) -> Any:
        return replace(real(self, entry, pushed), offset_tokens=0)

    return [(Imports, "_accept", accept)]


def free_early() -> list[Change]:
    """D takes an aborted transfer's blocks back while a receive still writes to them."""
    real = Imports._end

    def end(self: Any, entry: Any, failure: Any, reason: str) -> Any:
        actions = real(self, entry, failure, reason)
        kept = [a for a in actions if not isinstance(a, imports.Quarantined)]
        if len(kept) < len(actions):
            kept.append(imports.Released(entry.key))
        return kept

    return [(Imports, "_end", end)]


def no_quarantine() -> list[Change]:
    """The scheduler is not told that a receive goes on."""

    def on_quarantined(self: Any, key: Any) -> None:
        self.scheduler.cancel(key, 0.0, quarantine=False)

    return [(EngineCore, "on_import_quarantined", on_quarantined)]


def ignore_attempt() -> list[Change]:
    """D takes frames of another attempt for the grant's."""
    real = Imports._stranger

    def stranger(self: Any, entry: Any, conn: int, id: Any) -> str:
        del id
        return real(self, entry, conn, entry.id)

    return [(Imports, "_stranger", stranger)]


def ignore_epoch() -> list[Change]:
    """A worker takes connections that were meant for its predecessor."""
    real = receiver.frames.refuse

    def refuse(hello: Any, worker: str, epoch: str, layout: Any) -> Failure | None:
        return real(replace(hello, target_epoch=epoch), worker, epoch, layout)

    return [(frames, "refuse", refuse)]


def no_lease() -> list[Change]:
    """Nothing expires at D."""
    return [(Imports, "tick", _always([]))]


def export_freed_at_once() -> list[Change]:
    """P gives the blocks away when token 0 is drawn, though they are still being sent."""
    real = EngineCore._prefilled

    def prefilled(self: Any, event: Any, live: Any) -> None:
        real(self, event, live)
        if live.exporting:
            self.scheduler.release_export(event.key)

    return [(EngineCore, "_prefilled", prefilled)]


def sent_before_final() -> list[Change]:
    """P sends a block more than it has computed."""
    real = Exports.progress

    def progress(self: Any, key: Any, computed: int, first: int, end: int, now: float) -> Any:
        export = self._open.get(key)
        if export is not None:
            computed = min(export.token_count, computed + 4)
        return real(self, key, computed, first, end, now)

    return [(Exports, "progress", progress)]


def repeated_tokens() -> list[Change]:
    """The router doesn't drop what it has seen."""
    real = Walk._accept

    def accept(self: Any, leg: Any, token: Any) -> bool:
        accepted = real(self, leg, token)
        if not accepted:
            self._actions.append(token)
        return accepted

    return [(Walk, "_accept", accept)]


def resumes_one_ahead() -> list[Change]:
    """A retry repeats the last token that is out."""
    real = Walk._begin

    def begin(self: Any, leg: Any, now: float) -> None:
        real(self, leg, now)
        last = self._actions[-1] if self._actions else None
        out = self._out[leg.choices[0]]
        if isinstance(last, OpenDecode) and out and len(leg.choices) == 1:
            self._actions[-1] = replace(last, token_ids=(*last.token_ids[:-1], 1))

    return [(Walk, "_begin", begin)]


def silent_cancel() -> list[Change]:
    """The router lets a side go without telling the worker."""
    real = Walk._take

    def take(self: Any) -> Any:
        return [CloseSide(a.side) if isinstance(a, CancelSide) else a for a in real(self)]

    return [(Walk, "_take", take)]


def lost_streams_keep_their_requests() -> list[Change]:
    """A router's stream ends, but its requests stay with the worker."""
    return [(EngineCore, "close_stream", lambda self, number: self._streams.pop(number, None))]


def late_frames_count() -> list[Change]:
    """Frames of an attempt that was given up are taken for the present one's."""
    real = Walk._leg

    def leg(self: Any, side: Any) -> Any:
        return real(self, side) or (self._legs[0] if self._legs else None)

    def release(self: Any, handle: int, *, cancel: bool) -> None:
        del self, handle, cancel

    return [(Walk, "_leg", leg), (Link, "release", release)]


def cached_before_committed() -> list[Change]:
    """D offers a grant's blocks as a prefix before their KV is here."""
    real = Scheduler._grant

    def grant(self: Any, seq: Sequence, blocks: int, slots: int, now: float) -> bool:
        granted = real(self, seq, blocks, slots, now)
        if granted:
            whole = len(seq.tokens) // self.pool.block_tokens
            keys = seq.hash_blocks(whole, self.pool.block_tokens)
            for block, key in zip(seq.table, keys, strict=False):
                if key not in self.pool._block_of:
                    self.pool._block_of[key] = block
                    self.pool._hash_of[block] = key
        return granted

    return [(Scheduler, "_grant", grant)]


def no_copy_on_write() -> list[Change]:
    """Choices write into the block that they share."""
    return [(BlockPool, "is_shared", _always(False))]


def freed_in_flight() -> list[Change]:
    """What a step still writes is given to others."""

    def free(self: Any, seq: Sequence) -> None:
        blocks = seq.table + seq.spare
        seq.forget()
        self.pool.release(blocks)

    return [(Holdings, "free", free)]


def copy_cached_before_it_came() -> list[Change]:
    """What is set aside for a copy of a prefix is offered as that prefix at once."""
    real = Copies.reserve

    def reserve(self: Any, key: Any, hashes: Any) -> Any:
        reserved = real(self, key, hashes)
        if reserved is not None:
            pool = self._held.pool
            for block, name in zip(reserved.block_ids, hashes, strict=True):
                if name not in pool._block_of:
                    pool._block_of[name] = block
                    pool._hash_of[block] = name
        return reserved

    return [(Copies, "reserve", reserve)]


def copy_attached_unfinished() -> list[Change]:
    """A copy that failed is taken for one that came."""
    real = Sharing.on_import_failed

    def on_failed(self: Any, key: Any, failure: Failure) -> None:
        if key in self._host.scheduler._held.incoming:
            self._host.scheduler.copies.attach(key)
        real(self, key, failure)

    return [(Sharing, "on_import_failed", on_failed)]


def copy_read_while_others_write() -> list[Change]:
    """The blocks of a prefix that is being given may be evicted meanwhile."""
    real = Copies.pin

    def pin(self: Any, key: Any, hashes: Any) -> Any:
        blocks = real(self, key, hashes)
        if blocks is not None:
            self._held.release_export(key)
        return blocks

    return [(Copies, "pin", pin)]


def copy_without_quarantine() -> list[Change]:
    """A copy's blocks are free while a receive still writes to them."""
    real = Copies.give_up

    def give_up(self: Any, key: Any, quarantine: bool = False) -> None:
        del quarantine
        real(self, key)

    return [(Copies, "give_up", give_up)]


def another_prefix_is_given() -> list[Change]:
    """Blocks of a copy are sent in another order than they were asked for."""
    real = Copies.pin

    def pin(self: Any, key: Any, hashes: Any) -> Any:
        blocks = real(self, key, hashes)
        return None if blocks is None else blocks[::-1]

    return [(Copies, "pin", pin)]


def copy_kept_under_other_names() -> list[Change]:
    """A copy's blocks join the prefix cache in another order than they came in."""
    real = Copies.attach

    def attach(self: Any, key: Any) -> None:
        incoming = self._held.incoming[key]
        self._held.incoming[key] = replace(incoming, hashes=incoming.hashes[::-1])
        real(self, key)

    return [(Copies, "attach", attach)]


def no_send_deadline() -> list[Change]:
    """P waits for ever for a target that takes nothing, and for its verdict."""
    return [(Exports, "_expire", _always([]))]


MUTANTS: dict[str, Callable[[], list[Change]]] = {
    made.__name__: made
    for made in (
        skip_payload_checksum,
        skip_frame_checksum,
        skip_coverage,
        converted_to_the_block_start,
        free_early,
        no_quarantine,
        ignore_attempt,
        ignore_epoch,
        no_lease,
        export_freed_at_once,
        sent_before_final,
        repeated_tokens,
        resumes_one_ahead,
        silent_cancel,
        lost_streams_keep_their_requests,
        late_frames_count,
        cached_before_committed,
        no_copy_on_write,
        freed_in_flight,
        no_send_deadline,
        copy_cached_before_it_came,
        copy_attached_unfinished,
        copy_read_while_others_write,
        copy_without_quarantine,
        another_prefix_is_given,
        copy_kept_under_other_names,
    )
}


@contextlib.contextmanager
def defect(name: str) -> Iterator[None]:
    """The product with this defect."""
    changes = MUTANTS[name]()
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in changes]
    for owner, attribute, value in changes:
        setattr(owner, attribute, value)
    try:
        yield
    finally:
        for owner, attribute, value in before:
            setattr(owner, attribute, value)
