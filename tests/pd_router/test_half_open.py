"""A worker that failed too often is tried again: by one request at a time, whose end alone
decides. Over real gRPC."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from pd_core.failures import Failure, FailureKind
from pd_router.fleet import WorkerId
from pd_router.moves import Suspect, WalkConfig
from pd_router.placing import RequestPlacer, first_need
from pd_router.policy import Exclusions, Placement
from pd_router.routing import Chance, Routing
from tests.pd_router.fake_worker import FakeWorker
from tests.pd_router.rig import Rig, ask, rig, until

pytestmark = pytest.mark.slow

Run = Callable[[Any], Any]
QUICK = WalkConfig(backoff_s=0.01)
BURST = 40
MANY = 10_000


class Prompts:
    """Each begins anew, and so may belong to any worker."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self) -> tuple[int, ...]:
        number = next(self._numbers)
        return tuple(range(number, number + 10))


def breaker(r: Rig, name: str) -> str:
    [found] = [str(one["breaker"]) for one in r.workers.snapshot() if one["worker"] == name]
    return found


def trip(r: Rig, worker: FakeWorker) -> None:
    """Opens its breaker: it failed as often as is too often."""
    fault, now = Failure(FailureKind.STEP_FAILED, "as told"), time.monotonic()
    suspect = Suspect(WorkerId(worker.name, worker.epoch), now)
    for number in range(5):
        r.workers.blame((suspect,), fault, now + number / 1000)
    assert breaker(r, worker.name) == "open"


async def fails_until_open(r: Rig, bad: FakeWorker) -> Prompts:
    """It fails each prompt, until nothing new goes there; prompts for later."""
    prompt = Prompts()
    bad.fail("prefill", FailureKind.STEP_FAILED, times=MANY)
    while breaker(r, bad.name) == "closed":
        await r.complete(prompt=prompt())
    return prompt


def test_a_prefill_worker_gets_one_request_of_a_burst(run: Run) -> None:
    """Its probe counts as soon as it's chosen: decode has yet to grant."""

    async def body() -> None:
        async with rig(walk=QUICK) as r:
            bad, good = [await r.add("prefill", f"p-{i}") for i in range(2)]
            decode = await r.add("decode", "d-0", kv_blocks=10_000)
            prompt = await fails_until_open(r, bad)
            bad.fail_next.clear()
            tried, seen = len(bad.seen.prefills), len(decode.seen.generates)
            grants, computes = decode.gate("grant"), bad.gate("prefill")
            await until(lambda: r.usable(bad), "it may be probed")
            asked = [r.start(prompt=prompt()) for _ in range(BURST)]
            await until(lambda: len(decode.seen.generates) == seen + BURST, "they wait for room")
            assert not r.usable(bad), "one is to go to it"
            grants.set()
            await until(lambda: len(bad.seen.prefills) > tried, "the probe is there")
            for request, sink, generation in asked:
                if generation.timeline.prefill_worker == good.name:
                    await sink.wait()
                    sink.assert_right(request)
            assert len(bad.seen.prefills) == tried + 1
            computes.set()
            for request, sink, _ in asked:
                await sink.wait()
                sink.assert_right(request)
            assert breaker(r, "p-0") == "closed"
            await r.nothing_held()

    run(body())


def test_a_probe_that_is_given_up_before_it_was_sent_leaves_its_place(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK) as r:
            bad, _ = [await r.add("prefill", f"p-{i}") for i in range(2)]
            decode = await r.add("decode", "d-0", kv_blocks=10_000)
            prompt = await fails_until_open(r, bad)
            grants = decode.gate("grant")
            await until(lambda: r.usable(bad), "it may be probed")
            asked = [r.start(prompt=prompt()) for _ in range(BURST)]
            await until(lambda: not r.usable(bad), "one is to go to it")
            for _, _, generation in asked:
                generation.cancel()
            await until(lambda: r.usable(bad), "another may go")
            assert breaker(r, "p-0") == "half_open"
            grants.set()

    run(body())


def test_of_choices_made_in_one_event_one_goes_there(run: Run) -> None:
    """A request with several choices to resume makes them before anything is opened."""

    async def body() -> None:
        async with rig() as r:
            bad, good = [await r.add("both", f"w-{i}") for i in range(2)]
            trip(r, bad)
            await until(lambda: r.usable(bad), "it may be probed")
            prompt = Prompts()
            chosen = []
            for _ in range(BURST):
                request = ask(prompt=prompt())
                place = RequestPlacer(r.workers, Routing(), Chance, request)
                found = place(first_need(request), Exclusions(), request.token_ids, None)
                assert isinstance(found, Placement)
                chosen.append(found.decode.name)
            assert chosen.count(bad.name) <= 1
            assert chosen.count(good.name) >= BURST - 1
            await until(lambda: r.usable(bad), "nothing was opened: another may go")

    run(body())


@pytest.mark.parametrize("probing", [False, True])
def test_failures_of_what_was_sent_before_do_not_open_it_again(run: Run, probing: bool) -> None:
    async def body() -> None:
        async with rig(walk=QUICK, late_s=30.0) as r:
            bad = await r.add("both", "w-0")
            slow = bad.gate("decode")
            old, old_sink, _ = r.start(max_tokens=3)
            await old_sink.first_token()
            await r.add("both", "w-1")
            trip(r, bad)

            def probed() -> bool:
                bad.steps += 1  # it moves
                return r.usable(bad)

            await until(probed, "it may be probed")
            if probing:
                bad.gate("prefill")
                prompt = Prompts()
                for _ in range(BURST):
                    r.start(prompt=prompt())
                await until(lambda: not r.usable(bad), "the probe is there")
            bad.fail("decode", FailureKind.STEP_FAILED)
            slow.set()
            await old_sink.wait()
            old_sink.assert_right(old)
            assert r.hooks.retries[-1].kind is FailureKind.STEP_FAILED
            assert breaker(r, "w-0") == "half_open"
            assert r.usable(bad) is not probing

    run(body())
