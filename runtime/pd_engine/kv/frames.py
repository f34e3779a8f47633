"""The KV plane's frames: bytes on the socket <-> plain values. Pure.

On the socket: the length and the CRC-32 of what follows, both big-endian uint32, then a
KvFrame (sender to target) or a KvReply (target to sender). After a push's frame follow its
`payload_bytes`, which have a checksum of their own. Token 0 is in a seal: a bit that flips
there would be as wrong as one in the KV.
"""

import struct
import zlib
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from pd_core.failures import Failure, FailureKind
from pd_core.kv import PROTOCOL_VERSION, KvForm, KvLayout, convertible
from pd_engine.transfer import (
    AbortHead,
    KvRange,
    PushHead,
    Region,
    SealHead,
    TransferId,
    Verdict,
)
from pd_engine.wire import first_tokens, kv_format, token_from_pb
from pd_proto.v1 import engine_pb2 as pb

PREFIX_BYTES = 8
MAX_FRAME_BYTES = 128 * 1024
"""Without payload. The largest is a seal: some 250 bytes a choice with 20 top logprobs."""

PROOF_MARK = b"PDT\1"
"""What `proving` begins with, in place of a length: beyond all bounds, so neither is taken
for the other."""

_PREFIX = struct.Struct(">II")


class FrameError(Exception):
    """The peer sent what is no frame of this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a connection. `form`: how the sender's KV looks, whatever it may be. With a
    `region` the sender would like pushes to be read from there, by `transport`."""

    protocol_version: int
    worker: str
    epoch: str
    target_epoch: str
    form: KvForm
    transport: str = ""
    region: Region | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """`transport`: by which pushes are taken; "" is the connection's own."""

    epoch: str
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    failure: Failure


Frame = Hello | PushHead | SealHead | AbortHead
Reply = Welcome | Refusal | Verdict


def refuse(hello: Hello, worker: str, epoch: str, layout: KvLayout) -> Failure | None:
    """Why a target with this layout and epoch takes nothing from that sender. None: the
    sender's form is a layout, whose blocks are ours or can be converted."""
    if hello.target_epoch != epoch:
        return Failure(
            FailureKind.TRANSFER_FAILED,
            f"{hello.worker} looks for epoch {hello.target_epoch} of {worker}, "
            f"which restarted: it is {epoch} now",
        )
    why = convertible(hello.form, layout)
    if hello.protocol_version != PROTOCOL_VERSION:
        why = f"protocol versions differ: {hello.protocol_version} and {PROTOCOL_VERSION}"
    if why is None:
        return None
    return Failure(
        FailureKind.LAYOUT_MISMATCH,
        f"{hello.worker} has KV of {hello.form.describe()}; "
        f"{worker} has {layout.describe()}: {why}",
    )


# ---- prefixes ------------------------------------------------------------------------


def frame_length(prefix: bytes) -> int:
    """The length that announces a frame, checked before anything is allocated for it."""
    length, _ = _PREFIX.unpack(prefix)
    if prefix.startswith(PROOF_MARK):
        raise FrameError("the other end wants a token, and this worker has none (--token-file)")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
    return int(length)


def checked(prefix: bytes, body: bytes) -> bytes:
    """The body, if it is what its sender framed."""
    _, check = _PREFIX.unpack(prefix)
    if zlib.crc32(body) != check:
        raise FrameError("a frame was altered on its way")
    return body


