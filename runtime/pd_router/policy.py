"""Which workers serve a request: a decode worker, and a prefill worker for it or none. Pure.

The default policy takes what promises the whole answer soonest (`costs`), of the workers
that may be taken at all; those named in `routing` go by one thing alone. Ties go to the
lower ordinal, which scale-in takes last, unless other routers would take it too. Every
choice says why, with its candidates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pd_core.kv import convertible
from pd_router import affinity
from pd_router.costs import CachedTokens, Costs, Need, Prefill
from pd_router.explain import decode_reason, local_reason, named, prefill_reason
from pd_router.fleet import Role, WorkerId, WorkerView
from pd_router.pulls import Pull, Pulls, none_broken
from pd_router.routing import DEFAULT, NO_CHANCE, Chance, Routing
from pd_router.types import Considered

__all__ = ["CachedTokens", "Exclusions", "Need", "Placement", "Unplaced", "place"]

_SHORTLIST = 4
"""Decode workers, and prefill workers, of which each pair is looked at."""
_LOCAL_GAIN = 0.1
_LOCAL_GAIN_S = 0.02
"""Computing the prompt where it's decoded must promise so much, as a share and in seconds:
predictions aren't better than that, and prefill workers are there for it."""

_HOME_SLACK = 0.1
"""Of a prompt's computing time, what it may lose by going where its prefix belongs: that
much is won by each later prompt that begins like it, and not all have one."""

BlockHash = Callable[[int, int], bytes | None]
"""Of the prompt's blocks of so many tokens, the hash of one and all before it; None: it has
no such block."""


def _no_blocks(block_tokens: int, block: int) -> None:
    del block_tokens, block


@dataclass(slots=True)
class Exclusions:
    """What a request has learned from its earlier attempts.

    `barred` workers get it no more; `disliked` ones only when there is nobody else;
    `pairs` (decode, prefill) don't understand each other.
    """

    barred: set[WorkerId] = field(default_factory=set)
    disliked: set[WorkerId] = field(default_factory=set)
    pairs: set[tuple[WorkerId, WorkerId]] = field(default_factory=set)

    def copy(self) -> "Exclusions":
        return Exclusions(set(self.barred), set(self.disliked), set(self.pairs))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where an attempt goes. No prefill worker: the decode worker computes the prompt."""

    decode: WorkerId
    prefill: WorkerId | None
    blocks: int  # that decode will reserve
    compute_tokens: int  # uncached prompt tokens for whoever prefills
    reason: str
    considered: tuple[Considered, ...] = ()
    pull: Pull | None = None  # a copy that whoever prefills gets first

    @property
    def expected_s(self) -> float:
        """How long until token 0; 0: nothing is known of it."""
        names = (self.decode.name, self.prefill.name if self.prefill else None)
        found = (one.ttft_s for one in self.considered if (one.decode, one.prefill) == names)
        return next(found, 0.0)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No worker can take it now. `barred`: there are some, but the request has used them up."""

    reason: str
    barred: bool = False


def place(
    need: Need,
    workers: Iterable[WorkerView],
    cached_tokens: CachedTokens,
    exclusions: Exclusions,
    decode_at: WorkerId | None = None,
    *,
    block_hash: BlockHash = _no_blocks,
    routing: Routing = DEFAULT,
    chance: Chance = NO_CHANCE,
    broken: Callable[[WorkerId, WorkerId], bool] = none_broken,
) -> Placement | Unplaced:
    """Chooses decode (unless it's given: then it has granted already, and prefill alone is
    to be chosen) and prefill. `broken`: no copies between these two. O(workers)."""
    workers = list(workers)
    usable = [w for w in workers if w.usable]
    decoders = [
        w
        for w in usable
        if w.role is not Role.PREFILL
        and w.holds(need.tokens)
        and (decode_at is None or w.id == decode_at)
    ]
    if not decoders:
        return Unplaced(_why_no_decoder(usable, need))
    open_to_us = [w for w in decoders if w.id not in exclusions.barred]
    if not open_to_us:
        names = named([w.id.name for w in decoders])
        return Unplaced(f"every decode worker has refused this request ({names})", barred=True)
    prefillers = [w for w in usable if w.role is Role.PREFILL and w.holds(need.tokens)]
    known = _Known(cached_tokens, block_hash)
    choice = _Choice(need, usable, prefillers, known, exclusions, routing, chance)
    if routing.policy == "cost":
        choice.may_pull_from(workers, broken)
    return choice.make(open_to_us, may_be_local=decode_at is None)


def compatible(decode: WorkerView, prefill: WorkerView) -> bool:
    """Whether decode can take prefill's KV."""
    return convertible(prefill.kv, decode.kv) is None


