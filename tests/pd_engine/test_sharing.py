"""Prefixes from worker to worker, over the real KV plane and scheduler with a fake model whose
tokens are right only when all KV behind them is.

Both directions, what is refused, cancelling at both ends, streams that end, draining, and that
what came quantized isn't given on.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pd_core.failures import FailureKind
from pd_core.kv import prefix_hashes
from pd_engine.archive import Stores
from pd_engine.kv.slots import HostSlots
from pd_proto.v1 import engine_pb2 as pb
from tests.pd_engine.core_rig import DEADLINE_S, Engine, generate, hand_over, pair, prefill
from tests.pd_engine.fake_runner import LAYOUT, reference
from tests.pd_engine.test_archive import NOTHING_IDLE, SLOW_PREFILL, Keeper, held_reads

PROMPT = list(range(7, 47))
NEXT = [*PROMPT, *range(100, 107)]


def hashes(tokens: Sequence[int], block_tokens: int = 4, salt: bytes = b"") -> list[bytes]:
    return list(prefix_hashes(tokens, block_tokens, salt))


def pull(handle: int, tokens: Sequence[int], salt: bytes = b"") -> pb.Pull:
    of = pb.TransferId(request="next turn", attempt=1)
    return pb.Pull(handle=handle, id=of, hashes=hashes(tokens, salt=salt))


def share(of: pb.Pull, granted: pb.Granted, epoch: str, **changes: Any) -> pb.Share:
    target = pb.KvTarget(
        epoch=epoch,
        kv_address=granted.kv_address,
        grant=granted.grant,
        prefix_tokens=granted.prefix_tokens,
    )
    return pb.Share(
        **{"handle": of.handle, "id": of.id, "hashes": of.hashes, "target": target, **changes}
    )


async def copy(source: Engine, target: Engine, asked: pb.Pull) -> pb.Committed:
    target.send(pull=asked)
    granted = await target.event("granted", asked.handle)
    source.send(share=share(asked, granted, f"epoch-{target.name}"))
    committed: pb.Committed = await target.event("committed", asked.handle)
    return committed


def forget(engine: Engine) -> None:
    """All that its pool has cached."""
    engine.scheduler.pool.evict_cached(float("inf"), 0)


async def only_at_decode(prefill: Engine, decode: Engine) -> None:
    """The prompt has been served; prefill has forgotten it since."""
    await hand_over(prefill, decode, generate(1, PROMPT))
    await decode.until(lambda: not decode.scheduler.busy)
    forget(prefill)


async def asked_for(target: Engine, handle: int) -> tuple[pb.Pull, pb.Granted]:
    """A copy of the prompt: what it was asked for with, and that there's room for it."""
    asked = pull(handle, PROMPT)
    target.send(pull=asked)
    return asked, await target.event("granted", handle)


async def all_idle(*engines: Engine) -> None:
    for one in engines:
        await one.until(lambda one=one: not one.core.sharing.busy)
        await one.idle()


def test_prefill_takes_a_sessions_blocks_back_from_decode() -> None:
    """Its next turn then computes only what is new, and sends only that."""

    async def run() -> None:
        async with pair() as (p, d):
            await hand_over(p, d, generate(1, PROMPT))
            await d.tokens(1, 0, 7)
            await d.until(lambda: not d.scheduler.busy)
            forget(p)
            committed = await copy(d, p, pull(2, PROMPT))
            assert committed.kv_bytes == 10 * p.runner.layout.block_bytes
            assert committed.transport == "tcp"
            await hand_over(p, d, generate(3, NEXT))
            assert (await p.event("prefilled", 3)).cached_tokens == 40
            assert await d.tokens(3, 0, 7) == reference(NEXT, 8)[1:]
            await all_idle(p, d)

    asyncio.run(run())


def test_another_decode_worker_takes_a_session_over() -> None:
    """And goes on with it where the first one stopped: what that wrote comes along."""

    async def run() -> None:
        async with pair() as (p, d):
            other = Engine("both", 64, 6)
            await other.start()
            try:
                await hand_over(p, d, generate(1, PROMPT))
                written = [reference(PROMPT, 1)[0], *await d.tokens(1, 0, 7)]
                await d.until(lambda: not d.scheduler.busy)
                text = [*PROMPT, *written]
                await copy(d, other, pull(2, text[:44]))
                following = [*text, 5, 6, 7]
                other.send(generate=generate(3, following, prefill_here=True))
                prefilled = await other.event("prefilled", 3)
                assert prefilled.cached_tokens == 44
                first = [t.token for t in prefilled.first]
                assert first + await other.tokens(3, 0, 7) == reference(following, 8)
                await all_idle(p, d, other)
            finally:
                await other.close()

    asyncio.run(run())


