"""Two engine cores, prefill and decode, with the real scheduler and the real KV plane.

The model is fake (tests/pd_engine/fake_runner.py): a token is right only when all KV
behind it is. Covers the hand-over, n > 1, prefix hits, cancelling at every stage, failed
steps, streams that end, draining, and that all blocks are accounted for afterwards.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from pd_core.failures import FailureKind, RequestFailure
from pd_engine.types import Guide
from pd_proto.v1 import engine_pb2 as pb
from tests.pd_engine.core_rig import DEADLINE_S, generate, hand_over, pair, prefill
from tests.pd_engine.fake_runner import reference


@pytest.mark.parametrize("length", [1, 3, 4, 5, 23, 24, 25, 100])
def test_pd_tokens_equal_the_models(length: int) -> None:
    async def run() -> None:
        async with pair() as (p, d):
            prompt = list(range(7, 7 + length))
            committed = await hand_over(p, d, generate(1, prompt))
            wanted = reference(prompt, 8)
            assert [t.token for t in committed.first] == wanted[:1]
            assert await d.tokens(1, 0, 7) == wanted[1:]
            await d.idle()
            await p.idle()

    asyncio.run(run())


@pytest.mark.parametrize("block_tokens", [(4, 8), (8, 4), (3, 5), (16, 1)])
def test_blocks_of_other_sizes(block_tokens: tuple[int, int]) -> None:
    """Each prompt twice, and then longer: D has a prefix, which may end within P's blocks."""

    async def run() -> None:
        async with pair(block_tokens=block_tokens) as (p, d):
            number = 0
            for length in (1, 7, 8, 9, 24):
                for more in (0, 0, 6):
                    number += 1
                    prompt = list(range(100 * length, 100 * length + length + more))
                    await hand_over(p, d, generate(number, prompt))
                    wanted = reference(prompt, 8)
                    assert await d.tokens(number, 0, 7) == wanted[1:]
                    had = (await d.event("granted", number)).prefix_tokens
                    most = length if more else len(prompt)
                    after = number % 3 != 1
                    whole = most // block_tokens[1] * block_tokens[1]
                    assert whole <= had if after else had == 0
            await d.idle()
            await p.idle()

    asyncio.run(run())


@pytest.mark.parametrize("length", [1, 4, 5, 30])
def test_local_tokens_equal_the_models(length: int) -> None:
    async def run() -> None:
        async with pair() as (_, d):
            prompt = list(range(3, 3 + length))
            d.send(generate=generate(1, prompt, prefill_here=True))
            first = await d.event("prefilled", 1)
            wanted = reference(prompt, 8)
            assert [t.token for t in first.first] == wanted[:1]
            assert await d.tokens(1, 0, 7) == wanted[1:]
            await d.idle()

    asyncio.run(run())


