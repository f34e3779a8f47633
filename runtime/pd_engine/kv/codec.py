"""KV in fewer bits for the wire: int8 and int4, asymmetric, each frame describing itself.

int8: a scale and a zero (fp16) for each vector, that is K or V of a head of a token. int4:
the same for V; K is scaled by channel over up to 64 tokens of the frame, since some of its
channels are many times larger than the others, in all tokens.

What can't be scaled so (values beyond fp16, NaN) goes unquantized: a frame says what it is.
In numpy, on one thread: the step's threads are not disturbed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_core.estimate import KEY_GROUP_TOKENS
from pd_engine.kv.memory import KvMemory

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_LEVELS = {"int8": 255, "int4": 15}
_FP16_MOST = 60000.0


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [start, start + count) of these pool blocks."""

    block_ids: Sequence[int]
    layer_start: int
    layer_count: int


class Codec:
    """Between a pool and quantized payloads."""

    def __init__(self, memory: KvMemory) -> None:
        self._layout = memory.layout
        raw = np.frombuffer(memory.view, dtype=_RAW[memory.layout.dtype])
        layout = memory.layout
        self._pool = raw.reshape(
            memory.blocks,
            layout.layers,
            2,
            layout.block_tokens,
            layout.kv_heads,
            layout.head_dim,
        )

    def encode(self, part: Part, quantization: str) -> bytes | None:
        """The payload; None: these values can't be quantized."""
        layers = slice(part.layer_start, part.layer_start + part.layer_count)
        raw = self._pool[list(part.block_ids), layers]
        values = _to_floats(raw, self._layout.dtype)
        if not np.abs(values).max(initial=0.0) < _FP16_MOST:  # NaN as well
            return None
        key, value = _tokens(values[:, :, 0]), _tokens(values[:, :, 1])
        pieces = _encode(value, quantization, by_channel=False)
        pieces += _encode(key, quantization, by_channel=quantization == "int4")
        return b"".join(pieces)

    def decode(self, payload: memoryview, part: Part, quantization: str) -> None:
        """Writes the payload's values into the pool."""
        layout = self._layout
        shape = (
            part.layer_count,
            len(part.block_ids) * layout.block_tokens,
            layout.kv_heads,
            layout.head_dim,
        )
        reader = _Reader(payload)
        value = _decode(reader, shape, quantization, by_channel=False)
        key = _decode(reader, shape, quantization, by_channel=quantization == "int4")
        layers = slice(part.layer_start, part.layer_start + part.layer_count)
        blocks = list(part.block_ids)
        for place, tokens in ((0, key), (1, value)):
            split = tokens.reshape(part.layer_count, len(blocks), -1, *shape[2:])
            raw = _from_floats(split.swapaxes(0, 1), layout.dtype)
            for at, block in enumerate(blocks):
                self._pool[block, layers, place] = raw[at]


class _Reader:
    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        piece = self._payload[self._at : self._at + size]
        self._at += size
        return np.frombuffer(piece, dtype=dtype).reshape(shape)


_RAW = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def _tokens(values: Floats) -> Floats:
    """[block, layer, token, head, dim] -> [layer, tokens of all blocks, head, dim]."""
    blocks, layers, tokens, heads, dim = values.shape
    return values.swapaxes(0, 1).reshape(layers, blocks * tokens, heads, dim)


def _groups(tokens: int) -> list[slice]:
    return [
        slice(at, min(tokens, at + KEY_GROUP_TOKENS)) for at in range(0, tokens, KEY_GROUP_TOKENS)
    ]


def _encode(values: Floats, quantization: str, *, by_channel: bool) -> list[bytes]:
    if by_channel:
        parts = [
            _quantize(values[:, group], quantization, axis=1) for group in _groups(values.shape[1])
        ]
        return [piece for part in parts for piece in part]
    return _quantize(values, quantization, axis=3)


def _quantize(values: Floats, quantization: str, axis: int) -> list[bytes]:
    """Scales, zeros, levels. Levels are relative to the scales as they are rounded to fp16."""
    most = _LEVELS[quantization]
    low = values.min(axis=axis, keepdims=True).astype(np.float16)
    span = values.max(axis=axis, keepdims=True) - low.astype(np.float32)
    scale = (span / most).astype(np.float16)
    # A span that fp16 rounds to nothing: all values are the zero.
    divisor = np.where(scale > 0, scale, np.float16(1)).astype(np.float32)
    levels = values - low.astype(np.float32)
    levels /= divisor
    np.rint(levels, out=levels)
    np.clip(levels, 0, most, out=levels)
    q = levels.astype(np.uint8)
    if quantization == "int4":
        q = q[..., 0::2] | (q[..., 1::2] << 4)
    return [scale.tobytes(), low.tobytes(), q.tobytes()]


def _decode(
    reader: _Reader, shape: tuple[int, int, int, int], quantization: str, *, by_channel: bool
) -> Floats:
    layers, tokens, heads, dim = shape
    if not by_channel:
        return _restore(reader, shape, (layers, tokens, heads, 1), quantization)
    out = np.empty(shape, dtype=np.float32)
    for group in _groups(tokens):
        part = (layers, group.stop - group.start, heads, dim)
        out[:, group] = _restore(reader, part, (layers, 1, heads, dim), quantization)
    return out


def _restore(
    reader: _Reader, shape: tuple[int, ...], scales: tuple[int, ...], quantization: str
) -> Floats:
    scale = reader.take(scales, np.float16).astype(np.float32)
    low = reader.take(scales, np.float16).astype(np.float32)
    out: Floats
    if quantization == "int8":
        out = reader.take(shape, np.uint8).astype(np.float32)
    else:
        packed = reader.take((*shape[:-1], shape[-1] // 2), np.uint8)
        out = np.empty(shape, dtype=np.float32)
        out[..., 0::2] = np.bitwise_and(packed, 15)
        out[..., 1::2] = np.right_shift(packed, 4)
    out *= scale
    out += low
    return out


def _to_floats(raw: npt.NDArray[np.generic], dtype: str) -> Floats:
    if dtype == "bfloat16":  # the upper half of a float32
        floats: Floats = (raw.astype(np.uint32) << 16).view(np.float32)
        return floats
    return raw.astype(np.float32)


def _from_floats(values: Floats, dtype: str) -> npt.NDArray[np.generic]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
