"""Frames of the KV plane to bytes and back, what is no frame, who is refused; the pool's slices."""

from dataclasses import replace

import pytest

from pd_core.failures import FailureKind
from pd_core.kv import KvForm, KvLayout
from pd_engine.kv import frames, tcp
from pd_engine.kv.memory import KvMemory
from pd_engine.transfer import AbortHead, KvRange, PushHead, SealHead, TransferId, Verdict
from pd_engine.types import Finish, TokenOut
from pd_engine.wire import kv_format
from pd_proto.v1 import engine_pb2 as pb

LAYOUT = KvLayout("m" * 64, "float32", block_tokens=2, layers=3, kv_heads=1, head_dim=2)
ID = TransferId("request", 3)
FIRST = (
    TokenOut(0, 4, 5, Finish.LENGTH, -0.5, ((5, -0.5), (6, -2.0))),
    TokenOut(2, 4, 6, Finish.STOP),
    TokenOut(1, 4, 7),
)


def body(framed: bytes) -> bytes:
    length = frames.frame_length(framed[: frames.PREFIX_BYTES])
    assert length == len(framed) - frames.PREFIX_BYTES
    return frames.checked(framed[: frames.PREFIX_BYTES], framed[frames.PREFIX_BYTES :])


def test_a_bit_that_flips_is_noticed() -> None:
    """Also where no payload is: token 0 is in a seal."""
    framed = frames.encode_seal(SealHead(b"g" * 16, ID, 10, 0, 0, FIRST, 9))
    prefix, rest = framed[: frames.PREFIX_BYTES], bytearray(framed[frames.PREFIX_BYTES :])
    for at in range(len(rest)):
        rest[at] ^= 1 << at % 8
        with pytest.raises(frames.FrameError, match="altered"):
            frames.checked(prefix, bytes(rest))
        rest[at] ^= 1 << at % 8


@pytest.mark.parametrize(
    "frame",
    [
        PushHead(b"g" * 16, ID, KvRange(1, 2, 3, 4), 1 << 40, (1 << 64) - 1),
        SealHead(b"g" * 16, ID, 10, 0, 0, FIRST, 9),
        SealHead(b"", TransferId("", 0), 0, 0, (1 << 64) - 1, (), 0),
        AbortHead(b"g" * 16, ID, "because"),
    ],
)
def test_frames_survive_the_wire(frame: PushHead | SealHead | AbortHead) -> None:
    match frame:
        case PushHead():
            framed = frames.encode_push(frame)
        case SealHead():
            framed = frames.encode_seal(frame)
        case AbortHead():
            framed = frames.encode_abort(frame)
    assert frames.parse_frame(body(framed)) == frame


@pytest.mark.parametrize(
    "reply", [frames.Welcome("epoch"), Verdict(b"g", ID, True), Verdict(b"g", ID, False, "why")]
)
def test_replies_survive_the_wire(reply: frames.Reply) -> None:
    assert frames.parse_reply(body(frames.encode_reply(reply))) == reply


def hello(layout: KvLayout = LAYOUT, target: str = "epoch") -> frames.Hello:
    parsed = frames.parse_frame(body(frames.encode_hello("p", "p-epoch", target, layout)))
    assert isinstance(parsed, frames.Hello)
    return parsed


def test_who_is_refused_and_why() -> None:
    assert frames.refuse(hello(), "d", "epoch", LAYOUT) is None
    restarted = frames.refuse(hello(target="old"), "d", "epoch", LAYOUT)
    assert restarted is not None
    assert restarted.kind == FailureKind.TRANSFER_FAILED
    narrow = replace(LAYOUT, dtype="bfloat16", block_tokens=16)
    assert hello(narrow).form == KvForm.told(LAYOUT.model_hash, kv_format(narrow))
    assert frames.refuse(hello(narrow), "d", "epoch", LAYOUT) is None
    other = replace(LAYOUT, kv_heads=2)
    differs = frames.refuse(hello(other), "d", "epoch", LAYOUT)
    assert differs is not None
    assert differs.kind == FailureKind.LAYOUT_MISMATCH
    assert other.describe() in differs.message
    assert LAYOUT.describe() in differs.message
    assert differs.message.endswith("numbers of KV heads differ: 2 and 1")
    refusal = frames.Refusal(differs)
    assert frames.parse_reply(body(frames.encode_reply(refusal))) == refusal
    later = frames.refuse(replace(hello(), protocol_version=9), "d", "epoch", LAYOUT)
    assert later is not None
    assert later.message.endswith("protocol versions differ: 9 and 1")


