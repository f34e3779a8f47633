"""The pool of KV blocks and the prefix cache in it. Pure: it knows ids, never the memory.

Each block is in exactly one state:

- free: nobody's, content worthless;
- cached: nobody's, but its content is a known prefix that a later request may take over;
- active: held by one or more owners (counted); it may be in the prefix cache at the same time;
- granted: promised to a transfer that will write it, not readable yet;
- quarantined: given up by its request, but something outside may still write it.

A block enters the prefix cache only when it's whole and computed, and is never written again
while it's there. What nobody holds is evicted least recently used first. A chain of blocks is
released from its end, so a prefix outlives its continuations.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_engine.types import PrefixChanges


class PoolExhausted(Exception):
    """More blocks were asked for than are free or cached."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; the five add up to `total`."""

    total: int
    free: int
    cached: int
    active: int
    granted: int
    quarantined: int


class BlockPool:
    """Who may use which block. Ids run from 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        if num_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_tokens} tokens")
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed goes first
        self._owners = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, float] = OrderedDict()  # since when; the next to evict first
        self.now = 0.0  # as last told: when blocks are released from now on
        self._granted: set[int] = set()
        self._quarantined: set[int] = set()
        self._gained: dict[bytes, None] = {}  # ordered sets
        self._lost: dict[bytes, None] = {}
        self.fresh: deque[bytes] = deque(maxlen=num_blocks)
        """Hashes as they join the cache, for who keeps copies elsewhere."""

    # ---- sizes ---------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_tokens

    @property
    def available(self) -> int:
        """Blocks that can be had now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def counts(self) -> BlockCounts:
        set_aside = len(self._granted) + len(self._quarantined)
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            cached=len(self._cached),
            active=self.num_blocks - self.available - set_aside,
            granted=len(self._granted),
            quarantined=len(self._quarantined),
        )

    # ---- active blocks -------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """So many blocks with one owner each and no content. Evicts cached ones if it must."""
        ids = self._take(count)
        for block in ids:
            self._owners[block] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One owner more for each of these active blocks."""
        for block in ids:
            self._expect_active(block)
            self._owners[block] += 1

    def is_shared(self, block: int) -> bool:
        return self._owners[block] > 1

    def release(self, ids: Sequence[int]) -> None:
        """One owner less for each. The last owner's blocks become cached or free."""
        for block in reversed(ids):
            self._expect_active(block)
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = self.now

    # ---- the prefix cache ----------------------------------------------------------

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of this chain, with one owner more each."""
        ids = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            self._cached.pop(block, None)
            self._owners[block] += 1
            ids.append(block)
        return ids

    def register(self, block: int, key: bytes) -> None:
        """An active block is whole and computed: it joins the cache under its chain's hash.

        When two requests computed the same prefix at once, the first one's block stays.
        """
        self._expect_active(block)
        if key in self._block_of or self._hash_of[block] is not None:
            return
        self._block_of[key] = block
        self._hash_of[block] = key
        self.fresh.append(key)
        if key in self._lost:
            del self._lost[key]
        else:
            self._gained[key] = None

    def block_of(self, key: bytes) -> int | None:
        """The block that holds it, for reading before anything else happens here."""
        return self._block_of.get(key)

    def evict_cached(self, before: float, most: int) -> None:
        """Frees blocks that nobody has held since then, and the oldest beyond so many."""
        while self._cached:
            since = next(iter(self._cached.values()))
            if since >= before and len(self._cached) <= most:
                return
            self._free.append(self._evict())

    def prefixes(self) -> tuple[bytes, ...]:
        """All hashes in the cache."""
        return tuple(self._block_of)

    def take_prefix_changes(self) -> PrefixChanges:
        """What the cache gained and lost since this was last asked; never both for one hash."""
        changes = PrefixChanges(tuple(self._gained), tuple(self._lost))
        self._gained.clear()
        self._lost.clear()
        return changes

    # ---- blocks that others write --------------------------------------------------

    def grant(self, count: int) -> list[int]:
        """So many blocks for a transfer to write."""
        ids = self._take(count)
        self._granted.update(ids)
        return ids

    def activate(self, ids: Iterable[int]) -> None:
        """The transfer is complete: granted blocks get one owner each."""
        for block in ids:
            self._granted.remove(block)
            self._owners[block] = 1

    def revoke(self, ids: Sequence[int]) -> None:
        """The transfer won't happen, and nothing writes these granted blocks: they're free."""
        for block in reversed(ids):
            self._granted.remove(block)
            self._free.append(block)

    def quarantine(self, ids: Iterable[int]) -> None:
        """The transfer is given up, but may still write these granted blocks."""
        for block in ids:
            self._granted.remove(block)
            self._quarantined.add(block)

    def unquarantine(self, ids: Sequence[int]) -> None:
        """Nothing writes these blocks any more: they're free."""
        for block in reversed(ids):
            self._quarantined.remove(block)
            self._free.append(block)

    # ---- inside --------------------------------------------------------------------

    def _take(self, count: int) -> list[int]:
        if count > self.available:
            raise PoolExhausted(f"{count} blocks asked for, {self.available} are there")
        return [self._free.pop() if self._free else self._evict() for _ in range(count)]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._hash_of[block]
        if key is None:
            raise AssertionError(f"block {block} is cached without a hash")
        self._hash_of[block] = None
        del self._block_of[key]
        if key in self._gained:
            del self._gained[key]
        else:
            self._lost[key] = None
        return block

    def _expect_active(self, block: int) -> None:
        if self._owners[block] < 1:
            raise AssertionError(f"block {block} has no owner")

    def check(self, held: Iterable[int] | None = None) -> None:
        """Raises AssertionError unless each block is in one state and all hashes add up.

        `held` names all owners' blocks, one mention an owner; then these must add up too.
        """
        active = [block for block, owners in enumerate(self._owners) if owners]
        states = [*self._free, *self._cached, *active, *self._granted, *self._quarantined]
        if sorted(states) != list(range(self.num_blocks)):
            raise AssertionError(f"blocks are lost or in two states: {sorted(states)}")
        hashed = {key: block for block, key in enumerate(self._hash_of) if key is not None}
        if hashed != self._block_of:
            raise AssertionError("the prefix cache's two directions differ")
        if not self._cached.keys() <= set(hashed.values()) <= {*self._cached, *active}:
            raise AssertionError("a cached block without a hash, or a hash without content")
        if held is not None:
            owners = [0] * self.num_blocks
            for block in held:
                owners[block] += 1
            if owners != self._owners:
                raise AssertionError(f"owners {owners} but counted {self._owners}")
