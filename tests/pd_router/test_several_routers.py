"""Several routers at the same workers, each with real Sessions: how many there are, that they
don't herd on idle workers, and what a client may ask of all of them together."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from pd_core.failures import FailureKind, RequestFailure
from pd_router.admission import AdmissionConfig
from pd_router.classes import Promises, RateLimit
from tests.pd_router.fake_worker import FakeWorker
from tests.pd_router.rig import Recorder, Rig, ask, rig, until

pytestmark = pytest.mark.slow

Run = Callable[[Any], Any]


@asynccontextmanager
async def site(
    routers: int, workers: int, counts: bool = True, **options: Any
) -> AsyncIterator[tuple[list[Rig], list[FakeWorker]]]:
    """So many routers, and pairs of workers that are announced at all of them."""
    async with AsyncExitStack() as stack:
        rigs = [await stack.enter_async_context(rig(**options)) for _ in range(routers)]
        for number, r in enumerate(rigs):
            r.sessions._draw = partial(random.Random(number).getrandbits, 48)
        fakes = []
        for role in ("prefill", "decode"):
            for number in range(workers):
                fake = await rigs[0].add(role, f"{role[0]}-{number}")
                fake.counts_routers = counts
                fakes.append(fake)
                for r in rigs[1:]:
                    fake.announce_to(r.control)
        for r in rigs:
            await until(lambda r=r: all(r.usable(fake) for fake in fakes))
        if counts:
            await until(lambda: all(r.workers.routers == routers for r in rigs))
        yield rigs, fakes


def test_workers_tell_how_many_routers_there_are(run: Run) -> None:
    async def body() -> None:
        async with site(3, 1) as (rigs, fakes):
            assert [r.workers.routers for r in rigs] == [3, 3, 3]
            await rigs[2].workers.close()
            await until(lambda: rigs[0].workers.routers == 2)
            for fake in fakes:
                await fake.die()
            await until(lambda: rigs[0].workers.routers == 1, "nobody tells it any more")

    run(body())


def test_processes_are_the_least_that_there_are(run: Run) -> None:
    async def body() -> None:
        async with rig(control_ports=(7001, 7002, 7003)) as r:
            assert r.workers.routers == 3
            fake = await r.add("both", "w-0")
            await until(lambda: fake.announced_at == 1)
            assert r.workers.routers == 3

    run(body())


def test_routers_do_not_herd_on_idle_workers(run: Run) -> None:
    """Nothing runs, so nothing shows that there are others: each would take the first pair."""

    async def body() -> None:
        async with site(8, 4) as (rigs, fakes):
            for fake in fakes:
                fake.gate("grant")  # all choose before anything shows in loads
            for r in rigs:
                r.start()
            decodes = [fake for fake in fakes if fake.role == "decode"]
            await until(lambda: sum(len(fake.seen.generates) for fake in decodes) == len(rigs))
            chosen = Counter({fake.name: len(fake.seen.generates) for fake in decodes})
            assert max(chosen.values()) <= len(rigs) // 2, chosen
            assert len(+chosen) >= 3, chosen

    run(body())


def test_two_routers_together_give_a_client_its_limit(run: Run) -> None:
    limit = RateLimit(requests_per_minute=0.06, burst_s=20_000.0)  # twenty at once, then none
    admission = AdmissionConfig(promises=Promises(limit=limit))

    async def body() -> None:
        async with site(2, 1, admission=admission) as (rigs, _):
            sinks = []
            for r in rigs:
                for _ in range(10):
                    sinks.append(Recorder())
                    r.sessions.start(ask(max_tokens=1, tenant="a"), sinks[-1])
                with pytest.raises(RequestFailure) as refused:
                    r.sessions.start(ask(max_tokens=1, tenant="a"), Recorder())
                assert refused.value.failure.kind is FailureKind.OVERLOADED
            for sink in sinks:
                await sink.wait()

    run(body())


def test_workers_that_do_not_count_leave_it_to_be_seen(run: Run) -> None:
    async def body() -> None:
        async with site(2, 1, counts=False) as (rigs, fakes):
            decode = fakes[1]
            gate = decode.gate("decode")
            for _ in range(8):
                rigs[1].start(max_tokens=4)
            rigs[0].start(max_tokens=4)
            await until(lambda: rigs[0].workers.routers > 2, "others' sequences show")
            assert rigs[1].workers.routers < 2
            gate.set()

    run(body())
