"""KV that isn't as the pool has it: in fewer bits for the wire, or another worker's.

Quantized (int8 and int4, asymmetric), each frame describing itself. int8: a scale and a zero
(fp16) for each vector, that is K or V of a head of a token. int4: the same for V; K is scaled
by channel over up to 64 tokens of the frame, since some of its channels are many times larger
than the others, in all tokens. What can't be scaled so (values beyond fp16, NaN) goes
unquantized: a frame says what it is.

Of a worker with another precision or block size: the sender sends its own, the receiver
converts. Widening is exact, narrowing rounds to the nearest (ties to even); a value that would
become infinite so is a Misfit.

In numpy, on one thread: the step's threads are not disturbed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_core.estimate import KEY_GROUP_TOKENS
from pd_core.kv import KvLayout
from pd_engine.imports import Accept
from pd_engine.kv.memory import KvMemory

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[np.generic]
_LEVELS = {"int8": 255, "int4": 15}
_FP16_MOST = 60000.0
_INFINITE_FROM = {"float16": 65520.0, "bfloat16": 3.3961775292304957e38}
"""Magnitudes that round to infinity: half a step beyond the largest."""
_PAUSE_BYTES = 256 * 1024


class Misfit(Exception):
    """A value that this pool's precision can't hold."""


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [start, start + count) of these pool blocks."""

    block_ids: Sequence[int]
    layer_start: int
    layer_count: int


class Codec:
    """Between a pool and payloads that aren't its bytes."""

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

    def decode(
        self, payload: memoryview, blocks: int, sender: KvLayout, quantization: str, to: Accept
    ) -> Iterator[None]:
        """Writes the values of so many of the sender's blocks into the pool, with pauses."""
        shape = (to.layer_count, 2, sender.block_tokens, sender.kv_heads, sender.head_dim)
        if not quantization:
            raw = np.frombuffer(payload, dtype=_RAW[sender.dtype]).reshape(blocks, *shape)
            yield from self._write(raw, sender.dtype, to)
            return
        values = np.empty((to.layer_count, 2, blocks * sender.block_tokens, *shape[3:]), np.float32)
        reader = _Reader(payload)
        _decode(reader, values[:, 1], quantization, by_channel=False)
        _decode(reader, values[:, 0], quantization, by_channel=quantization == "int4")
        yield from self._write(values[np.newaxis], "float32", to)

    def _write(self, values: Raw, dtype: str, to: Accept) -> Iterator[None]:
        """`values`: [block, layer, K|V, token, head, dim], with as many tokens a block as they
        like."""
        layers = slice(to.layer_start, to.layer_start + to.layer_count)
        theirs, ours = values.shape[3], self._layout.block_tokens
        done = since = 0
        while done < to.tokens:
            block, start = divmod(to.skip_tokens + done, theirs)
            target, first = divmod(to.offset_tokens + done, ours)
            count = min(theirs - start, ours - first, to.tokens - done)
            piece = values[block, :, :, start : start + count]
            converted = _converted(piece, dtype, self._layout.dtype)
            self._pool[to.block_ids[target], layers, :, first : first + count] = converted
            done += count
            since += converted.nbytes
            if since >= _PAUSE_BYTES:
                since = 0
                yield


class _Reader:
    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def take(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Raw:
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


def _decode(reader: _Reader, out: Floats, quantization: str, *, by_channel: bool) -> None:
    """Fills `out`: [layer, token, head, dim]."""
    layers, tokens, heads, dim = out.shape
    if not by_channel:
        _restore(reader, out, (layers, tokens, heads, 1), quantization)
        return
    for group in _groups(tokens):
        _restore(reader, out[:, group], (layers, 1, heads, dim), quantization)


def _restore(reader: _Reader, out: Floats, scales: tuple[int, ...], quantization: str) -> None:
    scale = reader.take(scales, np.float16).astype(np.float32)
    low = reader.take(scales, np.float16).astype(np.float32)
    if quantization == "int8":
        out[...] = reader.take(out.shape, np.uint8)
    else:
        packed = reader.take((*out.shape[:-1], out.shape[-1] // 2), np.uint8)
        out[..., 0::2] = np.bitwise_and(packed, 15)
        out[..., 1::2] = np.right_shift(packed, 4)
    out *= scale
    out += low


def _converted(raw: Raw, dtype: str, to: str) -> Raw:
    if dtype == to:
        return raw
    values = _to_floats(raw, dtype)
    limit = _INFINITE_FROM.get(to)
    if limit is not None and not (
        values.max(initial=0.0) < limit and values.min(initial=0.0) > -limit
    ):  # NaN as well
        beyond = np.abs(values[np.isfinite(values)])
        if beyond.max(initial=0.0) >= limit:
            raise Misfit(f"a value of {beyond.max():.4g} is beyond {to}")
    return _from_floats(values, to)


def _to_floats(raw: Raw, dtype: str) -> Floats:
    if dtype == "bfloat16":  # the upper half of a float32
        floats: Floats = (raw.astype(np.uint32) << 16).view(np.float32)
        return floats
    return raw.astype(np.float32)


def _from_floats(values: Floats, dtype: str) -> Raw:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    sums = bits >> 16  # in place from here on: temporaries took most of the time
    sums &= 1
    sums += 0x7FFF
    sums += bits
    sums >>= 16
    rounded: npt.NDArray[np.uint16] = sums.astype(np.uint16)
    not_numbers = np.isnan(values)
    if not_numbers.any():  # rounding up would carry into the sign
        rounded[not_numbers] = 0x7FC0
    return rounded