@pytest.mark.parametrize("length", [8, 9])
def test_three_choices_share_one_transfer(length: int) -> None:
    async def run() -> None:
        async with pair() as (p, d):
            prompt = list(range(length))
            request = generate(1, prompt, choices=[0, 1, 2])
            committed = await hand_over(p, d, request)
            assert committed.kv_bytes == d.runner.layout.block_bytes * -(-length // 4)
            for choice in range(3):
                wanted = reference(prompt, 8, choice)
                assert [t.token for t in committed.first if t.choice == choice] == wanted[:1]
                assert await d.tokens(1, choice, 7) == wanted[1:]
            await d.idle()
            await p.idle()

    asyncio.run(run())


def test_a_resumed_request_goes_on_at_the_next_index() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            prompt = list(range(10))
            wanted = reference(prompt, 8)
            request = generate(1, prompt + wanted[:3], prompt_tokens=10)
            committed = await hand_over(p, d, request)
            assert [(t.index, t.token) for t in committed.first] == [(3, wanted[3])]
            assert await d.tokens(1, 0, 7) == wanted[4:]

    asyncio.run(run())


def test_the_second_time_neither_side_repeats_what_it_has() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            prompt = list(range(40))
            first = await hand_over(p, d, generate(1, prompt))
            await d.tokens(1, 0, 7)
            await d.idle()
            await p.idle()
            again = await hand_over(p, d, generate(2, prompt))
            assert (await d.event("granted", 2)).prefix_tokens == 40
            assert first.kv_bytes == 10 * d.runner.layout.block_bytes
            assert again.kv_bytes == 0
            # All N tokens are cached; N-1, in whole blocks, are taken and the rest computed.
            assert (await p.event("prefilled", 2)).cached_tokens == 36
            assert await d.tokens(2, 0, 7) == reference(prompt, 8)[1:]
            await d.idle()

    asyncio.run(run())


def test_token_0_ends_it_and_the_grant_goes_back() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            request = generate(1, [1, 2, 3], sampling=pb.Sampling(max_tokens=1))
            committed = await hand_over(p, d, request)
            assert committed.first[0].finish == pb.FINISH_LENGTH
            await d.idle()
            await p.idle()
            assert not [e for e in d.events if e.HasField("tokens")]

    asyncio.run(run())


@pytest.mark.parametrize("stage", ["queued", "granted", "prefilling", "sealed", "decoding"])
def test_cancel_frees_everything_at_every_stage(stage: str) -> None:
    async def run() -> None:
        async with pair() as (p, d):
            request = generate(1, list(range(30)), sampling=pb.Sampling(max_tokens=2000))
            p_gate, d_gate = p.hold_steps(), d.hold_steps()
            if stage == "queued":
                d.send(generate=generate(9, list(range(200, 420)), prefill_here=True))
            d.send(generate=request)
            if stage != "queued":
                granted = await d.event("granted", 1)
            if stage in ("prefilling", "sealed", "decoding"):
                p.send(prefill=prefill(request, granted))
                await p.until(p.runner.started.is_set)
            if stage in ("sealed", "decoding"):
                p_gate.release(100)
                await d.event("committed", 1)
            if stage == "decoding":
                d_gate.release(3)
                await d.tokens(1, 0, 2)
            for engine in (d, p):
                engine.send(cancel=pb.Cancel(handle=1))
            if stage == "queued":
                d.send(cancel=pb.Cancel(handle=9))
            p_gate.release(1000)
            d_gate.release(1000)
            await d.idle()
            await p.idle()
            # The next request is none the worse for it.
            await hand_over(p, d, generate(2, list(range(50, 75))))
            assert await d.tokens(2, 0, 7) == reference(list(range(50, 75)), 8)[1:]

    asyncio.run(run())


def test_a_stream_that_ends_takes_its_requests_with_it() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            sampling = pb.Sampling(max_tokens=2000)
            await hand_over(p, d, generate(1, list(range(20)), sampling=sampling))
            d.send(generate=generate(2, list(range(60, 90))))
            await d.event("granted", 2)
            d.core.close_stream(d.stream)
            await d.idle()
            await p.idle()

    asyncio.run(run())


def test_a_failed_step_ends_its_requests_and_the_worker_goes_on() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            d.runner.fail_next = RuntimeError("bad weights")
            d.send(generate=generate(1, [1, 2, 3], prefill_here=True))
            failed = await d.event_of_failure(1)
            assert failed.kind == "step_failed"
            assert "bad weights" in failed.message
            await d.idle()
            await hand_over(p, d, generate(2, [1, 2, 3]))
            assert await d.tokens(2, 0, 7) == reference([1, 2, 3], 8)[1:]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ({"epoch": "epoch-of-before"}, "transfer_failed", "epoch"),
        ({"grant": b"0" * 16}, "transfer_failed", "no such grant|did not take the KV"),
        ({"kv_address": "127.0.0.1:1"}, "transfer_failed", "127.0.0.1:1"),
    ],
)
def test_a_wrong_target_fails_typed_and_frees_the_prefill_side(
    target: dict[str, Any], kind: str, words: str
) -> None:
    async def run() -> None:
        async with pair() as (p, d):
            request = generate(1, list(range(20)))
            d.send(generate=request)
            granted = await d.event("granted", 1)
            p.send(prefill=prefill(request, granted, **target))
            failed = await p.event_of_failure(1)
            assert failed.kind == kind
            assert re.search(words, failed.message)
            await p.idle()
            d.send(cancel=pb.Cancel(handle=1))
            await d.idle()

    asyncio.run(run())


