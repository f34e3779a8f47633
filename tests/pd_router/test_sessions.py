"""Requests over real gRPC against fake workers: the walk end to end, faults at each edge,
cancels at each stage, and what is left at the workers afterwards."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from pd_core.failures import FailureKind, RequestFailure
from pd_router.admission import AdmissionConfig
from pd_router.classes import Promises, SlaClass
from pd_router.hedging import Hedge
from pd_router.moves import WalkConfig
from pd_router.routing import Routing
from tests.pd_router.fake_worker import FakeWorker
from tests.pd_router.rig import Recorder, Rig, ask, rig, until

Run = Callable[[Any], Any]


async def pair(r: Rig) -> tuple[FakeWorker, FakeWorker]:
    return await r.add("prefill", "p-0"), await r.add("decode", "d-0")


def test_a_pair_serves_a_request(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            prefill, decode = await pair(r)
            line = await r.complete(max_tokens=20)
            assert (line.prefill_worker, line.decode_worker) == ("p-0", "d-0")
            assert (line.attempts, line.transport, line.kv_bytes) == (1, "tcp", 4096)
            assert line.grant_wait_s > 0
            assert line.prefill_s > 0
            assert "decode d-0: soonest" in line.reason
            assert not decode.seen.generates[0].prefill_here
            assert prefill.seen.prefills[0].target.kv_address == "kv-of-d-0"
            await r.nothing_held()
            assert r.hooks.ends == [(line, None)]

    run(body())


def test_workers_hear_what_a_class_was_promised_between_tokens(run: Run) -> None:
    classes = (SlaClass("std"), SlaClass("fast", tpot_s=0.05))

    async def body() -> None:
        async with rig(admission=AdmissionConfig(promises=Promises(classes))) as r:
            _, decode = await pair(r)
            for sla in (None, "fast"):
                await r.complete(sla=sla)
            assert [one.tpot_s for one in decode.seen.generates] == [0.0, 0.05]

    run(body())


@pytest.mark.parametrize("roles", [["both"], ["decode"], ["both", "prefill"]])
def test_without_a_usable_prefill_worker_decode_computes_the_prompt(
    run: Run, roles: list[str]
) -> None:
    async def body() -> None:
        async with rig() as r:
            fakes = [await r.add(role, f"w-{i}") for i, role in enumerate(roles)]
            line = await r.complete()
            assert fakes[0].seen.generates[0].prefill_here
            assert line.prefill_worker == line.decode_worker == "w-0"
            assert line.transport == ""
            await r.nothing_held()

    run(body())


def test_several_choices_and_several_requests_at_once(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            for name in ("p-0", "p-1"):
                await r.add("prefill", name)
            decoders = [await r.add("decode", name) for name in ("d-0", "d-1")]
            await asyncio.gather(
                *(r.complete(prompt=(i, 2, 3), choices=1 + i % 3) for i in range(40))
            )
            assert all(d.seen.generates for d in decoders), "both decode workers got some"
            assert sum(d.seen.messages for d in decoders) < 40, "commands are merged"
            await r.nothing_held()

    run(body())


def test_one_token_gives_the_grant_back(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            _, decode = await pair(r)
            gate = decode.gate("commit")
            await r.complete(max_tokens=1, choices=2)
            await r.nothing_held()
            assert decode.seen.cancels == [decode.seen.generates[0].handle]
            gate.set()

    run(body())


def test_an_end_token_first_ends_it(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            prefill, _ = await pair(r)
            prefill.eos_at = 0
            request, sink, _ = r.start()
            await sink.wait()
            assert sink.done
            assert sink.finish == {0: "stop"}
            assert len(sink.tokens[0]) == 1 < request.sampling.max_tokens
            await r.nothing_held()

    run(body())


# ---- refusals at once -------------------------------------------------------------------


def test_refusals_at_once(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            kinds = [refusal(r)]
            await r.add("prefill", "p-0")
            kinds.append(refusal(r))
            await r.add("decode", "d-0", kv_blocks=10, max_model_tokens=50)
            kinds.append(refusal(r, prompt=(1,) * 50))
            kinds.append(refusal(r, prompt=(1,) * 41))
            kinds.append(refusal(r, prompt=()))
            kinds.append(refusal(r, max_tokens=0))
            assert kinds == [
                FailureKind.NO_WORKERS,
                FailureKind.NO_WORKERS,
                FailureKind.CONTEXT_TOO_LONG,
                FailureKind.POOL_TOO_SMALL,
                FailureKind.INVALID_REQUEST,
                FailureKind.INVALID_REQUEST,
            ]
            assert r.sessions.counts().running == 0
            await r.complete(prompt=(1,) * 40, max_tokens=1)

    run(body())


def refusal(r: Rig, **options: Any) -> FailureKind:
    with pytest.raises(RequestFailure) as caught:
        r.start(**options)
    return caught.value.failure.kind


def test_admission_queues_then_refuses(run: Run) -> None:
    async def body() -> None:
        admission = AdmissionConfig(max_running=1, max_queued=1, queue_wait_s=0.3)
        async with rig(admission=admission) as r:
            _, decode = await pair(r)
            gate = decode.gate("decode")
            first, first_sink, _ = r.start()
            second, second_sink, generation = r.start()
            assert refusal(r) is FailureKind.OVERLOADED
            assert r.sessions.counts().queued == 1
            queued = time.monotonic()
            await asyncio.sleep(0.05)
            waited_s = time.monotonic() - queued
            gate.set()
            await first_sink.wait()
            first_sink.assert_right(first)
            await second_sink.wait()
            second_sink.assert_right(second)
            assert generation.timeline.queue_s >= waited_s
            gate.clear()
            _, held_sink, held = r.start()
            _, late_sink, _ = r.start()
            await late_sink.wait()
            assert late_sink.failure is not None
            assert late_sink.failure.kind is FailureKind.OVERLOADED
            held.cancel()
            await r.nothing_held()
            assert not held_sink.ended.is_set()

    run(body())


# ---- cancels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["start", "grant", "prefill", "seal", "commit", "decode"])
def test_cancel_frees_everything_at_any_stage(run: Run, stage: str) -> None:
    async def body() -> None:
        async with rig() as r:
            prefill, decode = await pair(r)
            worker = prefill if stage in ("prefill", "seal") else decode
            worker.gate(stage)
            _, sink, generation = r.start(max_tokens=100)
            reached = {
                "start": lambda: True,
                "grant": lambda: decode.held,
                "prefill": lambda: prefill.held,
                "seal": lambda: sink.tokens,
                "commit": lambda: sink.tokens and not prefill.held,
                "decode": lambda: sink.tokens and not r.kv.waiting and not prefill.held,
            }[stage]
            await until(reached, f"the request is at {stage}")
            generation.cancel()
            generation.cancel()
            assert r.sessions.counts().running == 0
            async with asyncio.timeout(1.0):
                await r.nothing_held()
            worker.gate(stage).set()
            await r.complete()
            assert not sink.ended.is_set()
            assert r.hooks.ends[0][1] is not None
            assert r.hooks.ends[0][1].kind is FailureKind.CLIENT_GONE

    run(body())


# ---- faults -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["die", "freeze", "silent"])
@pytest.mark.parametrize("spare", [True, False])
def test_a_worker_that_stops_while_requests_run(run: Run, role: str, how: str, spare: bool) -> None:
    """Each request ends right, on the spare worker, or the other role's own, or a newcomer."""

    async def body() -> None:
        async with rig(walk=WalkConfig(backoff_s=0.01)) as r:
            prefill, decode = await pair(r)
            if spare:
                await r.add(role, "spare-1")
            victim = prefill if role == "prefill" else decode
            gate = victim.gate("prefill" if role == "prefill" else "decode")
            runs = [r.start(prompt=(i, 1, 2, 3), max_tokens=30) for i in range(8)]
            await until(lambda: victim.held >= (4 if spare else 8), "requests are there")
            if role == "decode":
                await runs[0][1].first_token()
            if how == "die":
                await victim.die()
            elif how == "freeze":
                victim.freeze()
            else:
                victim.silent = True
            gate.set()
            if role == "decode" and not spare:
                await r.add("decode", "late-2")
            for request, sink, _ in runs:
                await sink.wait()
                sink.assert_right(request)
            assert r.hooks.retries
            assert all(f.kind in _GONE for f in r.hooks.retries)
            victim.thaw()
            victim.silent = False
            await r.nothing_held()

    run(body())


