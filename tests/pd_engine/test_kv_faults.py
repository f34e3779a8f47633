"""What a hurt connection does to a transfer between two real KV planes: a flipped bit, a cut at
every place of every frame, stalls on either side, cancels at every moment, leases that end,
a worker that goes. Each time: one typed failure, all blocks come free, the next transfer works."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from pd_core.failures import FailureKind
from pd_core.kv import KvLayout
from pd_engine.kv import frames, tcp
from pd_engine.kv.plane import KvSettings
from pd_engine.transfer import (
    ExportLimits,
    ImportLimits,
    KvRange,
    PushHead,
    SealHead,
    TransferId,
    Verdict,
)
from tests.pd_engine.kv_proxy import Do, Plan, Proxy
from tests.pd_engine.kv_rig import LAYOUT, WAIT_S, Transfer, Worker, pair, target, transfer, worker

pytestmark = pytest.mark.slow

Run = Callable[[Coroutine[Any, Any, None]], None]

SMALL_FRAMES = KvSettings(exports=ExportLimits(frame_bytes=LAYOUT.block_bytes), tick_s=0.02)
BIG = KvLayout("m", "float32", block_tokens=16, layers=4, kv_heads=8, head_dim=64)
"""Blocks of 256 KiB: more than socket buffers hold, when there are many."""


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_run(request: pytest.FixtureRequest) -> Run:
    runner = asyncio.run if request.param == "asyncio" else uvloop.run

    def bounded(work: Coroutine[Any, Any, None]) -> None:
        async def body() -> None:
            async with asyncio.timeout(60):
                await work

        runner(body())

    return bounded


def on(number: int, do: Do) -> Plan:
    return lambda n, _: do if n == number else Do.PASS


def on_seal(do: Do) -> Plan:
    return lambda _, frame: do if isinstance(frame, SealHead) else Do.PASS


async def works(prefill: Worker, decode: Worker, layout: KvLayout = LAYOUT) -> None:
    """Nothing of what happened before is in a new transfer's way."""
    t = transfer(99, 23, layout=layout)
    t.open(prefill, decode)
    t.seal(prefill)
    await decode.told.wait("committed", t.key)
    assert (await prefill.told.wait("done", t.key))[2]
    t.check_bytes(prefill, decode)


async def both_failed(t: Transfer, prefill: Worker, decode: Worker) -> tuple[str, str]:
    """The messages at P and at D, each TRANSFER_FAILED; D's blocks are free."""
    at_p = (await prefill.told.wait("export_failed", t.key))[2]
    at_d = (await decode.told.wait("import_failed", t.key))[2]
    await decode.told.wait("released", t.key)
    assert at_p.kind == at_d.kind == FailureKind.TRANSFER_FAILED
    assert decode.told.find("committed", t.key) is None
    return at_p.message, at_d.message