@pytest.mark.parametrize("length", [0, frames.MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_lengths_are_bounded(length: int) -> None:
    with pytest.raises(frames.FrameError, match=str(length)):
        frames.frame_length(length.to_bytes(4, "big") + bytes(4))


def test_the_largest_seal_fits_and_a_larger_one_is_refused_here() -> None:
    top = tuple((150_000 + i, -0.1 * i) for i in range(20))
    first = tuple(TokenOut(c, 100_000, 150_000, None, -0.1, top) for c in range(128))
    frames.encode_seal(SealHead(b"g" * 16, ID, 1 << 20, 1 << 40, 1 << 63, first, 1 << 20))
    with pytest.raises(frames.FrameError, match="can be sent"):
        frames.encode_abort(AbortHead(b"g", ID, "x" * frames.MAX_FRAME_BYTES))


@pytest.mark.parametrize("junk", [b"\xff\xff\xff", b"", b"\x7a\x00"])
def test_junk_is_no_frame(junk: bytes) -> None:
    with pytest.raises(frames.FrameError):
        frames.parse_frame(junk)
    with pytest.raises(frames.FrameError):
        frames.parse_reply(junk)


def test_an_unknown_finish_state_is_no_seal() -> None:
    seal = pb.KvSeal(grant=b"g")
    seal.first.add().ParseFromString(b"\x28\x09")  # finish = 9
    with pytest.raises(frames.FrameError, match="finish"):
        frames.parse_frame(pb.KvFrame(seal=seal).SerializeToString())


def pool(blocks: int) -> tuple[bytearray, KvMemory]:
    data = bytearray(range(256)) * LAYOUT.block_bytes
    del data[blocks * LAYOUT.block_bytes :]
    return data, KvMemory(memoryview(data), LAYOUT)


def test_slices_are_the_layers_of_the_blocks() -> None:
    data, memory = pool(5)
    size, layer = LAYOUT.block_bytes, LAYOUT.layer_bytes
    found = memory.slices((4, 0), 1, 2)
    assert [bytes(s) for s in found] == [
        bytes(data[4 * size + layer : 5 * size]),
        bytes(data[layer:size]),
    ]
    found[0][:1] = b"!"
    assert data[4 * size + layer] == ord("!")


def test_whole_neighbours_are_one_slice() -> None:
    _, memory = pool(6)
    size = LAYOUT.block_bytes
    assert [len(s) for s in memory.slices((1, 2, 3, 5, 4, 0), 0, 3)] == [3 * size, size, size, size]
    assert len(memory.slices((1, 2, 3), 0, 2)) == 3


@pytest.mark.parametrize(
    ("blocks", "start", "count"),
    [((5,), 0, 3), ((-1,), 0, 3), ((0,), 2, 2), ((0,), -1, 1), ((0,), 0, 0)],
)
def test_what_is_not_in_the_pool_is_an_error(
    blocks: tuple[int, ...], start: int, count: int
) -> None:
    with pytest.raises(IndexError):
        pool(5)[1].slices(blocks, start, count)


def test_buffers_that_are_no_pool() -> None:
    for size in (0, LAYOUT.block_bytes + 1):
        with pytest.raises(ValueError, match="whole blocks"):
            KvMemory(memoryview(bytearray(size)), LAYOUT)
    with pytest.raises(ValueError, match="read-only"):
        KvMemory(memoryview(bytes(LAYOUT.block_bytes)), LAYOUT)


def test_small_slices_are_batched_in_order() -> None:
    sizes = [3, 3, 9, 2, 2, 2, 2, 20, 1]
    slices = [memoryview(bytearray(n)) for n in sizes]
    found = tcp.batches(slices, 8)
    assert [[len(s) for s in b] for b in found] == [[3, 3], [9], [2, 2, 2, 2], [20], [1]]


@pytest.mark.parametrize(
    ("address", "parts"), [("10.0.0.1:7002", ("10.0.0.1", 7002)), ("[::1]:1", ("::1", 1))]
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert tcp.split_address(address) == parts
    assert tcp.join_address(*parts) == address
