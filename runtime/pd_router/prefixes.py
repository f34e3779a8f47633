"""Which worker holds which prompt prefixes, as its heartbeats tell it. Pure, bounded."""

from collections.abc import Iterable, Iterator, Sequence

from pd_core.kv import prefix_hashes
from pd_router.fleet import WorkerId

MAX_HASHES_A_WORKER = 1 << 18
"""About 30 MB of hashes: what a worker says beyond it pushes out its oldest."""


class PromptHashes:
    """The chained block hashes of one prompt, computed only as far as somebody asks.

    Workers may differ in block size, so the hashes are kept by block size.
    """

    __slots__ = ("_known", "_rest", "_salt", "_token_ids")

    def __init__(self, token_ids: Sequence[int], salt: bytes = b"") -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._known: dict[int, list[bytes]] = {}
        self._rest: dict[int, Iterator[bytes]] = {}

    def __len__(self) -> int:
        """Tokens of the prompt."""
        return len(self._token_ids)

    def at(self, block_tokens: int, block: int) -> bytes | None:
        """Hash of blocks 0..block; None past the last whole block."""
        known = self._known.setdefault(block_tokens, [])
        rest = self._rest.get(block_tokens)
        if rest is None:
            rest = prefix_hashes(self._token_ids, block_tokens, self._salt)
            self._rest[block_tokens] = rest
        while len(known) <= block:
            following = next(rest, None)
            if following is None:
                return None
            known.append(following)
        return known[block]


class PrefixIndex:
    """Prefix hashes by worker, at most `limit` each.

    Hashes are kept in the order in which they were gained, so that the oldest go first
    when a worker announces more than its share.
    """

    def __init__(self, limit: int = MAX_HASHES_A_WORKER) -> None:
        self._limit = limit
        self._held: dict[WorkerId, dict[bytes, None]] = {}

    def update(
        self,
        worker: WorkerId,
        gained: Iterable[bytes],
        lost: Iterable[bytes] = (),
        *,
        reset: bool = False,
    ) -> None:
        """Takes one heartbeat in. `reset` forgets all earlier hashes first."""
        held = self._held.setdefault(worker, {})
        if reset:
            held.clear()
        for key in lost:
            held.pop(key, None)
        for key in gained:
            held.pop(key, None)
            held[key] = None
        while len(held) > self._limit:
            del held[next(iter(held))]

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, and its cache with it."""
        self._held.pop(worker, None)

    def count(self, worker: WorkerId) -> int:
        """Hashes known of a worker."""
        return len(self._held.get(worker, ()))

    def cached_tokens(self, worker: WorkerId, prompt: PromptHashes, block_tokens: int) -> int:
        """Tokens at the prompt's start that the worker needn't compute.

        Whole blocks only, and never the whole prompt: one token is always computed.
        """
        held = self._held.get(worker)
        if not held:
            return 0
        blocks = 0
        most = (len(prompt) - 1) // block_tokens
        while blocks < most:
            key = prompt.at(block_tokens, blocks)
            if key is None or key not in held:
                break
            blocks += 1
        return blocks * block_tokens
