"""What a real router and real workers tell of themselves is what the operator can scale by."""

import time

from pd_operator import measured
from pd_operator.api import Role
from pd_operator.measured import Samples
from pd_operator.podspec import ADMIN_PORT
from pd_operator.scaling.rates import History, extend, observe
from pd_operator.scaling.types import PoolSpec, Spec
from tests.cluster import Cluster, http_get
from tests.e2e.asking import body, text, text_of

REQUESTS = 12
OUTPUT_TOKENS = 40
SPEC = Spec((PoolSpec(Role.PREFILL, 1), PoolSpec(Role.DECODE, 1)))


def read(cluster: Cluster) -> Samples:
    [router] = cluster.pods("router")
    status, page = http_get(f"http://{router.ip}:{ADMIN_PORT}/sketches")
    assert status == 200
    return measured.parse(page.encode(), time.monotonic())


def test_signals_of_a_pair_that_works(cluster: Cluster) -> None:
    history = before = extend(History(), read(cluster))
    for number in range(REQUESTS):
        assert text(cluster, body(text_of(60, number=number), OUTPUT_TOKENS))

    def told() -> bool:
        """Heartbeats carry what workers did, a second later."""
        nonlocal history
        later = extend(before, read(cluster))
        done = {role: sum(one.tokens for one in works) for role, works in later.work.items()}
        history, came = later, later.points[-1].total
        return done.get(Role.PREFILL, 0) >= came.uncached_tokens and done.get(
            Role.DECODE, 0
        ) >= REQUESTS * (OUTPUT_TOKENS - 1)

    cluster.until(told, "the workers' own numbers", 20)
    seen = observe(history, SPEC)
    came = history.points[-1].total
    assert seen.complete
    assert came.arrived_requests == came.started_requests == REQUESTS
    assert came.arrived_tokens == came.started_tokens >= came.uncached_tokens > 0
    assert came.ended_tokens == REQUESTS * OUTPUT_TOKENS
    prefill, decode = seen.pools[Role.PREFILL], seen.pools[Role.DECODE]
    assert (prefill.workers, decode.workers, prefill.stale, decode.stale) == (1, 1, 0, 0)
    assert prefill.announced_tokens_per_s > 0
    assert decode.kv_tokens_each > 0
    [computed], [generated] = prefill.work, decode.work
    assert computed.tokens == came.uncached_tokens
    for work in (computed, generated):
        assert 0 < work.busy_s < 60
        assert work.steps > 0
    assert seen.queued_requests == seen.held_requests == 0
    assert sum(seen.uncached.values()) == REQUESTS