def test_a_grant_that_nobody_fills_expires_by_itself() -> None:
    async def run() -> None:
        async with pair(flags="--kv-lease-s 0.3") as (_, d):
            d.send(generate=generate(1, list(range(20))))
            await d.event("granted", 1)
            failed = await d.event_of_failure(1)
            assert failed.kind == "lease_expired"
            await d.idle()

    asyncio.run(run())


def test_a_step_whose_requests_have_all_gone_is_left() -> None:
    async def run() -> None:
        async with pair(chunk_tokens=0) as (_, d):
            gate = d.hold_steps()
            for handle in (1, 2):
                prompt = list(range(handle * 100, handle * 100 + 30))
                d.send(generate=generate(handle, prompt, prefill_here=True))
            await d.until(d.runner.started.is_set)
            d.send(cancel=pb.Cancel(handle=1))
            d.send(cancel=pb.Cancel(handle=2))
            gate.release(1)
            await d.idle()
            assert d.runner.layers_written == 0
            # Nothing half-way computed is in the prefix cache.
            gate.release(100)
            d.send(generate=generate(3, list(range(100, 130)), prefill_here=True))
            assert (await d.event("prefilled", 3)).cached_tokens == 0
            assert await d.tokens(3, 0, 7) == reference(list(range(100, 130)), 8)[1:]

    asyncio.run(run())


def test_a_step_goes_on_for_those_who_stay() -> None:
    async def run() -> None:
        async with pair(chunk_tokens=0) as (_, d):
            gate = d.hold_steps()
            prompts = {h: list(range(h * 100, h * 100 + 30)) for h in (1, 2)}
            for handle, prompt in prompts.items():
                d.send(generate=generate(handle, prompt, prefill_here=True))
            await d.until(d.runner.started.is_set)
            d.send(cancel=pb.Cancel(handle=1))
            gate.release(100)
            assert await d.tokens(2, 0, 7) == reference(prompts[2], 8)[1:]
            await d.idle()

    asyncio.run(run())


class AnyToken:
    """The guide of a grammar that allows everything."""

    problem = ""

    def note(self, token: int) -> None:
        pass

    def mask(self, _ahead: Sequence[int]) -> bytes | None:
        return b"\xff" * 1024

    def fork(self) -> Guide:
        return self


