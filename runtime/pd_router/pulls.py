"""Whether a prompt's beginning is copied from a worker that has it, or computed anew. Pure.

The worker that is to compute a prompt may have forgotten what another one still holds: a
session's decode worker mostly has all of its last turn. A copy takes its bytes over the link
(pd_core's estimate) and some round trips, computing takes what `costs` predicts; the sooner one
is done, and the copy only as long as it can still be sooner. It's a copy in the same precision
and block size: what would have to be converted wouldn't be what the worker had computed.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pd_core.estimate import Link, carry_s
from pd_core.kv import convertible
from pd_router.costs import CachedTokens, Prefill
from pd_router.fleet import WorkerId, WorkerView

_ASKING_S = 0.01
"""A grant, word of it to the holder, the commit: whatever the size."""


@dataclass(frozen=True, slots=True)
class PullRules:
    """`most_of_computing`: a copy must promise to take less than that share of computing what
    it brings. `least_gain_s`: and to be sooner by so much, as predictions aren't better.
    `limit_share`: of computing's time, after so much of it the copy is given up; never earlier
    than after `least_limit_s`, nor later than after `most_limit_s`: decode has granted its room
    already, and waits for a first frame."""

    most_of_computing: float = 0.5
    least_gain_s: float = 0.02
    limit_share: float = 0.8
    least_limit_s: float = 0.05
    most_limit_s: float = 30.0


USUAL = PullRules()


class Broken:
    """Pairs of workers whose last copy failed: for a while the next would, too, and each costs
    a prompt its limit. A worker that starts again is another one."""

    def __init__(self, for_s: float = 30.0, most: int = 4096) -> None:
        """Of more than `most` the oldest are forgotten."""
        self._for_s = for_s
        self._most = most
        self._until: OrderedDict[tuple[WorkerId, WorkerId], float] = OrderedDict()

    def failed(self, holder: WorkerId, target: WorkerId, now: float) -> None:
        self._until[holder, target] = now + self._for_s
        self._until.move_to_end((holder, target))
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def between(self, holder: WorkerId, target: WorkerId, now: float) -> bool:
        return self._until.get((holder, target), now) > now


def none_broken(holder: WorkerId, target: WorkerId) -> bool:
    """Where nothing is known of failed copies."""
    del holder, target
    return False


@dataclass(frozen=True, slots=True)
class Pull:
    """A copy of a prompt's first `blocks`, from who holds them to who computes the rest."""

    holder: WorkerId
    target: WorkerId
    blocks: int
    block_tokens: int
    new_tokens: int  # of them, those that the target lacks
    take_s: float  # predicted
    save_s: float  # what computing them would take
    limit_s: float  # it's given up then

    @property
    def tokens(self) -> int:
        """Of the prompt's beginning that the target has then."""
        return self.blocks * self.block_tokens

    @property
    def reason(self) -> str:
        return (
            f"{self.new_tokens} tokens pulled from {self.holder.name}: "
            f"{self.take_s:.3f} s, computed {self.save_s:.3f} s"
        )


class Pulls:
    """For one request: what copies would gain, by worker that would compute the prompt."""

    def __init__(
        self,
        workers: Iterable[WorkerView],
        cached_tokens: CachedTokens,
        link: Link,
        rules: PullRules | None,
        broken: Callable[[WorkerId, WorkerId], bool] = none_broken,
    ) -> None:
        """`workers`: those that may be asked for a copy, but for pairs that are `broken`. No
        rules: there are none."""
        self._workers = workers
        self._cached_tokens = cached_tokens
        self._link = link
        self._rules = rules
        self._broken = broken
        self._holders: list[tuple[int, WorkerView]] | None = None
        self._found: dict[WorkerId, Pull] = {}

    def of(self, worker: WorkerId) -> Pull | None:
        """The copy that `better` has found for it."""
        return self._found.get(worker)

    def better(self, alone: Prefill, behind: Callable[[WorkerView, int], Prefill]) -> Prefill:
        """A prompt's computing at a worker, with a copy where that makes it sooner. `behind`
        tells what computing takes behind so many tokens that are there. The copy comes while
        the prompt waits for its turn."""
        worker, rules = alone.worker, self._rules
        if rules is None or alone.compute_s <= rules.least_gain_s or not worker.shares_prefixes:
            return alone
        cached = self._cached_tokens(worker)
        held, holder = self._best(worker, cached)
        if holder is None:
            return alone
        rest = behind(worker, held)
        save_s = alone.compute_s - rest.compute_s
        take_s = _ASKING_S + self._carry_s(worker, (held - cached) * holder.kv_token_bytes)
        if take_s > rules.most_of_computing * save_s or save_s - take_s < rules.least_gain_s:
            return alone
        self._found[worker.id] = Pull(
            holder=holder.id,
            target=worker.id,
            blocks=held // worker.block_tokens,
            block_tokens=worker.block_tokens,
            new_tokens=held - cached,
            take_s=take_s,
            save_s=save_s,
            limit_s=min(rules.most_limit_s, max(rules.least_limit_s, rules.limit_share * save_s)),
        )
        return replace(rest, queue_s=max(rest.queue_s, take_s))

    def _best(self, worker: WorkerView, cached: int) -> tuple[int, WorkerView | None]:
        """Who has most of the prompt, and of those the least to do."""
        if self._holders is None:
            self._holders = [
                (held, w)
                for w in self._workers
                if w.shares_prefixes and w.reachable and (held := self._cached_tokens(w))
            ]
            self._holders.sort(key=lambda one: (-one[0], one[1].running, one[1].ordinal))
        for held, holder in self._holders:
            if held <= cached:
                break
            if holder is worker or self._broken(holder.id, worker.id):
                continue
            if _same(holder, worker):
                return held, holder
        return 0, None

    def _carry_s(self, worker: WorkerView, size: float) -> float:
        link = self._link
        if worker.link_bytes_s:
            link = Link(link.name, worker.link_bytes_s, link.round_trip_s)
        return carry_s(size, link)


def _same(holder: WorkerView, worker: WorkerView) -> bool:
    """Whether a copy is what the worker would have computed itself."""
    a, b = holder.kv, worker.kv
    return (a.dtype, a.block_tokens) == (b.dtype, b.block_tokens) and convertible(a, b) is None