_GONE = (FailureKind.WORKER_LOST, FailureKind.WORKER_LATE)


@pytest.mark.parametrize("stage", ["generate", "prefill", "seal", "commit", "decode"])
@pytest.mark.parametrize(
    "kind", [FailureKind.STEP_FAILED, FailureKind.TRANSFER_FAILED, FailureKind.PREEMPTED]
)
@pytest.mark.parametrize("choices", [1, 3])
def test_a_typed_failure_is_retried(run: Run, stage: str, kind: FailureKind, choices: int) -> None:
    async def body() -> None:
        async with rig(walk=WalkConfig(backoff_s=0.01, verdict_wait_s=0.05)) as r:
            prefill, decode = await pair(r)
            worker = prefill if stage in ("prefill", "seal") else decode
            worker.fail(stage, kind)
            line = await r.complete(choices=choices)
            assert line.attempts >= 2
            assert "attempt" in line.reason
            assert [f.kind for f in r.hooks.retries] == [kind]
            await r.nothing_held()

    run(body())


def test_retries_have_an_end(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=WalkConfig(max_retries=2, backoff_s=0.01)) as r:
            worker = await r.add("both", "w-0")
            worker.fail("generate", FailureKind.LEASE_EXPIRED, times=9)
            _, sink, generation = r.start()
            await sink.wait()
            assert sink.failure is not None
            assert sink.failure.kind is FailureKind.LEASE_EXPIRED
            assert generation.timeline.attempts == 3
            await r.nothing_held()

    run(body())


