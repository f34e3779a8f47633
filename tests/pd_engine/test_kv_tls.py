"""KV by tcp with TLS: bytes arrive, on both loops and in all sizes of frames; certificates
and their authority change under running transfers; whoever is no worker of the same
PDCluster pushes nothing and is named in a log line."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pd_core.identity import Identity, Part
from pd_core.kv import KvLayout
from pd_engine.kv import frames, tcp
from pd_engine.kv.bytcp import TcpTransport
from pd_engine.kv.channels import ChannelSettings
from pd_engine.kv.plane import KvSettings
from pd_engine.kv.receiver import ReceiverSettings
from pd_engine.transfer import ExportLimits
from pd_proto.tls import Certificates
from tests.certificates import Authority
from tests.pd_engine.kv_rig import LAYOUT, WAIT_S, Transfer, Worker, pair, transfer

LARGE = KvLayout("m", "float32", block_tokens=16, layers=3, kv_heads=8, head_dim=64)
WORKER = Identity("ml", "chat", Part.WORKER)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_run(request: pytest.FixtureRequest) -> Run:
    runner = asyncio.run if request.param == "asyncio" else uvloop.run

    def bounded(work: Coroutine[Any, Any, Any]) -> Any:
        return runner(asyncio.wait_for(work, 60))

    return bounded


def two(authority: Authority, folder: Path) -> tuple[Certificates, Certificates]:
    made = [authority.folder(folder / name, WORKER) for name in ("prefill", "decode")]
    return Certificates(made[0], WORKER), Certificates(made[1], WORKER)


async def arrives(t: Transfer, prefill: Worker, decode: Worker) -> None:
    t.open(prefill, decode)
    t.seal(prefill)
    await decode.told.wait("committed", t.key)
    await prefill.told.wait("done", t.key)
    t.check_bytes(prefill, decode)


@pytest.mark.parametrize("frame_kib", [1, 64, 512])
@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small slices", "large slices"])
def test_bytes_arrive(loop_run: Run, tmp_path: Path, layout: KvLayout, frame_kib: int) -> None:
    settings = KvSettings(exports=ExportLimits(frame_bytes=frame_kib * 1024))

    async def body() -> None:
        both = two(Authority(), tmp_path)
        async with pair(settings, layout=layout, certificates=both) as (prefill, decode):
            for number, blocks in enumerate((1, 3, 40)):
                t = transfer(number, blocks * layout.block_tokens, layout=layout)
                await arrives(t, prefill, decode)
            assert prefill.plane.idle_connections == 1, "one connection for all"

    loop_run(body())


def test_many_at_once(loop_run: Run, tmp_path: Path) -> None:
    """Also through sockets that take only part of what they are given."""

    async def body() -> None:
        both = two(Authority(), tmp_path)
        async with pair(layout=LARGE, blocks=640, certificates=both) as (prefill, decode):
            many = []
            for number in range(8):
                blocks = tuple(range(number * 40, number * 40 + 40))
                many.append(Transfer((1, number), 40 * LARGE.block_tokens, blocks, blocks))
            await asyncio.gather(*(arrives(t, prefill, decode) for t in many))

    loop_run(body())


def test_certificates_and_authority_change_under_running_transfers(
    loop_run: Run, tmp_path: Path
) -> None:
    """As an authority is replaced: first both are trusted, then new certificates, then only
    the new one. A transfer that has begun goes on, and each new connection is made."""
    old, new = Authority("old"), Authority("new")
    settings = KvSettings(channels=ChannelSettings(max_idle=0))

    async def body() -> None:
        both = two(old, tmp_path)
        async with pair(settings, certificates=both) as (prefill, decode):
            apart = tuple(range(56, 64))
            running = Transfer((1, 100), 30, apart, apart)
            running.open(prefill, decode)
            prefill.plane.export_progress(running.key, 8)
            steps = [(old, new.pem), (new, old.pem), (new, b"")]
            for number, (authority, trusting) in enumerate(steps):
                for turn, name in enumerate(("prefill", "decode")):
                    authority.folder(tmp_path / name, WORKER, trusting=trusting)
                    at = tuple(range(3 * (2 * number + turn), 3 * (2 * number + turn) + 3))
                    await arrives(Transfer((1, at[0]), 9, at, at), prefill, decode)
                prefill.plane.export_progress(running.key, 12 + 4 * number)
            running.seal(prefill)
            await decode.told.wait("committed", running.key)
            await prefill.told.wait("done", running.key)
            running.check_bytes(prefill, decode)

    loop_run(body())


STRANGERS = {
    "a worker of another PDCluster": "spiffe://pdcluster/ml/other/worker",
    "a router of its own": "spiffe://pdcluster/ml/chat/router",
    "another authority": "CERTIFICATE_VERIFY_FAILED",
    "no TLS": "WRONG_VERSION_NUMBER",
}


def certificates_of(who: str, authority: Authority, folder: Path) -> Certificates | None:
    """A sender's; it trusts the true authority in any case."""
    match who:
        case "a worker of another PDCluster":
            authority.folder(folder, Identity("ml", "other", Part.WORKER))
        case "a router of its own":
            authority.folder(folder, WORKER.peer(Part.ROUTER))
        case "another authority":
            Authority("another").folder(folder, WORKER, trusting=authority.pem)
        case _:
            return None
    return Certificates(folder, WORKER)


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_push_nothing(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, who: str
) -> None:
    authority = Authority()
    ours = Certificates(authority.folder(tmp_path / "decode", WORKER), WORKER)
    theirs = certificates_of(who, authority, tmp_path / "prefill")

    async def body() -> None:
        async with pair(certificates=(theirs, ours)) as (prefill, decode):
            t = transfer(1, 9)
            t.open(prefill, decode)
            t.seal(prefill)
            await prefill.told.wait("export_failed", t.key)
            assert not any(b"".join(decode.blocks(t.destination)))
            decode.plane.cancel_import(t.key)
            await decode.told.wait("released", t.key)

    with caplog.at_level(logging.WARNING):
        run(body())
    refused = [r.getMessage() for r in caplog.records if "KV plane: refused 127" in r.getMessage()]
    assert refused
    assert STRANGERS[who] in refused[0]


