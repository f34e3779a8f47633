"""The outbox of a router's stream: merging, order, bounds, closing."""

import asyncio

from pd_engine.outbox import Outbox
from pd_proto.v1 import engine_pb2 as pb


def failed(handle: int) -> pb.Event:
    return pb.Event(failed=pb.Failed(handle=handle))


async def take(outbox: Outbox) -> pb.WorkReply | None:
    async with asyncio.timeout(5):
        return await outbox.take()


def test_one_reply_carries_all_that_is_pending_in_order() -> None:
    async def run() -> None:
        outbox = Outbox()
        outbox.put_token(pb.TokenOut(handle=1, index=1))
        outbox.put_token(pb.TokenOut(handle=2, index=1))
        outbox.put(failed(1))
        outbox.put_token(pb.TokenOut(handle=2, index=2))
        outbox.flush()
        reply = await take(outbox)
        assert reply is not None
        kinds = [event.WhichOneof("event") for event in reply.events]
        assert kinds == ["tokens", "failed", "tokens"]
        assert [t.handle for t in reply.events[0].tokens.tokens] == [1, 2]

    asyncio.run(run())


def test_nothing_is_handed_out_before_a_flush() -> None:
    async def run() -> None:
        outbox = Outbox()
        outbox.put(failed(1))
        taking = asyncio.create_task(take(outbox))
        await asyncio.sleep(0)
        assert not taking.done()
        outbox.flush()
        reply = await taking
        assert reply is not None
        assert len(reply.events) == 1

    asyncio.run(run())


def test_closing_hands_out_the_rest_and_then_ends() -> None:
    async def run() -> None:
        outbox = Outbox()
        outbox.put(failed(1))
        outbox.close()
        reply = await take(outbox)
        assert reply is not None
        assert await take(outbox) is None

    asyncio.run(run())


def test_a_router_that_never_reads_costs_bounded_memory() -> None:
    async def run() -> None:
        outbox = Outbox(limit=10)
        for index in range(1000):
            outbox.put_token(pb.TokenOut(handle=1, index=index))
        assert outbox.overflowed
        assert await take(outbox) is None

    asyncio.run(run())
