"""Messages of workers to a router: announcements, heartbeats, bundles, and events on the work
stream of a request that runs. Whatever a worker says, the request ends, and no other suffers.

The pieces of an input are led by a byte: an announcement's report (0, 1) or a stream's reply
(other), from the decode worker where it is even, else from the prefill worker. Handles in
events are those of the request, by their number modulo how many there are.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

from google.protobuf.message import DecodeError

from pd_proto.v1 import engine_pb2 as pb
from pd_router.link import Link
from pd_router.session import Sessions
from pd_router.workers import Workers, WorkersConfig
from tests.fuzz.aloop import FuzzLoop, joined, pieces
from tests.pd_router.fake_worker import MODEL
from tests.pd_router.rig import Recorder, ask

PACKAGES = ("pd_router", "pd_core")
WORDS = (b"fake", b"layout", b"model", b"\x08\x01", b"\x7f\xf8", b"\xff\xff\xff\xff\x0f", b"epoch")
_ROUNDS = 8
_loop = FuzzLoop()
_epochs = itertools.count()


class _BoundLink(Link):
    """As if its stream were open: nobody is dialled."""

    def start(self) -> None:
        self.bound = True
        self._callbacks.changed()


class _Announcement:
    """One worker's reports, which a test puts in."""

    def __init__(self, workers: Workers) -> None:
        self._reports: asyncio.Queue[pb.WorkerReport | None] = asyncio.Queue()
        self.task = asyncio.create_task(workers.Announce(self._iterate(), self))

    def put(self, report: pb.WorkerReport | None) -> None:
        self._reports.put_nowait(report)

    async def write(self, notice: pb.RouterNotice) -> None:
        assert notice.WhichOneof("notice")

    async def abort(self, code: Any, details: str) -> None:
        raise AssertionError(f"{code}: {details}")

    async def _iterate(self) -> AsyncIterator[pb.WorkerReport]:
        while (report := await self._reports.get()) is not None:
            yield report


def one(data: bytes) -> None:
    given = pieces(data)[:16]
    if given:
        _loop.run(_scenario(given))


async def _scenario(given: list[bytes]) -> None:
    with mock.patch("pd_router.workers.Link", _BoundLink):
        await _told(given)


async def _told(given: list[bytes]) -> None:
    workers = Workers(WorkersConfig(model=MODEL, router="router-0"))
    sessions = Sessions(workers)
    announcements = [_Announcement(workers) for _ in range(2)]
    for announcement, hello in zip(announcements, _hellos(), strict=True):
        announcement.put(pb.WorkerReport(hello=hello))
        announcement.put(pb.WorkerReport(heartbeat=_heartbeat()))
    await _rounds()
    request, sink = ask(deadline_s=5.0), Recorder()
    generation = sessions.start(request, sink)
    await _rounds()
    for piece in given:
        await _said(workers, announcements, piece)
    await _rounds()
    generation.cancel()
    await _rounds()
    assert sessions.counts().running == 0
    for view in workers.views():
        assert view.own_tokens == 0, view
    workers.snapshot()
    workers.signals()
    for announcement in announcements:
        announcement.put(None)
    await asyncio.gather(*(announcement.task for announcement in announcements))
    sessions.close()
    await workers.close()


async def _said(workers: Workers, announcements: list[_Announcement], piece: bytes) -> None:
    kind, body = piece[:1], piece[1:]
    number = kind[0] if kind else 0
    message = pb.WorkerReport() if number < 2 else pb.WorkReply()
    try:
        message.ParseFromString(body)
    except DecodeError:
        return
    if isinstance(message, pb.WorkerReport):
        if message.HasField("hello"):  # a second one is no report
            announcement = _Announcement(workers)
            announcement.put(message)
            announcement.put(None)
            announcements.append(announcement)
        else:
            announcements[number].put(message)
    else:
        links = [record.link for record in workers._records.values()]
        if links:
            _dispatch(links[number % len(links)], message)
    await _rounds()


def _dispatch(link: Link, reply: pb.WorkReply) -> None:
    handles = list(link._handlers)
    if handles:
        for event in reply.events:
            which = event.WhichOneof("event")
            if which == "tokens":
                for out in event.tokens.tokens:
                    out.handle = handles[out.handle % len(handles)]
            elif which not in (None, "bound"):
                inner = getattr(event, which)
                inner.handle = handles[inner.handle % len(handles)]
    link._dispatch(reply)


async def _rounds() -> None:
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)


def _hellos() -> list[pb.Hello]:
    return [
        pb.Hello(
            worker=name,
            epoch=f"epoch-{next(_epochs)}",
            role=role,
            work_address="127.0.0.1:1",
            kv_address="127.0.0.1:1",
            model=MODEL,
            model_hash="model",
            kv_format=pb.KvFormat(dtype="float32", block_tokens=4, layers=2, block_bytes=64),
            layout_hash="layout",
            capacity=pb.Capacity(kv_blocks=100, max_model_tokens=200, max_running=8, max_queued=8),
            bundle_hash="bundle-1",
            revision="r1",
            prefill_tokens_per_s=100.0,
        )
        for name, role in (("decode-0", pb.ROLE_DECODE), ("prefill-0", pb.ROLE_PREFILL))
    ]


def _heartbeat() -> pb.Heartbeat:
    load = pb.Load(kv_blocks=100, kv_free=100, step_s=0.01)
    return pb.Heartbeat(state=pb.WORKER_STATE_READY, load=load)


def seeds() -> list[bytes]:
    def reply(**event: object) -> bytes:
        return pb.WorkReply(events=[pb.Event(**event)]).SerializeToString()

    def report(**what: object) -> bytes:
        return pb.WorkerReport(**what).SerializeToString()

    out = pb.TokenOut(
        choice=0, index=0, token=7, logprob=-0.5, top=[pb.TopLogprob(token=1, logprob=-1)]
    )
    granted = pb.Granted(grant=b"g" * 16, prefix_tokens=4, ttl_s=30, kv_address="127.0.0.1:1")
    prefilled = pb.Prefilled(first=[out], cached_tokens=1, queue_s=0.1, prefill_s=0.1)
    committed = pb.Committed(first=[out], kv_bytes=10, transfer_s=0.1, transport="tcp")
    later = pb.Tokens(
        tokens=[pb.TokenOut(index=1, token=8), pb.TokenOut(index=2, token=2, finish=1)]
    )
    failed = pb.Failed(kind="worker_lost", message="gone")
    return [
        joined(
            b"\2" + reply(granted=granted),
            b"\3" + reply(prefilled=prefilled),
            b"\2" + reply(committed=committed),
            b"\2" + reply(tokens=later),
        ),
        joined(b"\2" + reply(failed=failed), b"\3" + reply(failed=failed)),
        joined(b"\0" + report(heartbeat=_heartbeat()), b"\1" + report(hello=_hellos()[1])),
        joined(
            b"\0" + report(bundle=pb.TokenizerBundle(bundle_hash="bundle-1", tokenizer_json=b"{}"))
        ),
    ]
