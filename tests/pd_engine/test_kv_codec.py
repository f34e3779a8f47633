"""Quantized KV: sizes as announced, errors within a level, every dtype, what isn't quantized."""

from typing import Any

import numpy as np
import pytest

from pd_core.estimate import kv_bytes
from pd_core.geometry import ModelKv
from pd_core.kv import KvLayout
from pd_engine.imports import Accept
from pd_engine.kv.codec import Codec, Part
from pd_engine.kv.memory import KvMemory
from pd_engine.transfer import quantized_bytes

BLOCKS = 12


def layout(dtype: str = "float32", **changes: Any) -> KvLayout:
    base = {"block_tokens": 16, "layers": 3, "kv_heads": 2, "head_dim": 8, **changes}
    return KvLayout("m" * 64, dtype, **base)


def pool(made: KvLayout, values: Any) -> tuple[bytearray, Codec]:
    """A pool with these values in every block; as floats [block, layer, K|V, token, head, dim]."""
    data = values.astype(np.float32)
    if made.dtype == "bfloat16":
        raw = (data.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = data.astype(made.dtype).tobytes()
    memory = bytearray(raw)
    return memory, Codec(KvMemory(memoryview(memory), made))


def floats(made: KvLayout, memory: bytearray) -> Any:
    shape = (BLOCKS, made.layers, 2, made.block_tokens, made.kv_heads, made.head_dim)
    if made.dtype == "bfloat16":
        wide = np.frombuffer(memory, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    return np.frombuffer(memory, made.dtype).astype(np.float32).reshape(shape)


def restore(
    made: KvLayout, codec: Codec, payload: bytes, into: Part, quantization: str = ""
) -> None:
    """Whole blocks of a sender with the same layout."""
    blocks = len(into.block_ids)
    to = Accept(
        (0, 0),
        tuple(into.block_ids),
        into.layer_start,
        into.layer_count,
        blocks * made.block_tokens,
    )
    for _ in codec.decode(memoryview(payload), blocks, made, quantization, to):
        pass


def noise(made: KvLayout, seed: int = 1) -> Any:
    """Like real KV: K has channels that are many times larger than the others."""
    shape = (BLOCKS, made.layers, 2, made.block_tokens, made.kv_heads, made.head_dim)
    values = np.random.default_rng(seed).normal(size=shape)
    values[:, :, 0, :, :, 0] += 40.0
    return values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.1), ("int4", 0.25)])
def test_what_is_restored_is_near(dtype: str, quantization: str, most: float) -> None:
    made = layout(dtype)
    source, codec = pool(made, noise(made))
    target, other = pool(made, noise(made) * 0)
    part, into = Part((3, 1, 9, 4, 0, 7), 1, 2), Part((5, 2, 0, 1, 10, 11), 1, 2)
    payload = codec.encode(part, quantization)
    assert payload is not None
    assert len(payload) == quantized_bytes(made, quantization, 2, 6)
    restore(made, other, payload, into, quantization)
    before, after = floats(made, source), floats(made, target)
    error = np.abs(after[list(into.block_ids), 1:3] - before[list(part.block_ids), 1:3])
    assert error.max() < most * (3 if quantization == "int4" else 1)
    assert error[:, :, 0].mean() < most
    untouched = [b for b in range(BLOCKS) if b not in into.block_ids]
    assert not after[untouched].any()
    assert not after[:, 0].any()


def test_int4_keys_by_channel_spare_the_small_channels() -> None:
    made = layout(head_dim=64)
    values = noise(made)
    source, codec = pool(made, values)
    target, other = pool(made, values * 0)
    part = Part(tuple(range(BLOCKS)), 0, 3)
    payload = codec.encode(part, "int4")
    assert payload is not None
    restore(made, other, payload, part, "int4")
    error = np.abs(floats(made, target) - floats(made, source))[:, :, 0, ..., 1:]
    assert error.mean() < 0.12  # by token it would be a whole unit: 40 / 15 / 2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9])
def test_all_alike(quantization: str, value: float) -> None:
    made = layout()
    _, codec = pool(made, noise(made) * 0 + value)
    target, other = pool(made, noise(made) * 0 + 7)
    payload = codec.encode(Part((1,), 0, 3), quantization)
    assert payload is not None
    restore(made, other, payload, Part((2,), 0, 3), quantization)
    assert np.abs(floats(made, target)[2] - value).max() < 1e-6


@pytest.mark.parametrize("value", [1e6, float("inf"), float("nan")])
def test_what_cannot_be_quantized_is_said(value: float) -> None:
    made = layout()
    values = noise(made)
    values[4, 1, 0, 3, 0, 2] = value
    _, codec = pool(made, values)
    assert codec.encode(Part((3, 4), 0, 3), "int8") is None
    assert codec.encode(Part((3,), 0, 3), "int8") is not None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_sizes_are_those_of_the_estimate(quantization: str) -> None:
    made = layout("bfloat16", head_dim=64)
    kv = ModelKv(made.layers, 2 * made.layers * made.kv_heads, made.head_dim, "bfloat16")
    size = quantized_bytes(made, quantization, made.layers, 8)  # whole groups of tokens
    assert size == kv_bytes(kv, 8 * made.block_tokens, quantization)
