"""Announcements, bundles, lapse, restarts, links, lateness: over real gRPC."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_core.failures import FailureKind
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from pd_router import affinity
from pd_router.fleet import Role, WorkerView
from pd_router.moves import WalkConfig
from pd_router.prefixes import PromptHashes
from pd_router.types import Bundle, Limits
from pd_router.workers import Workers, WorkersConfig
from tests.pd_router.fake_worker import FakeWorker
from tests.pd_router.rig import Rig, rig, until

pytestmark = pytest.mark.slow

Run = Callable[[Any], Any]
QUICK = WalkConfig(backoff_s=0.01)


def view_of(r: Rig, fake: FakeWorker) -> WorkerView:
    return next(v for v in r.workers.views() if v.id.epoch == fake.epoch)


def entry_of(r: Rig, name: str) -> dict[str, Any]:
    return next(entry for entry in r.workers.snapshot() if entry["worker"] == name)


def test_speeds_by_length_are_learned_from_heartbeats(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            worker = await r.add("prefill", "p-0")
            view = view_of(r, worker)
            assert view.product == "NVIDIA H100 PCIe"
            load, tokens = worker.load, 0
            for number in range(1, 30):
                tokens = 1000 * (1 + number % 5)
                worker.steps += 1
                load.busy_s += 1e-4 * tokens + 1e-8 * tokens * tokens / 2
                load.computed_tokens += tokens
                load.computed_pairs += tokens * tokens // 2
                load.pending_pairs = number
                await until(lambda n=number: view.load.pending_pairs == n)
            assert view.fit.speed is not None
            assert view.fit.speed.token_s == pytest.approx(1e-4, rel=0.05)
            assert view.fit.speed.pair_s == pytest.approx(1e-8, rel=0.05)
            assert view.pending_pairs == 29

    run(body())


def test_new_prefixes_go_to_their_homes(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            for number in range(4):
                await r.add("prefill", f"p-{number}")
            await r.add("decode", "d-0")
            prefillers = [v for v in r.workers.views() if v.role is Role.PREFILL]
            seen = set()
            for first in range(6):
                prompt = (first, *range(40))
                key = PromptHashes(prompt).at(prefillers[0].block_tokens, 0)
                assert key is not None
                home = affinity.owner(key, prefillers)
                assert home is not None
                line = await r.complete(prompt=prompt)
                assert line.prefill_worker == home.id.name
                seen.add(home.id.name)
            assert len(seen) > 1

    run(body())


def test_a_new_router_waits_for_a_worker_that_decodes(run: Run) -> None:
    async def body() -> None:
        async with rig(settle_s=60.0) as r:
            settled = asyncio.create_task(r.workers.settled())
            assert r.workers.expecting()
            await r.add("prefill", "p-0")
            await asyncio.sleep(0)
            assert not settled.done()
            await r.add("decode", "d-0")
            async with asyncio.timeout(5):
                await settled

    run(body())


def test_a_new_router_waits_no_longer_than_workers_take_to_find_it(run: Run) -> None:
    async def body() -> None:
        async with rig(settle_s=0.1) as r, asyncio.timeout(5):
            await r.workers.settled()
            assert not r.workers.expecting()

    run(body())


def test_an_announced_worker_is_known_with_its_bundle(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            bundles: list[Bundle] = []
            r.workers.on_bundle(bundles.append)
            assert not r.workers.expecting()
            assert r.workers.limits() is None
            assert r.workers.bundle() is None
            await r.add("prefill", "p-0", kv_blocks=9000)
            assert r.workers.expecting()
            assert not r.workers.ready()
            await r.add("decode", "d-0", kv_blocks=10, max_model_tokens=100)
            await r.add("decode", "d-1", kv_blocks=20, max_model_tokens=60)
            assert r.workers.ready()
            assert r.workers.limits() == Limits(context_tokens=60, pool_tokens=80)
            await until(r.workers.bundle)
            assert bundles == [r.workers.bundle()]
            assert bundles[0].bundle_hash == "bundle-1"
            entry = entry_of(r, "d-1")
            assert entry["usable"]
            assert entry["why_unusable"] is None
            assert entry["role"] == "decode"
            json.dumps(r.workers.snapshot())

    run(body())


def test_who_doesnt_fit_is_refused_with_the_reason(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            wrong = await r.join("decode", "d-0", model="other")
            await until(lambda: wrong.refusals)
            assert "serves 'fake', not 'other'" in wrong.refusals[0]
            for spoil, text in [
                ({"role": 0}, "role"),
                ({"work_address": ""}, "work_address"),
                ({"capacity": pb.Capacity(max_model_tokens=5)}, "kv_blocks"),
                ({"capacity": pb.Capacity(kv_blocks=5)}, "max_model_tokens"),
            ]:
                hello = FakeWorker("decode", "d-1", r.kv).hello()
                for name, value in spoil.items():
                    hello.ClearField(name)
                    if isinstance(value, pb.Capacity):
                        hello.capacity.CopyFrom(value)
                notice = await say(r, pb.WorkerReport(hello=hello))
                assert text in notice.refusal.reason
            beat = await say(r, pb.WorkerReport(heartbeat=pb.Heartbeat()))
            assert "Hello" in beat.refusal.reason
            assert r.workers.snapshot() == []

    run(body())


async def say(r: Rig, report: pb.WorkerReport) -> pb.RouterNotice:
    async with grpc.aio.insecure_channel(r.control) as channel:
        call = engine_pb2_grpc.ControlStub(channel).Announce()
        await call.write(report)
        notice = await call.read()
        call.cancel()
    assert isinstance(notice, pb.RouterNotice)
    return notice


def test_the_bundle_follows_the_workers(run: Run) -> None:
    async def body() -> None:
        async with rig(forget_s=0.3) as r:
            old = await r.add("decode", "d-0")
            await until(r.workers.bundle)
            new = await r.join("decode", "d-1")
            new.bundle_hash = "bundle-2"
            await until(lambda: r.usable(new))
            current = r.workers.bundle()
            assert current is not None
            assert current.bundle_hash == "bundle-1"
            await old.die()
            await until(lambda: r.workers.bundle() is not current)
            newer = r.workers.bundle()
            assert newer is not None
            assert newer.bundle_hash == "bundle-2"
            await new.die()
            await until(lambda: not r.workers.snapshot())
            assert r.workers.bundle() is newer, "requests that wait can be tokenized"

    run(body())


def test_heartbeats_bring_load_and_prefixes(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            a, b = await r.add("prefill", "p-0"), await r.add("prefill", "p-1")
            await r.add("decode", "d-0")
            prompt = tuple(range(40))
            b.gained = b.known_prefix(prompt[:32])
            b.load.pending_tokens = 20
            b.load.kv_free = 900
            await until(lambda: r.workers.prefixes.count(view_of(r, b).id) == 8)
            assert view_of(r, b).kv_used == 100
            line = await r.complete(prompt=prompt)
            assert line.prefill_worker == "p-1", "20 pending + 8 uncached < 40"
            a.load.pending_tokens = 0
            b.load.pending_tokens = 100
            await until(lambda: view_of(r, b).pending_tokens == 100)
            assert (await r.complete(prompt=prompt)).prefill_worker == "p-0"

    run(body())


def test_a_drained_worker_gets_nothing_new(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            await r.add("prefill", "p-0")
            old, new = await r.add("decode", "d-0"), await r.add("decode", "d-1")
            lost: list[Role] = []
            r.workers.on_lost(lost.append)
            old.state = pb.WORKER_STATE_DRAINING
            await until(lambda: not r.usable(old))
            assert entry_of(r, "d-0")["why_unusable"] == "it drains"
            for _ in range(3):
                assert (await r.complete()).decode_worker == "d-1"
            assert not old.seen.generates
            assert new.seen.generates
            await old.die()
            await until(lambda: all(v.id.epoch != old.epoch for v in r.workers.views()))
            await r.add("decode", "d-0")
            assert not lost, "it had said that it goes"

    run(body())


def test_a_frozen_worker_lapses_and_its_stale_handles_are_cancelled_on_waking(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK, late_s=30.0) as r:
            await r.add("prefill", "p-0")
            frozen = await r.add("decode", "d-0")
            request, sink, _ = r.start(max_tokens=200)
            await sink.first_token()
            handle = frozen.seen.generates[0].handle
            frozen.freeze()
            await until(lambda: not r.usable(frozen))
            assert not r.workers.ready()
            assert "heartbeats" in entry_of(r, "d-0")["why_unusable"]
            await r.add("decode", "d-1")
            await sink.wait()
            sink.assert_right(request)
            frozen.thaw()
            await until(lambda: handle in frozen.seen.cancels, "the stale handle is cancelled")
            await until(lambda: r.usable(frozen), "it is back")
            await r.nothing_held()
            assert [f.kind for f in r.hooks.retries] == [FailureKind.WORKER_LATE]

    run(body())


def test_an_announcement_that_ends_means_nothing_new_and_then_lapses(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK, forget_s=1.0) as r:
            mute = await r.add("both", "w-0")
            request, sink, _ = r.start(max_tokens=500)
            await sink.first_token()
            mute.stop_announcing()
            await until(lambda: not r.usable(mute))
            assert entry_of(r, "w-0")["why_unusable"] == "its announcement has ended"
            assert not r.hooks.retries, "what runs goes on for now"
            await r.add("both", "w-1")
            await until(lambda: r.hooks.retries)
            await until(lambda: [e["worker"] for e in r.workers.snapshot()] == ["w-1"])
            await until(lambda: mute.held == 0)
            await sink.wait()
            sink.assert_right(request)

    run(body())


def test_an_announcement_that_comes_again_in_time_loses_nothing(run: Run) -> None:
    async def body() -> None:
        async with rig(lapse_s=3.0) as r:
            worker = await r.add("both", "w-0")
            request, sink, _ = r.start(max_tokens=150)
            await sink.first_token()
            worker.stop_announcing()
            await until(lambda: not r.usable(worker))
            worker.announce_to(r.control)
            await until(lambda: r.usable(worker))
            await sink.wait()
            sink.assert_right(request)
            assert not r.hooks.retries
            assert len(r.workers.snapshot()) == 1

    run(body())


def test_a_restarted_worker_on_the_same_address_is_somebody_else(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK, lapse_s=30.0) as r:
            await r.add("prefill", "p-0")
            old = await r.add("decode", "d-0")
            request, sink, _ = r.start(max_tokens=100)
            await sink.first_token()
            port = old.port
            lost: list[Role] = []
            r.workers.on_lost(lost.append)
            await old.die()
            new = await r.add("decode", "d-0", port=port)
            assert lost == [Role.DECODE]
            assert new.epoch != old.epoch
            await sink.wait()
            sink.assert_right(request)
            assert [v.id.epoch for v in r.workers.views() if v.id.name == "d-0"] == [new.epoch]
            await r.complete()
            await r.nothing_held()

    run(body())


def test_a_new_epoch_replaces_the_old_one_at_once(run: Run) -> None:
    """Even when the old process still runs: its requests fail over, its stream ends."""

    async def body() -> None:
        async with rig(walk=QUICK, lapse_s=30.0) as r:
            old = await r.add("both", "w-0")
            request, sink, _ = r.start(max_tokens=100)
            await sink.first_token()
            old.stop_announcing()
            new = await r.add("both", "w-0")
            await sink.wait()
            sink.assert_right(request)
            assert new.seen.generates[0].prompt_tokens == len(request.token_ids)
            assert len(new.seen.generates[0].token_ids) > len(request.token_ids)
            await until(lambda: old.held == 0)
            assert [f.kind for f in r.hooks.retries] == [FailureKind.WORKER_LOST]

    run(body())


def test_a_broken_work_stream_is_dialled_anew(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK) as r:
            worker = await r.add("both", "w-0")
            request, sink, _ = r.start(max_tokens=60)
            await sink.first_token()
            worker.cut_streams()
            await sink.wait()
            sink.assert_right(request)
            assert [f.kind for f in r.hooks.retries] == [FailureKind.WORKER_LOST]
            await r.nothing_held()

    run(body())


def test_an_address_where_somebody_else_answers_is_not_used(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            worker = await r.join("both", "w-0")
            worker.answers_as = "another-epoch"
            await until(lambda: worker.binds >= 2, "it is tried again")
            assert not r.usable(worker)
            assert entry_of(r, "w-0")["why_unusable"] == "no work stream"
            worker.answers_as = worker.epoch
            await until(lambda: r.usable(worker))

    run(body())


def test_a_late_worker_is_left_alone_then_probed(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK) as r:
            worker = await r.add("both", "w-0")
            worker.silent = True
            request, sink, _ = r.start()
            await until(lambda: entry_of(r, "w-0")["breaker"] == "open")
            assert not r.workers.ready()
            worker.silent = False
            await sink.wait()
            sink.assert_right(request)
            assert entry_of(r, "w-0")["breaker"] == "closed"
            assert [f.kind for f in r.hooks.retries] == [FailureKind.WORKER_LATE]
            assert "no step seen" in r.hooks.retries[0].message

    run(body())


@pytest.mark.parametrize(
    ("role", "stage", "kind", "most"),
    [
        ("both", "generate", FailureKind.STEP_FAILED, 15),
        ("prefill", "prefill", FailureKind.STEP_FAILED, 15),
        ("decode", "decode", FailureKind.STEP_FAILED, 15),
        # Half of the blame each time: the other end may be at fault. It gave a token 0 before.
        ("prefill", "seal", FailureKind.TRANSFER_FAILED, 25),
        ("decode", "commit", FailureKind.TRANSFER_FAILED, 25),
    ],
)
def test_a_worker_that_fails_fast_gets_only_probes_until_it_works(
    run: Run, role: str, stage: str, kind: FailureKind, most: int
) -> None:
    async def body() -> None:
        async with rig(walk=QUICK) as r:
            bad, good = [await r.add(role, f"w-{i}") for i in range(2)]
            for other in {"both": (), "prefill": ("decode",), "decode": ("prefill",)}[role]:
                await r.add(other, f"o-{other}")
            bad.fail(stage, kind, times=10_000)
            for number in range(60):  # each prompt begins anew, and may belong to either
                await r.complete(prompt=tuple(range(number, number + 10)))
            tried = len(bad.seen.prefills if role == "prefill" else bad.seen.generates)
            assert 5 <= tried <= most, "five open the breaker, a few may have been probes"
            entry = entry_of(r, "w-0")
            assert entry["breaker"] != "closed"
            assert "as told" in (entry["why_unusable"] or "as told")
            assert entry_of(r, good.name)["breaker"] == "closed"
            bad.fail_next.clear()
            await until(lambda: r.usable(bad), "it may be probed")
            [half_open] = [v for v in r.workers.views() if v.id.name == bad.name]
            assert not half_open.reachable, "a copy would take the probe"
            for number in range(60):
                await r.complete(prompt=tuple(range(number, number + 10)))
                if entry_of(r, "w-0")["breaker"] == "closed":
                    break
            else:
                pytest.fail("it works, and nobody noticed")
            await r.nothing_held()

    run(body())


def test_a_requests_own_fault_counts_against_nobody(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK) as r:
            workers = [await r.add("both", f"w-{i}") for i in range(2)]
            for worker in workers:
                worker.fail("generate", FailureKind.INVALID_REQUEST, times=20)
            for _ in range(40):
                _, sink, _ = r.start()
                await sink.wait()
            assert not any(one.fail_next["generate"] for one in workers[:1])
            assert all(r.usable(worker) for worker in workers)

    run(body())


def test_where_all_fail_somebody_still_tries(run: Run) -> None:
    async def body() -> None:
        async with rig(walk=QUICK) as r:
            workers = [await r.add("both", f"w-{i}") for i in range(2)]
            for worker in workers:
                worker.fail("generate", FailureKind.INTERNAL, times=100)
            for _ in range(30):
                _, sink, _ = r.start()
                await sink.wait()
                assert sink.failure is not None
                assert sink.failure.kind is FailureKind.INTERNAL, "no worker is usable?"
            assert r.workers.ready()

    run(body())


def test_a_worker_that_steps_for_others_is_not_late(run: Run) -> None:
    """Its heartbeats count steps: the request here waits its turn."""

    async def body() -> None:
        async with rig() as r:
            worker = await r.add("both", "w-0")
            worker.silent = True
            _, sink, generation = r.start()
            for _ in range(12):
                worker.steps += 1
                await asyncio.sleep(0.1)
            assert not r.hooks.retries
            assert not sink.tokens
            generation.cancel()

    run(body())


def test_a_request_that_waits_for_room_doesnt_make_its_worker_late(run: Run) -> None:
    async def body() -> None:
        async with rig() as r:
            await r.add("prefill", "p-0")
            decode = await r.add("decode", "d-0")
            gate = decode.gate("grant")
            request, sink, generation = r.start()
            await asyncio.sleep(1.0)
            assert generation.timeline.attempts == 1
            gate.set()
            await sink.wait()
            sink.assert_right(request)
            assert not r.hooks.retries

    run(body())


def test_leases_are_renewed_at_both_ends(run: Run) -> None:
    async def body() -> None:
        async with rig(renew_s=0.1) as r:
            prefill, decode = await r.add("prefill", "p-0"), await r.add("decode", "d-0")
            prefill.gate("prefill")
            _, _, generation = r.start()
            await until(lambda: prefill.seen.renewed and decode.seen.renewed)
            assert prefill.seen.renewed == {prefill.seen.prefills[0].handle}
            assert decode.seen.renewed == {decode.seen.generates[0].handle}
            generation.cancel()
            await r.nothing_held()
            prefill.seen.renewed.clear()
            await asyncio.sleep(0.3)
            assert not prefill.seen.renewed

    run(body())


def test_a_worker_that_doesnt_read_keeps_little_waiting(run: Run) -> None:
    async def body() -> None:
        async with rig(renew_s=0.01, lapse_s=30.0, late_s=30.0) as r:
            worker = await r.add("both", "w-0")
            r.start()
            await until(lambda: worker.held)
            worker.freeze()
            for _ in range(100):
                r.start(prompt=(1,) * 1000)[2].cancel()
            await asyncio.sleep(0.3)
            assert entry_of(r, "w-0")["commands_waiting"] < 300
            worker.thaw()

    run(body())


def test_a_taken_port_is_an_os_error(run: Run) -> None:
    async def body() -> None:
        first = Workers(WorkersConfig(model="m", router="a"))
        port = await first.start("127.0.0.1", 0)
        second = Workers(WorkersConfig(model="m", router="b"))
        with pytest.raises(OSError, match="cannot listen"):
            await second.start("127.0.0.1", port)
        await first.close()
        await second.close()

    run(body())


def test_closing_leaves_no_task_behind(run: Run) -> None:
    async def body() -> None:
        before = asyncio.all_tasks()
        async with rig() as r:
            await r.add("both", "w-0")
            frozen = await r.add("both", "w-1")
            frozen.freeze()
            r.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while asyncio.all_tasks() - before:
                    await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before

    run(body())
