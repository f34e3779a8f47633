"""Copies of cached prefixes that go from one worker's pool into another's. Pure.

Whoever takes one sets blocks aside first (`reserve`) and has it in its prefix cache in the end
(`attach`), or gives them back. Whoever gives one holds on to its blocks while they're read
(`pin`): both know nothing of requests, only of chains of block hashes.
"""

from dataclasses import dataclass

from pd_engine.holdings import Holdings, Incoming
from pd_engine.types import RequestKey


@dataclass(frozen=True, slots=True)
class Reserved:
    """The blocks of a prefix, of which the first `prefix_blocks` are there already."""

    block_ids: tuple[int, ...]
    prefix_blocks: int

    @property
    def complete(self) -> bool:
        return self.prefix_blocks == len(self.block_ids)


class Copies:
    """Of one worker, over the scheduler's books."""

    def __init__(self, held: Holdings, most: int) -> None:
        """`most` on their way at once, in both directions together."""
        self._held = held
        self.most = most

    def __contains__(self, key: RequestKey) -> bool:
        return self._held.knows(key)

    @property
    def full(self) -> bool:
        return len(self._held.incoming) + len(self._held.exports) >= self.most

    # ---- taking ----------------------------------------------------------------------

    def reserve(self, key: RequestKey, hashes: tuple[bytes, ...]) -> Reserved | None:
        """Blocks for this prefix, to be written by a transfer; None, and nothing changed, where
        there's no room for it beside those that run: nobody waits for a copy."""
        pool, held = self._held.pool, self._held
        prefix = pool.match_prefix(hashes)
        missing = len(hashes) - len(prefix)
        if missing > pool.available - len(held.running):
            pool.release(prefix)
            return None
        held.incoming[key] = Incoming(hashes, prefix, pool.grant(missing))
        return Reserved((*prefix, *held.incoming[key].granted), len(prefix))

    def attach(self, key: RequestKey) -> None:
        """All of it is there: it's a prefix like those that were computed here."""
        incoming, pool = self._held.incoming.pop(key), self._held.pool
        pool.activate(incoming.granted)
        blocks = [*incoming.prefix, *incoming.granted]
        for block, name in zip(blocks, incoming.hashes, strict=True):
            pool.register(block, name)
        pool.release(blocks)

    def give_up(self, key: RequestKey, quarantine: bool = False) -> None:
        """It won't come. `quarantine`: its blocks may still be written, until
        `release_quarantine`."""
        incoming = self._held.incoming.pop(key, None)
        if incoming is None:
            return
        self._held.pool.release(incoming.prefix)
        if quarantine:
            self._held.pool.quarantine(incoming.granted)
            self._held.quarantine[key] = incoming.granted
        else:
            self._held.pool.revoke(incoming.granted)

    def release_quarantine(self, key: RequestKey) -> None:
        """Nothing writes its blocks any more."""
        self._held.release_quarantine(key)

    # ---- giving ----------------------------------------------------------------------

    def pin(self, key: RequestKey, hashes: tuple[bytes, ...]) -> tuple[int, ...] | None:
        """The blocks of this prefix, which nobody gets before `unpin`; None where one of them
        has been evicted."""
        pool = self._held.pool
        blocks = pool.match_prefix(hashes)
        if len(blocks) < len(hashes):
            pool.release(blocks)
            return None
        self._held.exports[key] = blocks
        return tuple(blocks)

    def unpin(self, key: RequestKey) -> None:
        self._held.release_export(key)