def test_only_what_is_missing_is_sent() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            await only_at_decode(p, d)
            first = await copy(d, p, pull(2, PROMPT[:16]))
            rest = await copy(d, p, pull(3, PROMPT))
            assert first.kv_bytes == 4 * p.runner.layout.block_bytes
            assert rest.kv_bytes == 6 * p.runner.layout.block_bytes
            p.send(pull=pull(4, PROMPT))
            nothing = await p.event("committed", 4)
            assert nothing.kv_bytes == 0
            had = [one.cached_tokens for one in (first, rest, nothing)]
            assert had == [0, 16, 40]
            await all_idle(p, d)

    asyncio.run(run())


@asynccontextmanager
async def beyond_the_pool() -> AsyncIterator[tuple[Engine, Keeper]]:
    """A prefill worker, and one that keeps the prompt's KV in host memory alone."""
    stores = Stores(host=HostSlots(64, LAYOUT.block_bytes))
    d = Keeper("both", 32, stores, NOTHING_IDLE, SLOW_PREFILL)
    p = Engine("prefill", 64, 6)
    await d.start()
    await p.start()
    try:
        await d.ask(1, PROMPT)
        await d.rest()
        yield p, d
    finally:
        await p.close()
        await d.close()


def test_what_is_kept_beyond_the_pool_is_given_too() -> None:
    async def run() -> None:
        async with beyond_the_pool() as (p, d):
            assert (await copy(d, p, pull(2, PROMPT))).kv_bytes > 0
            await all_idle(p, d)

    asyncio.run(run())


def test_kv_that_comes_quantized_while_a_copy_is_read_back_ends_the_copy() -> None:
    async def run() -> None:
        async with beyond_the_pool() as (p, d):
            asked, granted = await asked_for(p, 2)
            d.send(share=share(asked, granted, "epoch-prefill"))
            assert d.core.sharing.busy, "it's being read back"
            d.core.sharing.exact = False
            assert "quantized" in (await d.event_of_failure(2)).message
            p.send(cancel=pb.Cancel(handle=2))
            await all_idle(p, d)

    asyncio.run(run())


def test_another_tenants_prefix_isnt_given() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            await hand_over(p, d, generate(1, PROMPT, cache_salt=b"one"))
            await d.until(lambda: not d.scheduler.busy)
            asked = pull(2, PROMPT, salt=b"other")
            p.send(pull=asked)
            granted = await p.event("granted", 2)
            d.send(share=share(asked, granted, "epoch-prefill"))
            assert "isn't here any more" in (await d.event_of_failure(2)).message
            p.send(cancel=pb.Cancel(handle=2))
            await all_idle(p, d)

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong",
    [[], [b"short"], hashes(PROMPT)[:1] * 2],
)
def test_nonsense_is_refused(wrong: list[bytes]) -> None:
    async def run() -> None:
        async with pair() as (p, _):
            p.send(pull=pb.Pull(handle=2, hashes=wrong))
            assert (await p.event_of_failure(2)).kind == FailureKind.INVALID_REQUEST
            p.send(share=pb.Share(handle=3, hashes=wrong))
            assert (await p.event_of_failure(3)).kind == FailureKind.INVALID_REQUEST

    asyncio.run(run())


def test_a_handle_is_in_use_whatever_uses_it() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            d.send(generate=generate(1, PROMPT))
            await d.event("granted", 1)
            d.send(pull=pull(1, NEXT))
            assert "in use" in (await d.event_of_failure(1)).message
            p.send(pull=pull(2, PROMPT))
            granted = await p.event("granted", 2)
            p.send(prefill=prefill(generate(2, PROMPT), granted))
            assert "in use" in (await p.event_of_failure(2)).message
            d.send(cancel=pb.Cancel(handle=1))
            p.send(cancel=pb.Cancel(handle=2))
            await all_idle(p, d)

    asyncio.run(run())


def test_a_full_pool_refuses_at_once() -> None:
    async def run() -> None:
        async with pair(blocks=8) as (p, _):
            p.send(pull=pull(2, PROMPT))
            assert (await p.event_of_failure(2)).kind == FailureKind.NO_CAPACITY
            await all_idle(p)

    asyncio.run(run())


def test_a_worker_that_drains_gives_and_doesnt_take() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            await only_at_decode(p, d)
            d.core.draining = True
            d.send(pull=pull(2, NEXT))
            assert (await d.event_of_failure(2)).kind == FailureKind.DRAINING
            assert (await copy(d, p, pull(3, PROMPT))).kv_bytes > 0
            assert await d.core.drain(5.0)

    asyncio.run(run())


