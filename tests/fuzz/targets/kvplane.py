"""What a peer writes on a KV connection: frames and payloads into a receiver over a socketpair,
and replies as a sender reads them.

The pieces of an input: bodies that are framed here, with their checksums, and, where the first
byte is 255, raw bytes. The grant `G` stands for the one that is open. A piece `O` says that the
sender's KV is in another precision and other blocks.
"""

import asyncio
import contextlib
import functools
import socket
import struct
import time
import zlib

import xxhash
from google.protobuf.message import DecodeError

from pd_core.kv import KvLayout
from pd_engine.kv import frames
from pd_engine.kv.bytcp import TcpTaker, TcpTransport
from pd_engine.kv.plane import KvPlane
from pd_engine.transfer import (
    AbortHead,
    KvRange,
    PushHead,
    SealHead,
    TransferId,
    coverage_record,
)
from pd_proto.v1 import engine_pb2 as pb
from tests.fuzz.aloop import FuzzLoop, joined, pieces
from tests.pd_engine.kv_rig import Worker, first_tokens, worker

PACKAGES = ("pd_engine",)
_LAYOUT = KvLayout("a" * 64, "float32", block_tokens=4, layers=2, kv_heads=1, head_dim=2)
"""Small: a whole transfer fits into one input."""
_OTHER = KvLayout("a" * 64, "bfloat16", block_tokens=8, layers=2, kv_heads=1, head_dim=2)
WORDS = (b"G", b"O", b"\xff", b"int8", b"int4", b"decode-epoch-1", _LAYOUT.layout_hash.encode())
_KEY = (1, 1)
_BLOCKS = (3, 1, 2)
_TOKENS = 10
_RAW = 255
_CONVERTED = b"O"
_loop = FuzzLoop()


class _Pair(TcpTransport):
    """A socketpair has no options of tcp."""

    async def greet(self, sock: socket.socket) -> tuple[socket.socket, TcpTaker]:
        assert sock.gettimeout() == 0
        return sock, TcpTaker()


@functools.cache
def _worker() -> Worker:
    return _loop.run(worker("decode", layout=_LAYOUT, blocks=8))


def one(data: bytes) -> None:
    for body in pieces(data):
        for parse in (frames.parse_frame, frames.parse_reply):
            with contextlib.suppress(frames.FrameError):
                parse(body)
    _loop.run(_connection(_worker(), pieces(data)))


async def _connection(decode: Worker, given: list[bytes]) -> None:
    plane = decode.plane
    decode.told.events.clear()
    grant = plane.open_import(
        _KEY, "request", 1, _BLOCKS, 0, (0,), time.monotonic(), token_count=_TOKENS
    )
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        theirs.setblocking(False)
        receiver = plane._receiver
        receiver._serve(theirs, "a fuzzer", _Pair())
        layout = _OTHER if _CONVERTED in given else _LAYOUT
        hello = frames.encode_hello("prefill", "p", decode.epoch, layout)
        sent = hello + b"".join(_framed(piece, grant) for piece in given if piece != _CONVERTED)
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(ours, sent)
        ours.shutdown(socket.SHUT_WR)
        while receiver.connection_count:
            with contextlib.suppress(BlockingIOError, OSError):
                ours.recv(1 << 16)
            await asyncio.sleep(0)
    _check_end(decode, plane)


def _check_end(decode: Worker, plane: KvPlane) -> None:
    """Committed, or, when the connection has gone, released."""
    names = decode.told.names(_KEY)
    ends = [name for name in names if name in ("committed", "released")]
    if not ends:
        plane.cancel_import(_KEY)
        ends = [name for name in decode.told.names(_KEY) if name == "released"]
    assert len(ends) == 1, names
    assert plane.open_imports == 0


def _framed(piece: bytes, grant: bytes) -> bytes:
    if piece[:1] == bytes([_RAW]):
        return piece[1:]
    frame = pb.KvFrame()
    with contextlib.suppress(DecodeError):
        frame.ParseFromString(piece)
        which = frame.WhichOneof("frame")
        if which in ("push", "seal", "abort"):
            inner = getattr(frame, which)
            if inner.grant == b"G":
                inner.grant = grant
                piece = frame.SerializeToString()
    return struct.pack(">II", len(piece), zlib.crc32(piece)) + piece


def seeds() -> list[bytes]:
    def body(framed: bytes) -> bytes:
        return framed[frames.PREFIX_BYTES :]

    transfer = TransferId("request", 1)

    def whole(layout: KvLayout) -> tuple[bytes, bytes, bytes]:
        """All of the prompt in one push, and the seal."""
        count = layout.blocks_for(_TOKENS)
        payload = bytes(count * layout.block_bytes)
        pushed = KvRange(0, layout.layers, 0, count)
        check = xxhash.xxh3_64_intdigest(payload)
        coverage = xxhash.xxh3_64_intdigest(coverage_record(pushed, len(payload), check))
        push = PushHead(b"G", transfer, pushed, len(payload), check)
        seal = SealHead(b"G", transfer, _TOKENS, len(payload), coverage, first_tokens(0), 0)
        raw = bytes([_RAW]) + payload
        return body(frames.encode_push(push)), raw, body(frames.encode_seal(seal))

    abort = AbortHead(b"G", transfer, "because")
    pieces_of_one = whole(_LAYOUT)
    small = PushHead(b"G", transfer, KvRange(0, 1, 0, 1), 4, 0, (), "int8")
    return [
        joined(*pieces_of_one),
        joined(_CONVERTED, *whole(_OTHER)),
        joined(body(frames.encode_abort(abort))),
        joined(body(frames.encode_push(small)), b"\xff1234"),
        joined(pieces_of_one[2], body(frames.encode_reply(frames.Welcome("a")))),
    ]
