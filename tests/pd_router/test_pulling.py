"""Pulls over real gRPC with fake workers: a prompt waits for its copy, and never for longer than
computing would take, whatever becomes of the copy and of those who have it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pd_core.failures import FailureKind
from pd_router.routing import Routing
from tests.pd_router.fake_worker import FakeWorker
from tests.pd_router.rig import Rig, rig, until

PROMPT = tuple(range(1, 401))
SLOW = 400.0  # tokens/s: a second for the prompt


async def workers(r: Rig) -> tuple[FakeWorker, FakeWorker]:
    """P has nothing, D has all of the prompt."""
    r.sessions.routing = Routing(disaggregate="always")
    p = await r.add("prefill", "p-0", tokens_per_s=SLOW)
    d = await r.add("decode", "d-0", tokens_per_s=SLOW)
    d.gained = d.known_prefix(PROMPT)
    await until(lambda: any(r.workers.prefixes.count(v.id) for v in r.workers.views()))
    return p, d


def run(test: Callable[[Rig, FakeWorker, FakeWorker], Awaitable[None]], **config: Any) -> None:
    async def whole() -> None:
        async with rig(**config) as r:
            await test(r, *await workers(r))
            await r.nothing_held()

    asyncio.run(whole())


def test_a_prompt_is_computed_when_its_copy_is_there() -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        gate = d.gate("share")
        _, sink, generation = r.start(prompt=PROMPT)
        await until(lambda: d.seen.shares)
        assert not p.seen.prefills
        gate.set()
        await sink.wait()
        [asked], [shared] = p.seen.pulls, d.seen.shares
        assert list(asked.hashes) == list(shared.hashes) == d.known_prefix(PROMPT)[:99]
        assert shared.target.epoch == p.epoch
        assert shared.target.kv_address == "kv-of-p-0"
        line = generation.timeline
        assert (line.pulled_from, line.pulled_tokens, line.pulled_bytes) == ("d-0", 396, 1 << 20)
        assert line.pulls_failed == 0
        assert 0 < line.pull_s < 1
        assert "396 tokens pulled from d-0" in line.reason

    run(test)


@pytest.mark.parametrize(("had", "copied", "holder"), [(96, 12, "d-0"), (99, 0, "")])
def test_what_was_there_already_was_not_copied(had: int, copied: int, holder: str) -> None:
    """Prefill has blocks that the router hasn't heard of yet: of 99 so many."""

    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        p.holds = set(d.known_prefix(PROMPT)[:had])
        _, sink, generation = r.start(prompt=PROMPT)
        await sink.wait()
        line = generation.timeline
        assert (line.pulled_from, line.pulled_tokens) == (holder, copied)
        assert bool(line.pulled_bytes) is bool(copied)
        assert ("nothing was copied" in line.reason) is not bool(copied)
        assert len(d.seen.shares) == bool(copied)

    run(test)


@pytest.mark.parametrize("stage", ["pull", "share"])
@pytest.mark.parametrize("kind", [FailureKind.NO_CAPACITY, FailureKind.TRANSFER_FAILED])
def test_a_copy_that_fails_is_computed(stage: str, kind: FailureKind) -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        (p if stage == "pull" else d).fail(stage, kind)
        line = await r.complete(prompt=PROMPT)
        assert (line.pulled_tokens, line.pulls_failed, line.attempts) == (0, 1, 1)
        assert "the pull failed, as told" in line.reason
        before = len(p.seen.pulls)
        line = await r.complete(prompt=PROMPT)
        again = kind is FailureKind.NO_CAPACITY  # that may have passed
        assert len(p.seen.pulls) == before + again
        assert line.pulled_from == ("d-0" if again else "")

    run(test)


def test_a_holder_whose_kv_was_altered_is_asked_no_more() -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        d.altered = True
        await until(lambda: not all(v.shares_prefixes for v in r.workers.views()))
        line = await r.complete(prompt=PROMPT)
        assert (line.pulled_from, line.pulls_failed) == ("", 0)
        assert not p.seen.pulls

    run(test)


@pytest.mark.parametrize("stage", ["pull", "share"])
def test_a_copy_that_is_late_is_computed_and_both_ends_are_told(stage: str) -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        (p if stage == "pull" else d).gate(stage)
        line = await r.complete(prompt=PROMPT)
        assert line.pulls_failed == 1
        assert 0.7 < line.pull_s < 2.0
        assert p.seen.pulls[0].handle in p.seen.cancels
        if stage == "share":
            assert d.seen.shares[0].handle in d.seen.cancels

    run(test)


def test_a_holder_that_dies_costs_no_attempt_where_another_decodes() -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        other = await r.add("decode", "d-1", tokens_per_s=SLOW)
        d.state = 2  # it drains: d-1 takes the session over
        await until(lambda: not r.usable(d))
        d.gate("share")
        request, sink, generation = r.start(prompt=PROMPT)
        await until(lambda: d.seen.shares)
        await d.die()
        await sink.wait()
        sink.assert_right(request)
        line = generation.timeline
        assert (line.decode_worker, line.attempts, line.pulls_failed) == ("d-1", 1, 1)
        assert p.seen.prefills
        assert other.seen.generates

    run(test)


@pytest.mark.parametrize("stage", ["pull", "share"])
def test_a_client_that_leaves_meanwhile_frees_everything(stage: str) -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        (p if stage == "pull" else d).gate(stage)
        _, _, generation = r.start(prompt=PROMPT)
        await until(lambda: p.seen.pulls if stage == "pull" else d.seen.shares)
        generation.cancel()
        await until(lambda: p.seen.pulls[0].handle in p.seen.cancels)
        assert not p.seen.prefills
        line = generation.timeline
        assert (line.pulls_failed, line.pulls_cancelled) == (0, 1)

    run(test)


def test_a_target_that_dies_meanwhile_is_an_attempt_that_failed() -> None:
    async def test(r: Rig, p: FakeWorker, _: FakeWorker) -> None:
        both = p, await r.add("prefill", "p-1", tokens_per_s=SLOW)
        gates = [one.gate("pull") for one in both]
        request, sink, _ = r.start(prompt=PROMPT)
        await until(lambda: any(one.seen.pulls for one in both))
        await next(one for one in both if one.seen.pulls).die()
        for gate in gates:
            gate.set()
        await sink.wait()
        sink.assert_right(request)

    run(test)


def test_leases_of_copies_are_renewed() -> None:
    async def test(r: Rig, p: FakeWorker, d: FakeWorker) -> None:
        gate = d.gate("share")
        _, sink, _ = r.start(prompt=PROMPT)
        await until(lambda: d.seen.shares and d.seen.shares[0].handle in d.seen.renewed)
        assert p.seen.pulls[0].handle in p.seen.renewed
        gate.set()
        await sink.wait()

    run(test, renew_s=0.05)


def test_nothing_is_copied_where_it_is_switched_off() -> None:
    async def test(r: Rig, p: FakeWorker, _: FakeWorker) -> None:
        r.sessions.routing = Routing(disaggregate="always", pulls=None)
        await r.complete(prompt=PROMPT)
        assert not p.seen.pulls

    run(test)