def test_a_drain_waits_for_copies_that_come() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            await only_at_decode(p, d)
            asked, granted = await asked_for(p, 2)
            draining = asyncio.create_task(p.core.drain(DEADLINE_S))
            await p.until(lambda: p.core.draining)
            d.send(share=share(asked, granted, "epoch-prefill"))
            assert await draining
            assert (await p.event("committed", 2)).kv_bytes > 0
            assert not p.core.sharing.busy
            await all_idle(p, d)

    asyncio.run(run())


def test_a_drain_waits_for_copies_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is asked for must be read back first."""

    async def run() -> None:
        async with beyond_the_pool() as (p, d):
            reading, go_on = held_reads(monkeypatch)
            asked, granted = await asked_for(p, 2)
            d.send(share=share(asked, granted, "epoch-prefill"))
            await d.until(reading.is_set)
            draining = asyncio.create_task(d.core.drain(DEADLINE_S))
            await d.until(lambda: d.core.draining)
            assert not draining.done()
            go_on.set()
            assert await draining
            assert (await p.event("committed", 2)).kv_bytes > 0
            await all_idle(p, d)

    asyncio.run(run())


def test_copies_that_outlast_the_drain_end_in_words() -> None:
    """What was set aside for them is free, and nothing is given on any more."""

    async def run() -> None:
        async with pair() as (p, d):
            await only_at_decode(p, d)
            asked, granted = await asked_for(p, 2)
            assert not await p.core.drain(0.1)
            assert (await p.event_of_failure(2)).kind == FailureKind.DRAINING
            await all_idle(p)
            d.send(share=share(asked, granted, "epoch-prefill"))
            assert (await d.event_of_failure(2)).kind == FailureKind.TRANSFER_FAILED
            await all_idle(p, d)

    asyncio.run(run())


def test_cancelled_at_either_end() -> None:
    async def run() -> None:
        async with pair() as (p, d):
            await only_at_decode(p, d)
            asked, granted = await asked_for(p, 2)
            p.send(cancel=pb.Cancel(handle=2))
            await all_idle(p)
            d.send(share=share(asked, granted, "epoch-prefill"))
            assert (await d.event_of_failure(2)).kind == FailureKind.TRANSFER_FAILED
            asked, granted = await asked_for(p, 3)
            d.send(share=share(asked, granted, "epoch-prefill"))
            d.send(cancel=pb.Cancel(handle=3))
            await d.until(lambda: not d.core.sharing.busy)
            p.send(cancel=pb.Cancel(handle=3))
            await all_idle(p, d)

    asyncio.run(run())


def test_a_router_that_goes_takes_its_copies_along() -> None:
    async def run() -> None:
        async with pair() as (p, _):
            p.send(pull=pull(2, PROMPT))
            await p.event("granted", 2)
            p.core.close_stream(p.stream)
            await all_idle(p)

    asyncio.run(run())


def test_a_stranger_in_the_holders_place() -> None:
    """The target's process is another one by now: nothing is sent."""

    async def run() -> None:
        async with pair() as (p, d):
            await only_at_decode(p, d)
            asked, granted = await asked_for(p, 2)
            d.send(share=share(asked, granted, "its predecessor"))
            await d.event_of_failure(2)
            p.send(cancel=pb.Cancel(handle=2))
            await all_idle(p, d)

    asyncio.run(run())


def test_what_came_quantized_isnt_given_on() -> None:
    """Neither by those that quantize, nor by those that took a quantized hand-over."""

    async def run() -> None:
        async with pair(flags="--kv-quantization int8") as (p, d):
            plain = Engine("both", 64, 6)
            await plain.start()
            try:
                asked = generate(1, PROMPT)
                assert plain.core.sharing.exact
                plain.send(generate=asked)
                granted = await plain.event("granted", 1)
                p.send(prefill=prefill(asked, granted, epoch="epoch-both"))
                await plain.event("committed", 1)
                await plain.until(lambda: not plain.scheduler.busy)
                d.send(pull=pull(2, PROMPT))
                granted = await d.event("granted", 2)
                for holder in (plain, p):
                    holder.send(share=share(pull(2, PROMPT), granted, "epoch-decode"))
                    assert "quantized" in (await holder.event_of_failure(2)).message
                d.send(cancel=pb.Cancel(handle=2))
                await all_idle(d, plain)
            finally:
                await plain.close()

    asyncio.run(run())