def pair_usable(workers: Iterable[WorkerView]) -> bool:
    """Whether a request would find workers: who decodes can prefill as well."""
    return any(w.usable and w.role is not Role.PREFILL for w in workers)


@dataclass(slots=True)
class _Option:
    """One way to serve the request. `total_s` orders the ways; the rest tells them apart."""

    decode: WorkerView
    prefill: Prefill
    local: bool
    ttft_s: float
    total_s: float

    def key(self, chance: Chance) -> tuple[bool, float, int, int, int]:
        here, there = self.decode, self.prefill.worker
        other = not self.local and there.revision != here.revision
        turns = chance.turn_of(here.ordinal), chance.turn_of(there.ordinal)
        return (other, round(self.total_s, 6), here.running, *turns)


class _Known:
    """What is known of the prompt's prefix, each asked for once."""

    def __init__(self, cached_tokens: CachedTokens, block_hash: BlockHash) -> None:
        self._cached_tokens = cached_tokens
        self._block_hash = block_hash
        self._cached: dict[WorkerId, int] = {}

    def cached_at(self, worker: WorkerView) -> int:
        known = self._cached.get(worker.id)
        if known is None:
            known = self._cached[worker.id] = self._cached_tokens(worker)
        return known

    def home(self, workers: Sequence[WorkerView]) -> WorkerView | None:
        """Where the first block belongs that no worker has announced: all routers send it
        there, before any of them has heard that it's there."""
        block_tokens = min(w.block_tokens for w in workers)
        block = max(map(self.cached_at, workers)) // block_tokens
        key = self._block_hash(block_tokens, block)
        return affinity.owner(key, workers) if key is not None else None