def _framed(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    return _PREFIX.pack(len(body), zlib.crc32(body)) + body


# ---- frames: sender -> target ---------------------------------------------------------


def encode_hello(
    worker: str,
    epoch: str,
    target_epoch: str,
    layout: KvLayout,
    transport: str = "",
    region: Region | None = None,
) -> bytes:
    hello = pb.KvHello(
        protocol_version=PROTOCOL_VERSION,
        worker=worker,
        epoch=epoch,
        target_epoch=target_epoch,
        model_hash=layout.model_hash,
        kv_format=kv_format(layout),
        layout_hash=layout.layout_hash,
        transport=transport,
    )
    if region is not None:
        hello.region.agent = region.agent
        hello.region.address = region.address
        hello.region.size = region.size
    return _framed(pb.KvFrame(hello=hello).SerializeToString())


def encode_push(head: PushHead, source_blocks: tuple[int, ...] = ()) -> bytes:
    push = pb.KvPush(
        grant=head.grant,
        id=_id_to_pb(head.id),
        layer_start=head.range.layer_start,
        layer_count=head.range.layer_count,
        block_start=head.range.block_start,
        block_count=head.range.block_count,
        payload_bytes=head.payload_bytes,
        checksum=head.checksum,
        source_blocks=source_blocks or head.source_blocks,
        quantization=head.quantization,
    )
    return _framed(pb.KvFrame(push=push).SerializeToString())


def encode_seal(head: SealHead) -> bytes:
    seal = pb.KvSeal(
        grant=head.grant,
        id=_id_to_pb(head.id),
        token_count=head.token_count,
        payload_bytes=head.payload_bytes,
        coverage=head.coverage,
        first=first_tokens(head.first),
        cached_tokens=head.cached_tokens,
    )
    return _framed(pb.KvFrame(seal=seal).SerializeToString())


def encode_abort(head: AbortHead) -> bytes:
    abort = pb.KvAbort(grant=head.grant, id=_id_to_pb(head.id), reason=head.reason)
    return _framed(pb.KvFrame(abort=abort).SerializeToString())


def parse_frame(body: bytes) -> Frame:
    frame = pb.KvFrame()
    try:
        frame.ParseFromString(body)
        match frame.WhichOneof("frame"):
            case "hello":
                return _hello(frame.hello)
            case "push":
                return _push(frame.push)
            case "seal":
                return _seal(frame.seal)
            case "abort":
                a = frame.abort
                return AbortHead(a.grant, _id_from_pb(a.id), a.reason)
    except (DecodeError, ValueError) as e:
        raise FrameError(f"not a KvFrame: {e}") from e
    raise FrameError("a KvFrame of no known kind")


def _hello(m: pb.KvHello) -> Hello:
    return Hello(
        protocol_version=m.protocol_version,
        worker=m.worker,
        epoch=m.epoch,
        target_epoch=m.target_epoch,
        form=KvForm.told(m.model_hash, m.kv_format),
        transport=m.transport,
        region=_region(m.region) if m.HasField("region") else None,
    )


def _region(m: pb.KvRegion) -> Region:
    return Region(m.agent, m.address, m.size)


def _push(m: pb.KvPush) -> PushHead:
    return PushHead(
        grant=m.grant,
        id=_id_from_pb(m.id),
        range=KvRange(m.layer_start, m.layer_count, m.block_start, m.block_count),
        payload_bytes=m.payload_bytes,
        checksum=m.checksum,
        source_blocks=tuple(m.source_blocks),
        quantization=m.quantization,
    )


def _seal(m: pb.KvSeal) -> SealHead:
    return SealHead(
        grant=m.grant,
        id=_id_from_pb(m.id),
        token_count=m.token_count,
        payload_bytes=m.payload_bytes,
        coverage=m.coverage,
        first=tuple(token_from_pb(t) for t in m.first),
        cached_tokens=m.cached_tokens,
    )


# ---- replies: target -> sender ----------------------------------------------------------


def encode_reply(reply: Reply) -> bytes:
    match reply:
        case Welcome():
            message = pb.KvReply(welcome=pb.KvWelcome(epoch=reply.epoch, transport=reply.transport))
        case Refusal():
            failure = reply.failure
            refusal = pb.KvRefusal(reason=failure.message, kind=failure.kind)
            message = pb.KvReply(refusal=refusal)
        case Verdict():
            verdict = pb.KvVerdict(
                grant=reply.grant,
                id=_id_to_pb(reply.id),
                committed=reply.committed,
                reason=reply.reason,
            )
            message = pb.KvReply(verdict=verdict)
    return _framed(message.SerializeToString())


def parse_reply(body: bytes) -> Reply:
    reply = pb.KvReply()
    try:
        reply.ParseFromString(body)
    except DecodeError as e:
        raise FrameError(f"not a KvReply: {e}") from e
    match reply.WhichOneof("reply"):
        case "welcome":
            return Welcome(reply.welcome.epoch, reply.welcome.transport)
        case "refusal":
            return Refusal(Failure.from_wire(reply.refusal.kind, reply.refusal.reason))
        case "verdict":
            v = reply.verdict
            return Verdict(v.grant, _id_from_pb(v.id), v.committed, v.reason)
    raise FrameError("a KvReply of no known kind")


# ---- parts ---------------------------------------------------------------------------


def _id_to_pb(id: TransferId) -> pb.TransferId:
    return pb.TransferId(request=id.request, attempt=id.attempt)


def _id_from_pb(m: pb.TransferId) -> TransferId:
    return TransferId(m.request, m.attempt)
