"""Two KV planes on 127.0.0.1, on asyncio's loop and on uvloop: real bytes are compared for
shapes, prefixes, layer-wise progress, several choices; connections are reused; handshakes
refuse what doesn't fit and name both sides; rates, bounds, ends."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from pd_core.failures import FailureKind, RequestFailure
from pd_core.kv import KvLayout
from pd_engine.kv.channels import ChannelSettings
from pd_engine.kv.plane import KvSettings
from pd_engine.kv.receiver import ReceiverSettings
from pd_engine.transfer import ExportLimits
from tests.pd_engine.kv_rig import (
    LAYOUT,
    WAIT_S,
    Recorder,
    check_mismatch,
    first_tokens,
    pair,
    target,
    transfer,
    worker,
)

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_run(request: pytest.FixtureRequest) -> Run:
    runner = asyncio.run if request.param == "asyncio" else uvloop.run

    def bounded(work: Coroutine[Any, Any, None]) -> None:
        async def body() -> None:
            async with asyncio.timeout(60):
                await work

        runner(body())

    return bounded


SHAPES = {
    "small slices": LAYOUT,
    "large slices": KvLayout("m", "float32", block_tokens=16, layers=3, kv_heads=8, head_dim=64),
    "one layer": KvLayout("m", "bfloat16", block_tokens=1, layers=1, kv_heads=1, head_dim=2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("frame_kib", [1, 64, 512])
def test_bytes_arrive(loop_run: Run, shape: str, frame_kib: int) -> None:
    layout = SHAPES[shape]
    settings = KvSettings(exports=ExportLimits(frame_bytes=frame_kib * 1024))
    block = layout.block_tokens

    async def body() -> None:
        async with pair(settings, layout=layout) as (prefill, decode):
            for number, (tokens, prefix) in enumerate(
                [
                    (1, 0),
                    (block, 0),
                    (block, 1),
                    (5 * block + 1, 0),
                    (9 * block, 4),
                    (40 * block, 0),
                ]
            ):
                t = transfer(number, tokens, layout=layout, prefix_blocks=prefix)
                before = decode.blocks(t.destination[:prefix])
                t.open(prefill, decode)
                t.seal(prefill, cached_tokens=tokens // 2)
                _, _, first, stats = await decode.told.wait("committed", t.key)
                assert first == first_tokens(0)
                sent = (layout.blocks_for(tokens) - prefix) * layout.block_bytes
                assert stats.kv_bytes == sent
                assert stats.cached_tokens == tokens // 2
                assert (await prefill.told.wait("done", t.key))[2]
                assert (await prefill.told.wait("sealed", t.key))[2].kv_bytes == sent
                t.check_bytes(prefill, decode)
                assert decode.blocks(t.destination[:prefix]) == before
            assert prefill.plane.idle_connections == 1

    loop_run(body())


def test_layers_and_chunks_as_they_become_final(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode):
            t = transfer(1, 30, choices=(0, 1, 2))
            t.open(prefill, decode)
            for tokens in (3, 12, 30):
                for layer in range(0, 6, 2):
                    prefill.plane.export_progress(t.key, tokens, layer, layer + 2)
                    await asyncio.sleep(0)
            t.seal(prefill)
            _, _, first, stats = await decode.told.wait("committed", t.key)
            assert first == first_tokens(0, 1, 2)
            assert stats.kv_bytes == 8 * LAYOUT.block_bytes
            await prefill.told.wait("done", t.key)
            t.check_bytes(prefill, decode)

    loop_run(body())


def test_several_transfers_at_once_and_one_after_the_other(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(blocks=256) as (prefill, decode):
            many = [transfer(n, 20 + n, at=16 * n, pool=16 * n + 16) for n in range(16)]
            for t in many:
                t.open(prefill, decode)
            for t in many:
                t.seal(prefill)
            for t in many:
                await decode.told.wait("committed", t.key)
                await prefill.told.wait("done", t.key)
                t.check_bytes(prefill, decode)
            assert 1 <= decode.plane.connections <= 16
            assert prefill.plane.idle_connections == decode.plane.connections

    loop_run(body())


def test_more_transfers_than_connections(loop_run: Run) -> None:
    settings = KvSettings(channels=ChannelSettings(max_lent=2, max_idle=1))

    async def body() -> None:
        async with pair(settings, blocks=128) as (prefill, decode):
            many = [transfer(n, 20 + n, at=16 * n, pool=16 * n + 16) for n in range(8)]
            for t in many:
                t.open(prefill, decode)
                t.seal(prefill)
            for t in many:
                await decode.told.wait("committed", t.key)
                await prefill.told.wait("done", t.key)
                assert decode.plane.connections <= 3
            assert prefill.plane.idle_connections == 1

    loop_run(body())


def test_a_layout_that_does_not_match_is_refused_with_both_named(loop_run: Run) -> None:
    other = KvLayout("a" * 64, "float32", block_tokens=4, layers=5, kv_heads=2, head_dim=8)

    async def body() -> None:
        async with pair() as (prefill, _):
            decode = await worker("decode-2", layout=other)
            t = transfer(1, 10)
            named = f"prefill has KV of {LAYOUT.describe()}", f"decode-2 has {other.describe()}"
            await check_mismatch(t, prefill, decode, named)
            assert decode.plane.open_imports == 1
            await decode.plane.close()
            assert decode.told.names(t.key) == ["released"]
            assert bytes(decode.pool) == bytes(len(decode.pool))

    loop_run(body())


def test_another_model_is_refused(loop_run: Run) -> None:
    other = KvLayout("b" * 64, "float32", block_tokens=4, layers=6, kv_heads=2, head_dim=8)

    async def body() -> None:
        async with pair() as (prefill, _):
            decode = await worker("decode-2", layout=other)
            t = transfer(1, 10)
            t.open(prefill, decode)
            failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert failure.kind == FailureKind.LAYOUT_MISMATCH
            assert "model aaaaaaaaaaaa" in failure.message
            assert "model bbbbbbbbbbbb" in failure.message
            await decode.plane.close()

    loop_run(body())


def test_a_target_that_restarted_on_its_address_is_somebody_else(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, old):
            one = transfer(1, 10)
            one.open(prefill, old)
            one.seal(prefill)
            await prefill.told.wait("done", one.key)
            late = transfer(2, 10)
            late.open(prefill, old)
            await old.plane.close()
            port = int(old.address.rsplit(":", 1)[1])
            await prefill.told.wait("export_failed", late.key)

            new = await worker("decode", epoch="decode-epoch-2", port=port)
            assert new.address == old.address
            stale = transfer(3, 10)
            prefill.plane.open_export(
                stale.key, "r", 1, target(old, b"g" * 16), stale.source, stale.tokens, 30
            )
            failure = (await prefill.told.wait("export_failed", stale.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED
            assert "decode-epoch-1" in failure.message
            assert "decode-epoch-2" in failure.message

            good = transfer(4, 10)
            good.open(prefill, new)
            good.seal(prefill)
            await new.told.wait("committed", good.key)
            await prefill.told.wait("done", good.key)
            await new.plane.close()

    loop_run(body())


def test_nobody_listens(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode):
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = taken.getsockname()[1]
            t = transfer(1, 10)
            t.open(prefill, decode, address=f"127.0.0.1:{port}")
            failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED
            assert f"no KV connection to 127.0.0.1:{port}" in failure.message

    loop_run(body())


def test_a_target_that_never_answers_the_hello(loop_run: Run) -> None:
    settings = KvSettings(channels=ChannelSettings(connect_s=0.2))

    async def body() -> None:
        async with pair(settings) as (prefill, decode):
            with socket.create_server(("127.0.0.1", 0)) as deaf:
                t = transfer(1, 10)
                t.open(prefill, decode, address=f"127.0.0.1:{deaf.getsockname()[1]}")
                failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED
            assert "within 0.2 s" in failure.message

    loop_run(body())


def test_targets_that_make_no_sense_are_refused_at_once(loop_run: Run) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode):
            t = transfer(1, 10)
            bad = target(decode, b"g" * 16)
            bad.transport = "pigeon"
            for wrong in (bad, target(decode, b"g" * 16, prefix_blocks=9)):
                with pytest.raises(RequestFailure) as e:
                    prefill.plane.open_export(t.key, "r", 1, wrong, t.source, t.tokens, 30)
                assert e.value.failure.kind == FailureKind.TRANSFER_FAILED
            for address in ("", "nowhere", "127.0.0.1:0", "127.0.0.1:99999"):
                there = target(decode, b"g" * 16, address=address or ":")
                key = (2, hash(address))
                prefill.plane.open_export(key, "r", 1, there, t.source, t.tokens, 30)
                failure = (await prefill.told.wait("export_failed", key))[2]
                assert "must be host:port" in failure.message

    loop_run(body())


def test_the_rate_is_kept(loop_run: Run) -> None:
    size = 40 * LAYOUT.block_bytes
    settings = KvSettings(exports=ExportLimits(frame_bytes=4096), kv_rate_limit_bytes_s=size / 0.4)

    async def body() -> None:
        async with pair(settings) as (prefill, decode):
            t = transfer(1, 160)
            t.open(prefill, decode)
            t.seal(prefill)
            stats = (await prefill.told.wait("sealed", t.key))[2]
            assert stats.kv_bytes == size
            assert 0.35 <= stats.transfer_s <= 5
            await decode.told.wait("committed", t.key)
            t.check_bytes(prefill, decode)

    loop_run(body())


def test_idle_connections_end(loop_run: Run) -> None:
    settings = KvSettings(channels=ChannelSettings(idle_s=0.05), tick_s=0.01)

    async def body() -> None:
        async with pair(settings) as (prefill, decode):
            t = transfer(1, 10)
            t.open(prefill, decode)
            t.seal(prefill)
            await prefill.told.wait("done", t.key)
            async with asyncio.timeout(WAIT_S):
                while prefill.plane.idle_connections or decode.plane.connections:
                    await asyncio.sleep(0.01)

    loop_run(body())


def test_a_sender_that_says_nothing_is_dropped(loop_run: Run) -> None:
    settings = KvSettings(
        receiver=ReceiverSettings(max_connections=2, handshake_s=0.1), tick_s=0.01
    )

    async def body() -> None:
        async with pair(None, settings) as (prefill, decode):
            host, port = decode.address.rsplit(":", 1)
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            async with asyncio.timeout(WAIT_S):
                for reader, _ in silent:
                    assert await reader.read() == b""
            assert decode.plane.connections == 0
            for _, writer in silent:
                writer.close()
                await writer.wait_closed()
            t = transfer(1, 10)
            t.open(prefill, decode)
            t.seal(prefill)
            await decode.told.wait("committed", t.key)

    loop_run(body())


GARBAGE = {
    "huge": b"\xff\xff\xff\xff",
    "empty": b"\0\0\0\0",
    "no protobuf": b"\0\0\0\4\xff\xff\xff\xff",
    "no frame": b"\0\0\0\2\x7a\0",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "seal before hello": b"\0\0\0\2\x1a\0",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_ends_only_its_connection(loop_run: Run, what: str) -> None:
    async def body() -> None:
        async with pair() as (prefill, decode):
            host, port = decode.address.rsplit(":", 1)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(GARBAGE[what])
            async with asyncio.timeout(WAIT_S):
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionResetError):
                await writer.wait_closed()
            t = transfer(1, 10)
            t.open(prefill, decode)
            t.seal(prefill)
            await decode.told.wait("committed", t.key)

    loop_run(body())


class Clumsy(Recorder):
    def on_committed(self, key: Any, first: Any, stats: Any) -> None:
        super().on_committed(key, first, stats)
        raise RuntimeError("the owner's mistake")


def test_a_callback_that_raises_stops_nobody(
    loop_run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with pair() as (prefill, _):
            decode = await worker("decode-2", told=Clumsy())
            t = transfer(1, 10)
            t.open(prefill, decode)
            t.seal(prefill)
            assert (await prefill.told.wait("done", t.key))[2]
            await decode.plane.close()

    loop_run(body())
    assert "the owner's mistake" in caplog.text


def test_the_rate_can_be_limited_later(loop_run: Run) -> None:
    async def body() -> None:
        async with pair(KvSettings(exports=ExportLimits(frame_bytes=4096))) as workers:
            prefill, decode = workers
            size = 40 * LAYOUT.block_bytes
            prefill.plane.limit_rate(size / 0.2)
            took = []
            for number in range(2):
                t = transfer(number, 160)
                t.open(prefill, decode)
                t.seal(prefill)
                took.append((await prefill.told.wait("sealed", t.key))[2].transfer_s)
                prefill.plane.limit_rate(0)
                await prefill.told.wait("done", t.key)
            assert took[0] >= 0.15
            assert took[1] < took[0]

    loop_run(body())


@pytest.mark.slow
def test_two_hundred_megabytes() -> None:
    """Prints the rate; compare with a raw socket by hand (both ends share this process)."""
    layout = KvLayout("m", "float32", block_tokens=16, layers=30, kv_heads=3, head_dim=64)
    blocks = 300  # 221 MB

    async def body() -> None:
        async with pair(layout=layout, blocks=blocks) as (prefill, decode):
            t = transfer(1, blocks * 16, layout=layout, pool=blocks)
            t.open(prefill, decode)
            start = time.perf_counter()
            t.seal(prefill)
            stats = (await decode.told.wait("committed", t.key))[3]
            took = time.perf_counter() - start
            assert stats.kv_bytes == blocks * layout.block_bytes
            print(f"{stats.kv_bytes / took / 1e9:.2f} GB/s")
            t.check_bytes(prefill, decode)

    uvloop.run(body())