def test_token_0_survives_the_prefill_workers_death_after_the_seal(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=WalkConfig(lost_wait_s=10.0)) as r:  # dying takes its time here
            prefill, decode = await pair(r)
            prefill.drop_prefilled = True
            gate = decode.gate("commit")
            request, sink, generation = r.start()
            await until(lambda: decode.held and not r.kv.waiting and not prefill.held)
            await prefill.die()
            gate.set()
            await sink.wait()
            sink.assert_right(request)
            assert generation.timeline.attempts == 1

    run(body())


@pytest.mark.parametrize("wins", ["the second", "the first"])
def test_a_prefill_that_hangs_is_hedged(run: Run, wins: str) -> None:
    async def body() -> None:
        async with rig(routing=Routing(hedge=Hedge(after_s=0.05))) as r:
            both = [await r.add("prefill", name) for name in ("p-0", "p-1")]
            decode = await r.add("decode", "d-0")
            gates = {worker.name: worker.gate("prefill") for worker in both}
            request, sink, generation = r.start()
            await until(lambda: any(w.seen.prefills for w in both), "the prompt is sent")
            slow, other = both if both[0].seen.prefills else both[::-1]
            slow_gate, other_gate = gates[slow.name], gates[other.name]
            await until(lambda: other.seen.prefills, "the hedge is sent")
            (other_gate if wins == "the second" else slow_gate).set()
            await sink.wait()
            sink.assert_right(request)
            ids = [message.id.attempt for message in decode.seen.generates]
            assert ids == [1, 2], "an attempt and a grant of its own"
            loser = slow if wins == "the second" else other
            await until(lambda: loser.seen.cancels, "the loser is told")
            slow_gate.set()
            other_gate.set()
            await r.nothing_held()
            assert r.hooks.hedges == [wins == "the second"]
            assert not r.hooks.retries
            line = generation.timeline
            assert line.prefill_worker == (other if wins == "the second" else slow).name
            assert f"{other.name} computed it too" in line.reason

    run(body())


def test_hedges_amplify_nothing(run: Run) -> None:
    """Forty requests hang on every prefill worker: two of them are tried twice, not forty."""

    async def body() -> None:
        async with rig(routing=Routing(hedge=Hedge(after_s=0.05))) as r:
            prefills = [await r.add("prefill", f"p-{i}") for i in range(2)]
            await r.add("decode", "d-0")
            gates = [worker.gate("prefill") for worker in prefills]
            started = [r.start(prompt=(i, 2, 3)) for i in range(40)]

            def asked() -> int:
                return sum(len(worker.seen.prefills) for worker in prefills)

            await until(lambda: asked() == 42)
            looks = 0

            def looked() -> bool:
                nonlocal looks
                looks += 1
                return looks > 100

            await until(looked)
            assert asked() == 42
            for gate in gates:
                gate.set()
            for request, sink, _ in started:
                await sink.wait()
                sink.assert_right(request)
            await r.nothing_held()
            assert len(r.hooks.hedges) >= 2

    run(body())


def test_no_decode_worker_comes_back(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=WalkConfig(worker_wait_s=0.3)) as r:
            _, decode = await pair(r)
            _, sink, _ = r.start(max_tokens=2000)
            await sink.first_token()
            await decode.die()
            await sink.wait()
            assert sink.failure is not None
            assert sink.failure.kind is FailureKind.NO_WORKERS
            assert not r.workers.ready()

    run(body())


def test_a_full_decode_worker(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            _, decode = await pair(r)
            decode.fail("generate", FailureKind.NO_CAPACITY)
            _, sink, _ = r.start()
            await sink.wait()
            assert sink.failure is not None
            assert sink.failure.kind is FailureKind.NO_CAPACITY
            spare = await r.add("decode", "d-1")
            decode.fail("generate", FailureKind.NO_CAPACITY)
            line = await r.complete()
            assert line.decode_worker == "d-1"
            assert spare.seen.generates

    run(body())


def test_the_deadline_ends_it(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            _, decode = await pair(r)
            decode.gate("grant")
            _, sink, _ = r.start(deadline_s=0.2)
            await sink.wait()
            assert sink.failure is not None
            assert sink.failure.kind is FailureKind.DEADLINE
            await r.nothing_held()

    run(body())


def test_a_sink_that_raises_loses_its_own_request_only(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            await pair(r)
            request, sink, _ = r.start(max_tokens=50)

            class Broken(Recorder):
                def on_token(self, *_: Any) -> None:
                    raise RuntimeError("as told")

            broken = Broken()
            r.sessions.start(ask(), broken)
            await broken.wait()
            assert broken.failure is not None
            assert broken.failure.kind is FailureKind.INTERNAL
            await sink.wait()
            sink.assert_right(request)
            await r.nothing_held()

    run(body())


def test_a_draining_worker_finishes_and_the_router_drains(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            _, decode = await pair(r)
            request, sink, _ = r.start(max_tokens=60)
            await sink.first_token()
            decode.state = 2
            await until(lambda: not r.workers.ready())
            assert refusal(r) is FailureKind.NO_WORKERS
            assert await r.sessions.drain(10.0)
            sink.assert_right(request)
            assert refusal(r) is FailureKind.DRAINING

    run(body())
