"""What a router keeps stays bounded: distinct prompts and sessions, tenants."""

import tracemalloc
from dataclasses import replace

import pytest

from pd_router.admission import Admission, AdmissionConfig, Ticket
from pd_router.classes import Promises, RateLimit, SlaClass
from pd_router.fleet import WorkerId
from pd_router.policy import Exclusions, Placement, place
from pd_router.prefixes import PrefixIndex, PromptHashes
from pd_router.routing import Chance
from tests.pd_router.test_costs import NEED, big_d, big_p


def _serve(numbers: range, index: PrefixIndex, admission: Admission) -> None:
    """Distinct prompts of distinct sessions and tenants, from the door to the end."""
    workers = [*[big_p(n) for n in range(2)], *[big_d(n) for n in range(2)]]
    for number in numbers:
        key = str(number)
        ticket = Ticket(key, tenant=f"tenant-{number % 20_000}", work=64, tokens=80)
        admission.offer(key, ticket=ticket, now=float(number))
        hashes = PromptHashes([number % 50_000, *range(63)])
        need = replace(NEED, tokens=64, session=b"session-%d" % (number % 10_000))
        found = place(
            need,
            workers,
            lambda view, hashes=hashes: index.cached_tokens(view.id, hashes, view.block_tokens),
            Exclusions(),
            chance=Chance(number, number),
        )
        assert isinstance(found, Placement)
        gained = [hashes.at(16, block) or b"" for block in range(4)]
        index.update(WorkerId(f"p-{number % 2}", "e"), gained)
        admission.release(key)


@pytest.mark.slow
def test_distinct_prompts_and_sessions_leave_memory_flat() -> None:
    index = PrefixIndex(limit=2_000)
    promises = Promises((SlaClass(),), RateLimit(requests_per_minute=1e6))
    admission = Admission(AdmissionConfig(promises=promises))
    _serve(range(40_000), index, admission)  # every bound is reached
    tracemalloc.start()
    try:
        _serve(range(40_000, 41_000), index, admission)
        before, _ = tracemalloc.get_traced_memory()
        _serve(range(41_000, 50_000), index, admission)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What is replaced is traced anew: at most all that is kept, whatever is served.
    kept = 2 * 2_000 * 250 + 10_000 * 800
    assert after - before < kept
    assert index.count(WorkerId("p-0", "e")) == index.count(WorkerId("p-1", "e")) == 2_000
