"""Quantized KV from plane to plane: fewer bytes, near values, flipped bits never become KV."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from pd_engine.kv.plane import KvSettings
from pd_engine.transfer import ExportLimits
from tests.pd_engine.kv_rig import LAYOUT, Worker, check_flipped_bit, pair, transfer

Run = Callable[[Coroutine[Any, Any, None]], None]


def settings(quantization: str, transport: str = "tcp", frame_bytes: int = 1 << 20) -> KvSettings:
    limits = ExportLimits(frame_bytes=frame_bytes)
    return KvSettings(exports=limits, quantization=quantization, transport=transport)


def fill(worker: Worker) -> Any:
    values = np.random.default_rng(1).normal(size=len(worker.pool) // 4).astype(np.float32)
    worker.pool[:] = values.tobytes()
    return values


def floats(worker: Worker, blocks: tuple[int, ...]) -> Any:
    return np.frombuffer(b"".join(worker.blocks(blocks)), np.float32)


@pytest.mark.parametrize("frame_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("quantization", "most", "share"), [("int8", 0.02, 0.4), ("int4", 0.4, 0.5)]
)
def test_near_values_in_fewer_bytes(
    run: Run, quantization: str, most: float, share: float, frame_bytes: int
) -> None:
    async def body() -> None:
        made = settings(quantization, frame_bytes=frame_bytes)
        async with pair(made) as (prefill, decode):
            fill(prefill)
            t = transfer(1, 48, prefix_blocks=2)
            t.open(prefill, decode)
            prefill.plane.export_progress(t.key, 17)
            t.seal(prefill)
            stats = (await decode.told.wait("committed", t.key))[3]
            assert (await prefill.told.wait("done", t.key))[2] is True
            full = 10 * LAYOUT.block_bytes
            assert 0 < stats.kv_bytes < (share if frame_bytes > 1 else 1.0) * full
            error = floats(decode, t.destination[2:]) - floats(prefill, t.source[2:])
            assert np.abs(error).max() < most

    run(body())


def test_a_flipped_bit_fails_closed_and_writes_nothing(run: Run) -> None:
    async def body() -> None:
        async with pair(settings("int8")) as (prefill, decode):
            fill(prefill)
            await check_flipped_bit(transfer(1, 40), prefill, decode)

    run(body())


def test_what_cannot_be_quantized_goes_as_it_is(run: Run) -> None:
    async def body() -> None:
        async with pair(settings("int4")) as (prefill, decode):
            values = fill(prefill)
            values[:] = np.inf
            prefill.pool[:] = values.tobytes()
            t = transfer(1, 40)
            t.open(prefill, decode)
            t.seal(prefill)
            await decode.told.wait("committed", t.key)
            t.check_bytes(prefill, decode)

    run(body())


def test_an_unknown_quantization_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with pair(settings("int8")) as (prefill, decode):
            sender = prefill.plane._sender
            monkeypatch.setattr(sender, "encode", lambda *_: b"x" * 10)
            monkeypatch.setattr(sender, "quantization", "int3")
            t = transfer(1, 40)
            t.open(prefill, decode)
            t.seal(prefill)
            failure = (await decode.told.wait("import_failed", t.key))[2]
            assert "'int3' isn't known" in failure.message
            await prefill.told.wait_any(("done", "export_failed"), t.key)
            await asyncio.sleep(0)

    run(body())