@pytest.mark.parametrize("who", STRANGERS)
def test_kv_is_sent_to_no_stranger(run: Run, tmp_path: Path, who: str) -> None:
    authority = Authority()
    ours = Certificates(authority.folder(tmp_path / "prefill", WORKER), WORKER)
    theirs = certificates_of(who, authority, tmp_path / "decode")
    settings = KvSettings(channels=ChannelSettings(connect_s=2), receiver=ReceiverSettings())

    async def body() -> str:
        async with pair(settings, certificates=(ours, theirs)) as (prefill, decode):
            t = transfer(1, 9)
            t.open(prefill, decode)
            t.seal(prefill)
            failed = await prefill.told.wait("export_failed", t.key)
            decode.plane.cancel_import(t.key)
            await decode.told.wait("released", t.key)
            return str(failed[2].message)

    message = run(body())
    if who != "no TLS":  # there it is the end of the connection that tells
        assert STRANGERS[who] in message


def test_who_says_nothing_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    settings = KvSettings(receiver=ReceiverSettings(handshake_s=0.05))

    async def body() -> None:
        both = two(Authority(), tmp_path)
        async with pair(None, settings, certificates=both) as (_, decode):
            reader, writer = await asyncio.open_connection(*tcp.split_address(decode.address))
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
            writer.close()

    run(body())


def test_a_refusal_is_read_before_the_end(run: Run, tmp_path: Path) -> None:
    """The last word and the end of a connection, through TLS: a hello that is refused."""

    async def body() -> None:
        ours, theirs = two(Authority(), tmp_path)
        async with pair(certificates=(ours, theirs)) as (_, decode):
            transport = TcpTransport(ours)
            sock = await transport.connect(decode.address, "")
            with contextlib.closing(sock):
                await tcp.send_all(sock, frames.encode_hello("p", "e", "somebody else", LAYOUT))
                reply = frames.parse_reply(await tcp.receive_message(sock))
                assert isinstance(reply, frames.Refusal)
                sock.shutdown(socket.SHUT_WR)
                assert await tcp.receive_some(sock, memoryview(bytearray(16))) == 0

    run(body())
