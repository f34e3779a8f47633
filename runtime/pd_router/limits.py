"""How much each tenant may ask for: buckets of requests and tokens. Pure, bounded.

A router counts what it sees itself; `routers` divides the limit among those that are live.
A request takes what it may put out at most, and gives back what it didn't when it ends.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pd_router.classes import RateLimit

MAX_TENANTS = 10_000
"""Beyond them the one that was quiet for longest starts anew, with a full bucket."""
_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """`level` of `full` is there; it fills by `rate` a second."""

    level: float
    at: float

    def fill(self, rate: float, full: float, now: float) -> None:
        self.level = min(full, self.level + max(now - self.at, 0.0) * rate)
        self.at = now


class RateLimits:
    """Who asks for too much, and when to come again."""

    def __init__(self, limit_of: Callable[[str], RateLimit]) -> None:
        """`limit_of` a tenant."""
        self._limit_of = limit_of
        self._tenants: OrderedDict[str, tuple[_Bucket, _Bucket]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenants)

    def take(self, tenant: str, tokens: int, now: float, routers: float = 1.0) -> float:
        """Takes one request of so many tokens: 0. Or takes nothing: seconds to wait.

        A request larger than the bucket passes when the bucket is full, and leaves a debt:
        else it could never pass.
        """
        limit = self._limit_of(tenant)
        requests_s, tokens_s = (
            None if rate is None else rate / _MINUTE_S / max(routers, 1.0)
            for rate in (limit.requests_per_minute, limit.tokens_per_minute)
        )
        if requests_s is None and tokens_s is None:
            return 0.0
        wanted = ((requests_s, 1.0), (tokens_s, float(tokens)))
        buckets = self._of(tenant, limit.burst_s, requests_s or 0.0, tokens_s or 0.0, now)
        wait_s = 0.0
        for bucket, (rate, amount) in zip(buckets, wanted, strict=True):
            if rate is not None:
                full = max(rate * limit.burst_s, 1.0)
                bucket.fill(rate, full, now)
                wait_s = max(wait_s, (min(amount, full) - bucket.level) / rate)
        if wait_s > 1e-9:
            return wait_s
        for bucket, (rate, amount) in zip(buckets, wanted, strict=True):
            if rate is not None:
                bucket.level -= amount
        return 0.0

    def give_back(self, tenant: str, tokens: int) -> None:
        """A request ended with so many tokens of what it took not used."""
        found = self._tenants.get(tenant)
        if found is not None:
            found[1].level += tokens  # above what is full it's cut when it is next looked at

    def _of(
        self, tenant: str, burst_s: float, requests_s: float, tokens_s: float, now: float
    ) -> tuple[_Bucket, _Bucket]:
        found = self._tenants.get(tenant)
        if found is None:
            found = (
                _Bucket(max(requests_s * burst_s, 1.0), now),
                _Bucket(max(tokens_s * burst_s, 1.0), now),
            )
            self._tenants[tenant] = found
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return found
