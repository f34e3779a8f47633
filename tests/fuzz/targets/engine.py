"""Messages of a router to an engine's core: `WorkRequest`s on a stream of their own, which then
ends. The scheduler and the KV plane are real, the model is fake; afterwards all blocks are free.

The first byte picks the role, the pieces of the rest are messages.
"""

import asyncio
import functools

from google.protobuf.message import DecodeError

from pd_proto.v1 import engine_pb2 as pb
from tests.fuzz.aloop import Finding, FuzzLoop, joined, pieces
from tests.pd_engine.core_rig import Engine

PACKAGES = ("pd_engine",)
WORDS = (
    b"\x08\x01",
    b"\x12\x00",
    b"\xff\xff\xff\xff\x0f",
    b"\x7f\xf8",
    b"127.0.0.1:1",
    b"%json {}",
)
_ROLES = ("decode", "prefill", "both")
_NOBODY = "127.0.0.1:1"
"""Where nobody listens: a fuzzer must not dial what it makes up."""
_ROUNDS = 40
_PAUSE_S = 0.0005
_loop = FuzzLoop()


@functools.cache
def _engine(role: str) -> Engine:
    async def made() -> Engine:
        engine = Engine(role, 32, 8)
        await engine.start()
        return engine

    return _loop.run(made())


def one(data: bytes) -> None:
    if not data:
        return
    messages = []
    for piece in pieces(data[1:])[:8]:
        message = pb.WorkRequest()
        try:
            message.ParseFromString(piece)
        except DecodeError:
            continue
        for command in message.commands:
            if command.HasField("prefill"):
                command.prefill.target.kv_address = _NOBODY
            if command.HasField("share"):
                command.share.target.kv_address = _NOBODY
        messages.append(message)
    if messages:
        _loop.run(_stream(_engine(_ROLES[data[0] % 3]), messages))


async def _stream(engine: Engine, messages: list[pb.WorkRequest]) -> None:
    core = engine.core
    number, outbox = core.open_stream()
    try:
        for message in messages:
            for command in message.commands:
                core.handle(number, command)
            core.commands_done()
            await asyncio.sleep(0)
        for _ in range(_ROUNDS):
            if not core._live:
                break
            await asyncio.sleep(_PAUSE_S)
    finally:
        outbox.close()
        core.close_stream(number)
    while core._live or engine.scheduler.busy:
        _check_running(engine)
        await asyncio.sleep(_PAUSE_S)
    _check_running(engine)
    load = engine.scheduler.load()
    assert load.kv_free + load.kv_cached == load.kv_blocks, load


def _check_running(engine: Engine) -> None:
    """Its step loop has not ended."""
    for task in engine._tasks:
        if task.done():
            _engine.cache_clear()
            raise Finding("the core's loop ended") from task.exception()


def seeds() -> list[bytes]:
    identity = pb.TransferId(request="r", attempt=1)
    greedy = pb.Sampling(max_tokens=4)
    common = {"id": identity, "token_ids": [5, 6, 7, 8, 9], "prompt_tokens": 5, "choices": [0]}
    local = pb.Generate(handle=1, sampling=greedy, deadline_s=5, prefill_here=True, **common)
    taken = pb.Generate(handle=2, sampling=greedy, deadline_s=5, grant_wait_s=1, **common)
    target = pb.KvTarget(worker="d", epoch="e", kv_address=_NOBODY, grant=b"g" * 16)
    given = pb.Prefill(handle=3, sampling=greedy, deadline_s=5, target=target, **common)
    odd = pb.Sampling(
        max_tokens=3, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, seed=9, logprobs=True,
        top_logprobs=2, min_tokens=1, stop_token_ids=[4], repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=0.5, logit_bias={3: 1.0},
    )  # fmt: skip
    several = pb.Generate(
        handle=4, id=identity, token_ids=[1, 2, 3], prompt_tokens=3, choices=[0, 1, 2],
        sampling=odd, deadline_s=5, prefill_here=True, priority=2, cache_salt=b"s",
    )  # fmt: skip

    def request(**command: object) -> bytes:
        return pb.WorkRequest(commands=[pb.Command(**command)]).SerializeToString()

    cancel, renew = pb.Cancel(handle=1), pb.Renew(handles=[1, 2, 3])
    return [
        b"\0" + joined(request(generate=local)),
        b"\0" + joined(request(generate=taken), request(renew=renew)),
        b"\1" + joined(request(prefill=given)),
        b"\2" + joined(request(generate=local), request(cancel=cancel)),
        b"\2" + joined(request(generate=several), request(prefill=given)),
    ]
