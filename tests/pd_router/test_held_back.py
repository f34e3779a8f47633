"""Admission's classes over real gRPC: refused at once, held back until the workers' queues
are short, bursts that are spread before anybody has granted anything."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pd_core.failures import FailureKind, RequestFailure
from pd_router.admission import AdmissionConfig
from pd_router.classes import Client, Promises, RateLimit, SlaClass
from tests.pd_router.rig import rig, until

Run = Callable[[Any], Any]
PROMISES = Promises((SlaClass("batch"), SlaClass("fast", priority=1, ttft_s=1.0, share=0.5)))


def test_a_promise_that_cannot_be_kept_is_refused_and_others_wait(run: Run) -> None:
    async def body() -> None:
        async with rig(admission=AdmissionConfig(promises=PROMISES)) as r:
            prefill = await r.add("prefill", "p-0")
            await r.add("decode", "d-0")
            prefill.load.pending_tokens = 10_000_000  # at a million tokens a second
            view = next(v for v in r.workers.views() if v.id.name == "p-0")
            await until(lambda: view.pending_tokens == 10_000_000)
            with pytest.raises(RequestFailure) as caught:
                r.start(sla="fast")
            assert caught.value.failure.kind is FailureKind.OVERLOADED
            assert caught.value.failure.retry_after_s in (9, 10)
            request, sink, generation = r.start()
            assert r.sessions.counts().queued == 1
            await asyncio.sleep(0)
            assert not generation.started
            prefill.load.pending_tokens = 0
            await sink.wait()
            sink.assert_right(request)
            assert generation.timeline.queue_s > 0
            fast, sink, _ = r.start(sla="fast")
            await sink.wait()
            sink.assert_right(fast)
            await r.nothing_held()

    run(body())


def test_decode_without_room_is_a_reason_too(run: Run) -> None:
    async def body() -> None:
        async with rig(admission=AdmissionConfig(promises=PROMISES)) as r:
            await r.add("prefill", "p-0")
            decode = await r.add("decode", "d-0")
            await r.complete(sla="fast")
            view = next(v for v in r.workers.views() if v.id.name == "d-0")
            assert view.stay_s > 0, "how long it kept its room"
            view.stay_s = 100.0
            decode.load.kv_free = 0
            decode.load.waiting_grants = 5
            await until(lambda: view.load.waiting_grants == 5)
            with pytest.raises(RequestFailure, match="the first token would take") as caught:
                r.start(sla="fast")
            assert caught.value.failure.kind is FailureKind.OVERLOADED
            decode.load.kv_free = decode.kv_blocks
            decode.load.waiting_grants = 0
            await until(lambda: view.load.waiting_grants == 0)
            await r.complete(sla="fast")

    run(body())


def test_what_is_cached_need_not_be_computed(run: Run) -> None:
    prompt = tuple(range(1, 402))  # 400 tokens of it are whole blocks

    async def body() -> None:
        async with rig(admission=AdmissionConfig(promises=PROMISES)) as r:
            prefill = await r.add("prefill", "p-0")
            await r.add("decode", "d-0")
            view = next(v for v in r.workers.views() if v.id.name == "p-0")
            view.tokens_per_s = 100.0  # four seconds for all of it
            with pytest.raises(RequestFailure, match=r"would take 4\.0 s"):
                r.start(prompt=prompt, sla="fast")
            prefill.gained = prefill.known_prefix(prompt)
            await until(lambda: r.workers.prefixes.count(view.id) == 100)
            await r.complete(prompt=prompt, sla="fast")

    run(body())


def test_an_unknown_class_and_a_rate(run: Run) -> None:
    async def body() -> None:
        promises = Promises((SlaClass("one"),), RateLimit(requests_per_minute=1, burst_s=1))
        async with rig(admission=AdmissionConfig(promises=promises)) as r:
            await r.add("both", "b-0")
            with pytest.raises(RequestFailure, match="there are one") as caught:
                r.start(sla="two")
            assert caught.value.failure.kind is FailureKind.INVALID_REQUEST
            await r.complete(tenant="a")
            with pytest.raises(RequestFailure, match="rate limit") as caught:
                r.start(tenant="a")
            assert caught.value.failure.retry_after_s == 60
            await r.complete(tenant="b")
            await r.nothing_held()

    run(body())


def test_output_that_was_not_put_out_comes_back(run: Run) -> None:
    """A tenant may have a thousand tokens at once, and each request may put out eight hundred."""
    limit = RateLimit(tokens_per_minute=0.6, burst_s=100_000.0)

    async def body() -> None:
        async with rig(admission=AdmissionConfig(promises=Promises(limit=limit))) as r:
            await r.add("prefill", "p-0")
            decode = await r.add("decode", "d-0")
            gate = decode.gate("decode")
            for _ in range(9):  # each has used its prompt and a token
                _, sink, running = r.start(tenant="a", max_tokens=800)
                await sink.first_token()
                with pytest.raises(RequestFailure, match="rate limit"):
                    r.start(tenant="a", max_tokens=800)
                running.cancel()
            gate.set()
            decode.eos_at = 3
            _, sink, _ = r.start(tenant="a", max_tokens=800)
            await sink.wait()
            assert sink.done
            _, sink, _ = r.start(tenant="a", max_tokens=800)
            await sink.wait()
            assert sink.done

    run(body())


def test_a_clients_weight_counts_in_the_queue(run: Run) -> None:
    promises = Promises(clients={"heavy": Client(weight=3.0), "light": Client()})

    async def body() -> None:
        async with rig(admission=AdmissionConfig(max_running=1, promises=promises)) as r:
            worker = await r.add("both", "b-0")
            gate = worker.gate("prefill")
            begun = [r.start()]
            for _ in range(12):
                begun += [r.start(tenant=name, max_tokens=1) for name in ("light", "heavy")]
            gate.set()
            for _, sink, _ in begun:
                await sink.wait()
            ended = [
                request for line, _ in r.hooks.ends for request, _, g in begun if g.timeline is line
            ]
            assert Counter(one.tenant for one in ended[1:13]) == {"heavy": 9, "light": 3}

    run(body())


def test_a_burst_is_spread_before_decode_has_granted(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            for name in ("p-0", "p-1"):
                await r.add("prefill", name)
            decode = await r.add("decode", "d-0")
            decode.gates["grant"] = asyncio.Event()
            started = [r.start() for _ in range(6)]
            await until(lambda: len(decode.seen.generates) == 6)
            chosen = Counter(g.timeline.prefill_worker for _, _, g in started)
            assert chosen == {"p-0": 3, "p-1": 3}
            decode.gates["grant"].set()
            for request, sink, _ in started:
                await sink.wait()
                sink.assert_right(request)
            await r.nothing_held()

    run(body())


def test_a_cancelled_promise_is_taken_back(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            await r.add("prefill", "p-0")
            decode = await r.add("decode", "d-0")
            decode.gates["grant"] = asyncio.Event()
            _, _, generation = r.start()
            await until(lambda: len(decode.seen.generates) == 1)
            view = next(v for v in r.workers.views() if v.id.name == "p-0")
            assert view.own_tokens == 10
            generation.cancel()
            assert view.own_tokens == 0
            await r.nothing_held()

    run(body())