class HeldGuides:
    """Compiles when it's told to, and says how it ends."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answer: asyncio.Future[Guide] = asyncio.get_running_loop().create_future()

    def known(self, _grammar: str) -> Guide | None:
        return None

    async def make(self, _grammar: str) -> Guide:
        self.asked.set()
        return await asyncio.shield(self.answer)


@pytest.mark.parametrize("end", ["compiled", "refused", "broken", "cancelled"])
def test_a_grammar_that_takes_long_holds_up_its_own_request_alone(end: str) -> None:
    async def run() -> None:
        async with pair() as (_, d):
            guides = d.core.intake.guides = HeldGuides()
            guided = generate(1, [1, 2, 3], prefill_here=True)
            guided.sampling.grammar = "start: /x+/"
            d.send(generate=guided)
            await guides.asked.wait()
            d.send(generate=generate(2, [4, 5], prefill_here=True))
            assert await d.tokens(2, 0, 7) == reference([4, 5], 8)[1:]
            if end == "cancelled":
                d.send(cancel=pb.Cancel(handle=1))
            if end == "refused":
                guides.answer.set_exception(RequestFailure(FailureKind.NO_CAPACITY, "too slow"))
                assert (await d.event_of_failure(1)).message == "too slow"
            elif end == "broken":
                guides.answer.set_exception(LookupError("no such thing"))
                failed = await d.event_of_failure(1)
                assert failed.kind == FailureKind.INTERNAL
                assert failed.message == "LookupError: no such thing"
            else:
                guides.answer.set_result(AnyToken())
            if end == "compiled":
                assert await d.tokens(1, 0, 7) == reference([1, 2, 3], 8)[1:]
            await d.until(lambda: not d.core._preparing)
            await d.idle()

    asyncio.run(run())


def test_steps_are_logged_where_one_asks(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        for flags in ("", "--log-steps"):
            async with pair(chunk_tokens=6, flags=flags) as (_, d):
                d.send(generate=generate(1, list(range(1, 10)), prefill_here=True))
                await d.tokens(1, 0, 7)

    with caplog.at_level("INFO", logger="pd_engine.core"):
        asyncio.run(run())
    said = [text for text in caplog.messages if text.startswith("step=")]
    steps = [re.sub(r"ms=[0-9.]+ ", "", text) for text in said]
    assert steps[:3] == [
        "step=1 decode= guesses=0 prefill=r1[0:6]",
        "step=2 decode= guesses=0 prefill=r1[6:9]",
        "step=3 decode=r1 guesses=0 prefill=",
    ]
    assert len(steps) == 9, "those of the one engine that was asked to"


def test_wrong_roles_are_refused() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            p.send(generate=generate(1, [1]))
            assert "doesn't decode" in (await p.event_of_failure(1)).message
            d.send(prefill=prefill(generate(2, [1]), pb.Granted()))
            assert "doesn't export" in (await d.event_of_failure(2)).message

    asyncio.run(run())


def test_a_handle_in_use_is_refused_and_the_first_goes_on() -> None:
    async def run() -> None:
        async with pair() as (_, d):
            gate = d.hold_steps()
            d.send(generate=generate(1, [1, 2], prefill_here=True))
            d.send(generate=generate(1, [3, 4], prefill_here=True))
            assert "in use" in (await d.event_of_failure(1)).message
            gate.release(100)
            assert await d.tokens(1, 0, 7) == reference([1, 2], 8)[1:]

    asyncio.run(run())


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def run() -> None:
        async with pair() as (_, d):
            d.send(generate=generate(1, [1, 2], prefill_here=True))
            draining = asyncio.create_task(d.core.drain(DEADLINE_S))
            await d.until(lambda: d.core.draining)
            d.send(generate=generate(2, [3, 4], prefill_here=True))
            assert (await d.event_of_failure(2)).kind == "draining"
            assert await draining
            assert await d.tokens(1, 0, 7) == reference([1, 2], 8)[1:]

    asyncio.run(run())


def test_what_outlasts_the_drain_is_handed_back() -> None:
    async def run() -> None:
        async with pair() as (_, d):
            gate = d.hold_steps()
            d.send(generate=generate(1, [1, 2], prefill_here=True))
            assert not await d.core.drain(0.1)
            assert (await d.event_of_failure(1)).kind == "draining"
            gate.release(100)
            await d.idle()

    asyncio.run(run())


def test_two_requests_that_each_need_one_more_block_both_end_right() -> None:
    async def run() -> None:
        async with pair(blocks=9) as (_, d):
            prompts = {1: [1, 2, 3], 2: [4, 5, 6]}
            for handle, prompt in prompts.items():
                sampling = pb.Sampling(max_tokens=25)
                request = generate(handle, prompt, sampling=sampling, prefill_here=True)
                d.send(generate=request)
            for handle, prompt in prompts.items():
                assert await d.tokens(handle, 0, 24) == reference(prompt, 25)[1:]
            await d.idle()

    asyncio.run(run())
