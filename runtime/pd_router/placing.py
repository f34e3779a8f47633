"""The policy over the workers of the moment, for one request."""

import time
from collections.abc import Callable

from pd_router import policy
from pd_router.costs import Need
from pd_router.fleet import Role, WorkerId
from pd_router.policy import Exclusions, Placement, Unplaced
from pd_router.prefixes import PromptHashes
from pd_router.routing import Chance, Routing
from pd_router.types import GenerateRequest
from pd_router.workers import Workers


class RequestPlacer:
    """See the module (`moves.Placer`)."""

    __slots__ = ("_chance", "_hashed", "_hashes", "_routing", "_salt", "_workers")

    def __init__(
        self,
        workers: Workers,
        routing: Routing,
        chance: Callable[[], Chance],
        request: GenerateRequest,
    ) -> None:
        """`chance` for each choice."""
        self._workers = workers
        self._routing = routing
        self._chance = chance
        self._salt = request.cache_salt
        self._hashed = request.token_ids
        self._hashes = PromptHashes(request.token_ids, request.cache_salt)

    def __call__(
        self,
        need: Need,
        exclusions: Exclusions,
        token_ids: tuple[int, ...],
        decode_at: WorkerId | None,
    ) -> Placement | Unplaced:
        if self._hashed is not token_ids:
            self._hashed = token_ids
            self._hashes = PromptHashes(token_ids, self._salt)
        hashes, prefixes = self._hashes, self._workers.prefixes
        now, between = time.monotonic(), self._workers.broken.between
        found = policy.place(
            need,
            self._workers.views(),
            lambda view: prefixes.cached_tokens(view.id, hashes, view.block_tokens),
            exclusions,
            decode_at,
            block_hash=hashes.at,
            routing=self._routing,
            chance=self._chance(),
            broken=lambda holder, target: between(holder, target, now),
        )
        if isinstance(found, Placement):
            self._workers.chosen(found.decode, found.prefill)
        return found

    def uncached(self) -> int:
        """Tokens of the prompt that whoever has most of it would still compute."""
        usable = [view for view in self._workers.views() if view.usable]
        computing = [view for view in usable if view.role is Role.PREFILL] or usable
        cached = (
            self._workers.prefixes.cached_tokens(view.id, self._hashes, view.block_tokens)
            for view in computing
        )
        return len(self._hashes) - max(cached, default=0)


def first_need(request: GenerateRequest) -> Need:
    """What a request takes at its start."""
    return Need(
        tokens=len(request.token_ids),
        output_tokens=request.sampling.max_tokens,
        choices=request.choices,
        session=request.session,
    )