def test_one_flipped_bit_is_detected_and_a_retry_works(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            async with Proxy(decode.address, on(3, Do.FLIP)) as proxy:
                t = transfer(1, 23)
                t.open(prefill, decode, proxy.address)
                t.seal(prefill)
                # Whether P had sealed when the verdict came is a matter of time.
                await prefill.told.wait_any(("export_failed", "done"), t.key)
                failure = (await decode.told.wait("import_failed", t.key))[2]
                assert failure.kind == FailureKind.TRANSFER_FAILED
                assert "checksum of layers 0-5 of blocks 2-2" in failure.message
                await decode.told.wait("released", t.key)
                done = prefill.told.find("done", t.key)
                assert done is None or not done[2]
            await works(prefill, decode)

    loop_run(body())


def test_the_verdict_names_the_checksum_to_the_sender(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            async with Proxy(decode.address, on(1, Do.FLIP)) as proxy:
                t = transfer(1, 23)
                t.open(prefill, decode, proxy.address)
                prefill.plane.export_progress(t.key, 4)
                at_p, at_d = await both_failed(t, prefill, decode)
                assert "checksum of layers 0-5 of blocks 0-0" in at_d
                assert "refused by the decode worker: checksum" in at_p
            await works(prefill, decode)

    loop_run(body())


CUTS = [d for d in Do if d.name.startswith("CUT")]
BEFORE_THE_GRANT = (Do.CUT_BEFORE, Do.CUT_IN_LENGTH, Do.CUT_IN_HEAD)


@pytest.mark.parametrize("cut", CUTS)
def test_a_connection_cut_anywhere(loop_run: Run, cut: Do) -> None:
    """Frames: hello, three pushes of a block, the seal."""

    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            for number in range(5):
                async with Proxy(decode.address, on(number, cut)) as proxy:
                    t = transfer(number, 12)
                    t.open(prefill, decode, proxy.address)
                    t.seal(prefill)
                    await cut_at(number, cut, t, prefill, decode)
            await works(prefill, decode)

    async def cut_at(number: int, cut: Do, t: Transfer, prefill: Worker, decode: Worker) -> None:
        end = await prefill.told.wait_any(("export_failed", "done"), t.key)
        if number == 4 and cut in (Do.CUT_AFTER_HEAD, Do.CUT_IN_PAYLOAD, Do.CUT_AFTER):
            # The seal (it has no payload) was whole: D has all, whatever becomes of P.
            await decode.told.wait("committed", t.key)
            t.check_bytes(prefill, decode)
            return
        assert end[0] == "export_failed" or end[2] is False
        if number == 0 or (number == 1 and cut in BEFORE_THE_GRANT):
            # D never heard of the transfer; the router takes the grant back.
            assert decode.told.names(t.key) == []
            decode.plane.cancel_import(t.key)
        else:
            failure = (await decode.told.wait("import_failed", t.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED
        await decode.told.wait("released", t.key)

    loop_run(body())


def test_a_repeated_frame_fails_closed(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            async with Proxy(decode.address, on(2, Do.REPEAT)) as proxy:
                t = transfer(1, 23)
                t.open(prefill, decode, proxy.address)
                prefill.plane.export_progress(t.key, 8)
                at_p, at_d = await both_failed(t, prefill, decode)
                assert "layers 0-5 of blocks 1-1: sent twice" in at_d
                assert "sent twice" in at_p
            await works(prefill, decode)

    loop_run(body())


def test_a_repeated_seal_ends_its_connection_only(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            async with Proxy(decode.address, on_seal(Do.REPEAT)) as proxy:
                t = transfer(1, 23)
                t.open(prefill, decode, proxy.address)
                t.seal(prefill)
                await decode.told.wait("committed", t.key)
                assert (await prefill.told.wait("done", t.key))[2]
                async with asyncio.timeout(WAIT_S):
                    while decode.plane.connections:
                        await asyncio.sleep(0.01)
            await works(prefill, decode)

    loop_run(body())


def stall(limits: ImportLimits) -> KvSettings:
    return KvSettings(imports=limits, tick_s=0.02)


def test_a_sender_that_stalls_within_a_frame(loop_run: Run) -> None:
    """Renewals of the lease don't help it."""

    async def body() -> None:
        settings = stall(ImportLimits(payload_s=0.3))
        async with pair(None, settings) as (prefill, decode):
            async with Proxy(decode.address, on(1, Do.HOLD)) as proxy:
                t = transfer(1, 23)
                t.open(prefill, decode, proxy.address)
                t.seal(prefill)
                await proxy.held.wait()
                decode.plane.renew(t.key)
                failure = (await decode.told.wait("import_failed", t.key))[2]
                assert "the payload didn't come in time" in failure.message
                await decode.told.wait("released", t.key)
                assert decode.told.names(t.key) == ["quarantined", "import_failed", "released"]
                proxy.let_go.set()
                await prefill.told.wait_any(("export_failed", "done"), t.key)
            await works(prefill, decode)

    loop_run(body())


@pytest.mark.parametrize(
    ("limits", "computed", "says"),
    [
        (ImportLimits(first_frame_s=0.2), 0, "first frame"),
        (ImportLimits(next_frame_s=0.2), 8, "next frame"),
        (ImportLimits(seal_s=0.2), 23, "seal"),
    ],
)
def test_a_sender_that_stalls_between_frames(
    loop_run: Run, limits: ImportLimits, computed: int, says: str
) -> None:
    async def body() -> None:
        async with pair(None, stall(limits)) as (prefill, decode):
            t = transfer(1, 23)
            t.open(prefill, decode)
            prefill.plane.export_progress(t.key, computed)
            failure = (await decode.told.wait("import_failed", t.key))[2]
            assert f"the {says} didn't come in time" in failure.message
            await decode.told.wait("released", t.key)
            if computed:  # P has shown its connection, so it is told
                at_p = (await prefill.told.wait("export_failed", t.key))[2]
                assert f"the {says} didn't come in time" in at_p.message
            else:
                prefill.plane.cancel_export(t.key)
                await prefill.told.wait("done", t.key)

    loop_run(body())


def test_a_grants_lease_ends_by_itself(loop_run: Run) -> None:
    """Nothing else happens at the worker, and the sweep still runs."""

    async def body() -> None:
        decode = await worker("decode", settings=stall(ImportLimits(lease_s=0.1)))
        key = (1, 1)
        decode.plane.open_import(key, "r", 1, (3,), 0, (0,), time.monotonic(), token_count=1)
        failure = (await decode.told.wait("import_failed", key))[2]
        assert failure.kind == FailureKind.LEASE_EXPIRED
        await decode.told.wait("released", key)
        await decode.plane.close()

    loop_run(body())


def test_an_exports_lease_ends_by_itself_and_the_target_is_told(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(KvSettings(tick_s=0.02)) as (prefill, decode):
            t = transfer(1, 23)
            t.open(prefill, decode, lease_s=1.0)
            at_p = (await prefill.told.wait("export_failed", t.key))[2]
            assert at_p.kind == FailureKind.LEASE_EXPIRED
            at_d = (await decode.told.wait("import_failed", t.key))[2]
            assert "gave up: the lease of 1 s wasn't renewed" in at_d.message
            await decode.told.wait("released", t.key)

    loop_run(body())


def test_a_renewed_lease_goes_on(loop_run: Run) -> None:
    now = [0.0]

    async def body() -> None:
        prefill = await worker("prefill", seed=1, clock=lambda: now[0])
        decode = await worker("decode", clock=lambda: now[0])
        t = transfer(1, 23)
        t.open(prefill, decode, now=0.0)
        for _ in range(5):
            now[0] += 20.0
            for made in (prefill, decode):
                made.plane.renew(t.key)
                made.plane.tick()
        t.seal(prefill)
        await decode.told.wait("committed", t.key)
        await prefill.told.wait("done", t.key)
        await prefill.plane.close()
        await decode.plane.close()

    loop_run(body())


def test_a_cancel_within_a_receive_quarantines_until_it_returned(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(layout=BIG) as (prefill, decode):
            async with Proxy(decode.address, on(1, Do.HOLD)) as proxy:
                t = transfer(1, 64, layout=BIG)
                t.open(prefill, decode, proxy.address)
                t.seal(prefill)
                await proxy.held.wait()
                await some_bytes_of(t, decode)
                assert decode.plane.cancel_import(t.key)
                # The receive hasn't returned: nothing ran since.
                assert decode.told.names(t.key) == ["quarantined"]
                await decode.told.wait("released", t.key)
                assert decode.told.names(t.key) == ["quarantined", "released"]
                # The blocks belong to somebody else now; the old frame's rest comes late.
                mark = b"\xaa" * len(decode.pool)
                decode.pool[:] = mark
                proxy.let_go.set()
                await prefill.told.wait_any(("export_failed", "done"), t.key)
                assert not decode.plane.cancel_import(t.key)
                assert bytes(decode.pool) == mark
            await works(prefill, decode, BIG)

    async def some_bytes_of(t: Transfer, decode: Worker) -> None:
        """The receive of the held frame has begun."""
        async with asyncio.timeout(WAIT_S):
            while not any(decode.block(t.destination[0])[-64:]):
                await asyncio.sleep(0.001)

    loop_run(body())


def test_cancels_between_frames_release_at_once(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            t = transfer(1, 23)
            t.open(prefill, decode)
            assert not decode.plane.cancel_import(t.key)
            assert decode.told.names(t.key) == ["released"]
            t.seal(prefill)
            failure = (await prefill.told.wait_any(("export_failed", "done"), t.key))[2]
            assert failure is False or "no such grant" in failure.message
            await works(prefill, decode)

    loop_run(body())


def test_a_cancel_at_the_sender_tells_the_target_and_keeps_the_connection(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(SMALL_FRAMES) as (prefill, decode):
            t = transfer(1, 23)
            t.open(prefill, decode)
            prefill.plane.export_progress(t.key, 12)
            async with asyncio.timeout(WAIT_S):
                while not any(decode.block(t.destination[2])):
                    await asyncio.sleep(0.001)
            prefill.plane.cancel_export(t.key)
            assert (await prefill.told.wait("done", t.key))[2] is False
            failure = (await decode.told.wait("import_failed", t.key))[2]
            assert "gave up: cancelled at the prefill worker" in failure.message
            await decode.told.wait("released", t.key)
            await works(prefill, decode)
            assert decode.plane.connections == 1

    loop_run(body())


def test_a_cancel_right_after_the_start(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode):
            t = transfer(1, 23)
            t.open(prefill, decode)
            prefill.plane.cancel_export(t.key)
            await prefill.told.wait("done", t.key)
            decode.plane.cancel_import(t.key)
            await works(prefill, decode)

    loop_run(body())


def test_a_cancel_within_a_payload_frees_the_senders_blocks_at_once(loop_run: Run) -> None:
    """The target reads nothing; the sender doesn't wait for it."""

    async def body() -> None:
        async with pair(layout=BIG, blocks=80) as (prefill, decode):
            async with Proxy(decode.address, on(1, Do.HOLD)) as proxy:
                t = transfer(1, 64 * 16, layout=BIG, pool=80)
                t.open(prefill, decode, proxy.address)
                t.seal(prefill)
                await proxy.held.wait()
                await asyncio.sleep(0.2)  # nothing tells that all buffers are full
                prefill.plane.cancel_export(t.key)
                async with asyncio.timeout(0.5):
                    await prefill.told.wait("done", t.key)
                proxy.let_go.set()
                await decode.told.wait("import_failed", t.key)
                await decode.told.wait("released", t.key)
            assert prefill.plane.idle_connections == 0

    loop_run(body())


def test_a_target_that_stops_reading(loop_run: Run) -> None:
    settings = KvSettings(exports=ExportLimits(send_s=0.3), tick_s=0.02)

    async def body() -> None:
        async with (
            pair(settings, layout=BIG, blocks=80) as (prefill, decode),
            Proxy(decode.address, on(1, Do.HOLD)) as proxy,
        ):
            t = transfer(1, 64 * 16, layout=BIG, pool=80)
            t.open(prefill, decode, proxy.address)
            t.seal(prefill)
            at_p = (await prefill.told.wait("export_failed", t.key))[2]
            assert at_p.kind == FailureKind.TRANSFER_FAILED
            assert "took no whole frame in 0.3 s" in at_p.message
            proxy.let_go.set()
            await decode.told.wait("released", t.key)

    loop_run(body())


def test_no_verdict_after_the_seal(loop_run: Run) -> None:
    settings = KvSettings(exports=ExportLimits(verdict_s=0.2), tick_s=0.02)

    async def body() -> None:
        async with pair(settings) as (prefill, decode):
            seen = asyncio.Event()

            async def never(_: frames.Frame) -> None:
                seen.set()

            async with FakeTarget(decode.epoch, never) as fake:
                t = transfer(1, 4)
                t.open(prefill, decode, fake.address)
                t.seal(prefill)
                await prefill.told.wait("sealed", t.key)
                assert (await prefill.told.wait("done", t.key))[2] is False
            assert not decode.plane.cancel_import(t.key)

    loop_run(body())


def test_the_prefill_worker_dies_after_its_seal(loop_run: Run) -> None:
    """D has all: that P never hears the verdict doesn't matter."""

    async def body() -> None:
        async with pair() as (_, decode):
            prefill = await worker("prefill-2", seed=2)
            async with Proxy(decode.address, on_seal(Do.CUT_AFTER)) as proxy:
                t = transfer(1, 23)
                t.open(prefill, decode, proxy.address)
                t.seal(prefill)
                await decode.told.wait("committed", t.key)
                t.check_bytes(prefill, decode)
                await prefill.plane.close()
                prefill.told.check_ends()

    loop_run(body())


def test_a_decode_worker_that_goes_frees_the_prefill_workers_blocks(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, _):
            decode = await worker("decode-2")
            t = transfer(1, 23)
            t.open(prefill, decode)
            prefill.plane.export_progress(t.key, 8)
            async with asyncio.timeout(WAIT_S):
                while not any(decode.block(t.destination[1])):
                    await asyncio.sleep(0.001)
            await decode.plane.close()
            assert decode.told.names(t.key) == ["released"]
            failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED

    loop_run(body())


# ---- senders of another make --------------------------------------------------------------


class RawSender:
    """Writes frames of the test's own making."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self._prefill, self._decode = prefill, decode

    async def __aenter__(self) -> "RawSender":
        self._sock = await tcp.connect(self._decode.address)
        hello = frames.encode_hello("raw", "raw-1", self._decode.epoch, self._decode.layout)
        await self.write(hello)
        assert await self.reply() == frames.Welcome(self._decode.epoch)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sock.close()

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def reply(self) -> frames.Reply:
        async with asyncio.timeout(WAIT_S):
            return frames.parse_reply(await tcp.receive_message(self._sock))


class FakeTarget:
    """Welcomes a sender and gives each of its frames to `take`."""

    def __init__(
        self, epoch: str, take: Callable[[frames.Frame], Coroutine[Any, Any, None]]
    ) -> None:
        self._epoch, self._take = epoch, take
        self.address = ""

    async def __aenter__(self) -> "FakeTarget":
        self._listening = await tcp.listen("127.0.0.1", 0)
        self.address = "{}:{}".format(*self._listening.getsockname())
        self._task = asyncio.ensure_future(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        self._listening.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(self._listening)
        with sock:
            tcp.configure(sock)
            frames.parse_frame(await tcp.receive_message(sock))
            await loop.sock_sendall(sock, frames.encode_reply(frames.Welcome(self._epoch)))
            while True:
                frame = frames.parse_frame(await tcp.receive_message(sock))
                if isinstance(frame, PushHead):
                    await tcp.receive_exactly(sock, memoryview(bytearray(frame.payload_bytes)))
                await self._take(frame)


def test_a_grant_that_was_never_given(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode), RawSender(prefill, decode) as raw:
            id = TransferId("r", 1)
            await raw.write(
                frames.encode_push(
                    PushHead(b"?" * 16, id, KvRange(0, 6, 0, 1), LAYOUT.block_bytes, 0)
                )
            )
            verdict = await raw.reply()
            assert isinstance(verdict, Verdict)
            assert not verdict.committed
            assert "no such grant" in verdict.reason

    loop_run(body())


def test_bytes_outside_of_the_grant_are_not_taken(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode), RawSender(prefill, decode) as raw:
            grant = decode.plane.open_import(
                (1, 1), "r", 1, (3, 4), 1, (0,), time.monotonic(), token_count=8
            )
            head = PushHead(grant, TransferId("r", 1), KvRange(0, 6, 0, 1), LAYOUT.block_bytes, 0)
            await raw.write(frames.encode_push(head) + b"\xff" * LAYOUT.block_bytes)
            verdict = await raw.reply()
            assert isinstance(verdict, Verdict)
            assert "within the prefix" in verdict.reason
            await decode.told.wait("released", (1, 1))
            assert not any(decode.pool)

    loop_run(body())


def test_a_sender_that_lies_about_a_whole_transfer_is_not_believed(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode), RawSender(prefill, decode) as raw:
            grant = decode.plane.open_import(
                (1, 1), "r", 1, (3, 4), 0, (0,), time.monotonic(), token_count=8
            )
            await raw.write(frames.encode_seal(SealHead(grant, TransferId("r", 1), 8, 0, 0, (), 0)))
            verdict = await raw.reply()
            assert isinstance(verdict, Verdict)
            assert "12 of 12 slices missing" in verdict.reason
            await decode.told.wait("released", (1, 1))

    loop_run(body())


def test_a_refused_grant_at_another_worker_does_not_touch_this_one(loop_run: Run) -> None:
    """The right address with a wrong secret fails that export alone."""

    async def body() -> None:
        async with pair() as (prefill, decode):
            t = transfer(1, 23)
            t.open(prefill, decode)
            key = (3, 3)
            wrong = target(decode, b"w" * 16)
            prefill.plane.open_export(key, "r", 1, wrong, t.source, t.tokens, 30)
            prefill.plane.export_progress(key, t.tokens)
            failure = (await prefill.told.wait("export_failed", key))[2]
            assert "no such grant" in failure.message
            t.seal(prefill)
            await decode.told.wait("committed", t.key)
            await prefill.told.wait("done", t.key)

    loop_run(body())