class _Choice:
    """One request's choice, step by step."""

    def __init__(
        self,
        need: Need,
        usable: Sequence[WorkerView],
        prefillers: Sequence[WorkerView],
        known: _Known,
        exclusions: Exclusions,
        routing: Routing,
        chance: Chance,
    ) -> None:
        self._need = need
        self._prefillers = prefillers
        self._exclusions = exclusions
        self._routing = routing
        self._chance = chance
        self._costs = Costs(need, usable, routing.link, chance.routers)
        self._known = known
        self._homes: dict[WorkerId, WorkerId] = {}  # of this prefix, by decode worker
        self._prefills: dict[WorkerId, Prefill] = {}
        self._decode_s: dict[WorkerId, float] = {}
        self._partners: dict[WorkerId, list[WorkerView]] = {}
        self._picks: dict[tuple[int, ...], tuple[list[WorkerView], WorkerView | None]] = {}
        self._pulls = Pulls((), known.cached_at, routing.link, None)

    def may_pull_from(
        self, workers: Sequence[WorkerView], broken: Callable[[WorkerId, WorkerId], bool]
    ) -> None:
        """A prompt's beginning may be copied from these, where that's sooner."""
        barred = self._exclusions.barred | self._exclusions.disliked
        holders = [w for w in workers if w.id not in barred]
        link, rules = self._routing.link, self._routing.pulls
        self._pulls = Pulls(holders, self._known.cached_at, link, rules, broken)

    def make(self, decoders: Sequence[WorkerView], *, may_be_local: bool) -> Placement:
        ranks = [self._rank(w) for w in decoders]
        best = min(ranks)
        liked = [w for w, rank in zip(decoders, ranks, strict=True) if rank == best]
        if self._routing.policy == "cost":
            shortlist, why = self._shortlist(liked)
        else:
            shortlist, why = [self._by_name(liked)], self._routing.policy.replace("_", " ")
        options = [o for w in shortlist for o in self._options(w, may_be_local=may_be_local)]
        chosen = options[0] if len(options) == 1 else self._soonest(options)
        chosen = self._unless_local_gains_little(chosen, options)
        chosen = self._home_if_near(chosen, options)
        return self._placement(chosen, options, liked, why)

    def _soonest(self, options: Sequence[_Option]) -> _Option:
        return min(options, key=lambda option: option.key(self._chance))

    # ---- decode -------------------------------------------------------------------------

    def _rank(self, worker: WorkerView) -> tuple[bool, bool]:
        """Smallest first. A decode worker without a prefill partner would have to stop its
        streams for the prompt, so it comes after those that have one."""
        alone = worker.role is Role.DECODE and not any(
            compatible(worker, p) for p in self._prefillers
        )
        return (worker.id in self._exclusions.disliked, alone)

    def _decode_key(self, worker: WorkerView) -> tuple[float, int, int]:
        return (
            round(self._decode_cost(worker), 6),
            worker.running,
            self._chance.turn_of(worker.ordinal),
        )

    def _decode_cost(self, worker: WorkerView) -> float:
        known = self._decode_s.get(worker.id)
        if known is None:
            known = self._decode_s[worker.id] = self._costs.decode(worker)
        return known

    def _shortlist(self, decoders: Sequence[WorkerView]) -> tuple[list[WorkerView], str]:
        """The decode workers worth a closer look, and what speaks for them."""
        own = self._session_owner(decoders)
        if own is not None:
            return [own], "its session is there"
        if len(decoders) == 1:
            return list(decoders), "soonest"
        if self._chance.alone:
            return sorted(decoders, key=self._decode_key)[:_SHORTLIST], "soonest"
        return affinity.two_of(decoders, self._chance.lot), "sooner of two drawn"

    def _session_owner(self, decoders: Sequence[WorkerView]) -> WorkerView | None:
        """Where the session's KV is, as long as there is room for it to grow."""
        if not self._need.session or len(decoders) < 2:
            return None
        own = affinity.owner(self._need.session, decoders)
        if own is None or _waits(own):
            return None
        return own if own.kv_used / own.kv_blocks < self._routing.session_kv_limit else None

    def _by_name(self, decoders: Sequence[WorkerView]) -> WorkerView:
        """Of a policy that goes by one thing alone."""
        policy, ordered = self._routing.policy, sorted(decoders, key=lambda w: w.ordinal)
        if policy == "random":
            return ordered[self._chance.lot % len(ordered)]
        if policy == "round_robin":
            return ordered[self._chance.turn % len(ordered)]
        if policy == "session" and (own := self._session_owner(decoders)) is not None:
            return own
        if policy == "least_outstanding":
            return min(ordered, key=lambda w: w.outstanding)
        return min(ordered, key=lambda w: (_waits(w), round(self._fill(w), 3), w.running))

    def _fill(self, worker: WorkerView) -> float:
        return (worker.kv_used + self._need.reserve_blocks(worker)) / worker.kv_blocks

    # ---- prefill ------------------------------------------------------------------------

    def _options(self, decode: WorkerView, *, may_be_local: bool) -> list[_Option]:
        """The ways to serve the request with this decode worker. Never none where the
        prompt may be computed there."""
        partners = self._partners_of(decode)
        options = [self._remote(decode, p) for p in self._promising(decode, partners)]
        if not options or (may_be_local and self._local_may_gain(decode)):
            options.append(self._local(decode))
        return options

    def _local_may_gain(self, decode: WorkerView) -> bool:
        """Only speeds that were measured can be compared."""
        mode = self._routing.disaggregate
        if mode == "auto":
            return self._routing.policy == "cost" and decode.tokens_per_s > 0
        return mode == "never"

    def _partners_of(self, decode: WorkerView) -> list[WorkerView]:
        if decode.role is Role.BOTH or self._routing.disaggregate == "never":
            return []
        exclusions = self._exclusions
        partners = [
            w
            for w in self._prefillers
            if compatible(decode, w)
            and w.id not in exclusions.barred
            and w.id not in exclusions.disliked
            and (decode.id, w.id) not in exclusions.pairs
        ]
        self._partners[decode.id] = partners
        return partners

    def _promising(
        self, decode: WorkerView, partners: Sequence[WorkerView]
    ) -> Sequence[WorkerView]:
        """Prefill workers worth a closer look. Those of the same revision come first."""
        partners = [w for w in partners if w.revision == decode.revision] or list(partners)
        if len(partners) < 2:
            return partners
        if self._routing.policy != "cost":
            return [self._prefill_by_name(partners)]
        # Decode workers mostly have the same partners: these are compared once a request.
        same = tuple(map(id, partners))
        if same not in self._picks:
            self._picks[same] = self._picked(partners)
        picked, home = self._picks[same]
        if home is not None:
            self._homes[decode.id] = home.id
        return picked

    def _picked(self, partners: Sequence[WorkerView]) -> tuple[list[WorkerView], WorkerView | None]:
        """The soonest, or those drawn, and the prompt's home, of which there may be none."""
        home = self._known.home(partners)
        if self._chance.alone:
            found = {w.id: self._prefill(w) for w in partners}
            costs = {at: round(p.ready_s + self._costs.delay(p), 6) for at, p in found.items()}
            turn_of = self._chance.turn_of
            ordered = sorted(partners, key=lambda w: (costs[w.id], turn_of(w.ordinal)))
            picked = ordered[:_SHORTLIST]
        else:
            picked = affinity.two_of(partners, self._chance.lot)
            holder = max(partners, key=self._known.cached_at)
            if self._known.cached_at(holder) and holder not in picked:
                picked.append(holder)
        return (picked if home is None or home in picked else [*picked, home]), home

    def _prefill_by_name(self, partners: Sequence[WorkerView]) -> WorkerView:
        policy, ordered = self._routing.policy, sorted(partners, key=lambda w: w.ordinal)
        if policy == "random":
            return ordered[self._chance.lot // 64 % len(ordered)]
        if policy == "round_robin":
            return ordered[self._chance.turn % len(ordered)]
        if policy == "prefix":
            return min(ordered, key=lambda w: (-self._known.cached_at(w), self._costs.queue_s(w)))
        if policy == "session" and self._need.session:
            return affinity.owner(self._need.session, ordered) or ordered[0]
        if policy == "prompt_length":
            return min(ordered, key=lambda w: self._costs.prefill(w, 0).ready_s)
        return min(ordered, key=self._costs.queue_s)

    def _prefill(self, worker: WorkerView) -> Prefill:
        known = self._prefills.get(worker.id)
        if known is None:
            alone = self._costs.prefill(worker, self._known.cached_at(worker))
            known = self._prefills[worker.id] = self._pulls.better(alone, self._costs.prefill)
        return known

    # ---- both together ------------------------------------------------------------------

    def _remote(self, decode: WorkerView, worker: WorkerView) -> _Option:
        prefill = self._prefill(worker)
        cached = self._known.cached_at(decode)
        ttft_s = prefill.ready_s + self._costs.exposed(decode, prefill, cached)
        total_s = ttft_s + self._costs.delay(prefill) + self._decode_cost(decode)
        return _Option(decode, prefill, False, ttft_s, total_s)

    def _local(self, decode: WorkerView) -> _Option:
        prefill = self._prefill(decode)
        stall_s = self._costs.stall(decode, prefill)
        total_s = prefill.ready_s + stall_s + self._decode_cost(decode)
        return _Option(decode, prefill, True, prefill.ready_s, total_s)

    def _unless_local_gains_little(self, best: _Option, options: list[_Option]) -> _Option:
        """A prompt goes to the pool that is there for it unless that is clearly worse."""
        if not best.local or self._routing.disaggregate != "auto":
            return best
        remote = [o for o in options if not o.local and o.decode.id == best.decode.id]
        if not remote:
            return best
        other = self._soonest(remote)
        gain_s = other.total_s - best.total_s
        enough_s = max(_LOCAL_GAIN_S, _LOCAL_GAIN * other.ttft_s)
        return best if gain_s > enough_s else other

    def _home_if_near(self, best: _Option, options: list[_Option]) -> _Option:
        """A new prefix goes where it belongs, unless that takes clearly longer or what is
        known of it is elsewhere."""
        home = self._homes.get(best.decode.id)
        if home is None or best.local:
            return best
        slack_s = _HOME_SLACK * best.prefill.compute_s
        least = best.prefill.compute_tokens
        for option in options:
            at = option.prefill.worker.id
            if option.decode is best.decode and not option.local and at == home:
                near = option.total_s - best.total_s <= slack_s
                return option if near and option.prefill.compute_tokens <= least else best
        return best

    # ---- why ----------------------------------------------------------------------------

    def _placement(
        self,
        chosen: _Option,
        options: Sequence[_Option],
        decoders: Sequence[WorkerView],
        why: str,
    ) -> Placement:
        decode = chosen.decode
        costs = [(w, self._decode_s[w.id]) for w in decoders if w.id in self._decode_s]
        about_decode = decode_reason(decode, costs, why)
        if chosen.local:
            partners = self._partners.get(decode.id, [])
            about_prefill = local_reason(
                decode, self._prefillers, partners, chosen.ttft_s, self._routing.disaggregate
            )
        else:
            ways = [(o.prefill, o.ttft_s) for o in options if o.decode is decode and not o.local]
            at_home = self._homes.get(decode.id) == chosen.prefill.worker.id
            about_prefill = prefill_reason(chosen.prefill, ways, self._need.tokens, at_home)
        pull = self._pulls.of(chosen.prefill.worker.id)
        if pull is not None:
            about_prefill += f"; {pull.reason}"
        return Placement(
            decode.id,
            None if chosen.local else chosen.prefill.worker.id,
            self._need.reserve_blocks(decode),
            chosen.prefill.compute_tokens,
            f"{about_decode}; {about_prefill}",
            tuple(_considered(option) for option in options),
            pull,
        )


def _considered(option: _Option) -> Considered:
    prefill = option.prefill
    return Considered(
        decode=option.decode.id.name,
        prefill=None if option.local else prefill.worker.id.name,
        compute_tokens=prefill.compute_tokens,
        queue_s=prefill.queue_s,
        compute_s=prefill.compute_s,
        ttft_s=option.ttft_s,
        total_s=option.total_s,
    )


def _waits(worker: WorkerView) -> int:
    return worker.load.waiting_grants


def _why_no_decoder(usable: Sequence[WorkerView], need: Need) -> str:
    decoders = [w for w in usable if w.role is not Role.PREFILL]
    if not decoders:
        return "no decode worker is usable"
    return f"no usable decode worker can hold {need.tokens} tokens and more"
