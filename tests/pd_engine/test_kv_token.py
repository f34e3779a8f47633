"""Both ends of a KV connection prove their PDCluster's token, by each transport: who doesn't
hold it pushes nothing, gets no pool to read, and is named in a log line; a token follows another
under running transfers."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pd_core.proof import Purpose
from pd_engine.kv import tcp
from pd_engine.kv.channels import ChannelSettings
from pd_engine.kv.plane import KvSettings
from pd_engine.kv.receiver import ReceiverSettings
from pd_engine.transfer import ExportLimits
from pd_proto.tokens import NO_PROOF, BadToken, Tokens
from tests.pd_engine.kv_rig import WAIT_S, Transfer, Worker, epoch, hand_over, pair, transfer

pytestmark = pytest.mark.slow

OLD, NEW = b"old" * 14, b"new" * 14
TRANSPORTS = ("tcp", "shm", "nixl")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def tokens(file: Path, *lines: bytes) -> Tokens:
    return Tokens(written(file, *lines))


def written(file: Path, *lines: bytes) -> Path:
    """Another file in its place, as a mounted Secret changes."""
    beside = file.with_suffix(".next")
    beside.write_bytes(b"\n".join(lines) + b"\n")
    return beside.replace(file)


def by(transport: str, **more: Any) -> KvSettings:
    return KvSettings(transport=transport, **more)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_holds_it_pushes(run: Run, tmp_path: Path, transport: str) -> None:
    both = tokens(tmp_path / "p", OLD), tokens(tmp_path / "d", NEW, OLD)

    async def body() -> None:
        async with pair(by(transport), by(transport), shared=True, epoch=epoch(), tokens=both) as (
            prefill,
            decode,
        ):
            for number in range(3):
                assert await hand_over(transfer(number, 20), prefill, decode) == transport
            assert prefill.plane.idle_connections == 1, "one connection for all"

    run(body())


async def pushes_nothing(prefill: Worker, decode: Worker) -> str:
    t = transfer(1, 9)
    t.open(prefill, decode)
    t.seal(prefill)
    failed = await prefill.told.wait("export_failed", t.key)
    assert not any(b"".join(decode.blocks(t.destination)))
    decode.plane.cancel_import(t.key)
    await decode.told.wait("released", t.key)
    return str(failed[2].message)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (NEW, "this worker's token isn't the target's"),
        (None, "the other end wants a token, and this worker has none"),
    ],
    ids=["of another PDCluster", "without"],
)
def test_strangers_push_nothing(
    run: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    transport: str,
    theirs: bytes | None,
    says: str,
) -> None:
    other = tokens(tmp_path / "p", theirs) if theirs else None
    both = other, tokens(tmp_path / "d", OLD)

    async def body() -> str:
        async with pair(by(transport), by(transport), shared=True, epoch=epoch(), tokens=both) as (
            prefill,
            decode,
        ):
            return await pushes_nothing(prefill, decode)

    with caplog.at_level(logging.WARNING):
        assert says in run(body())
    refused = [r.getMessage() for r in caplog.records if "KV plane: refused" in r.getMessage()]
    assert refused
    assert NO_PROOF in refused[0]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_kv_is_sent_to_no_stranger(run: Run, tmp_path: Path, transport: str) -> None:
    """One that asks for no token, as one of another PDCluster's without; and no pool is handed
    over to it."""
    both = tokens(tmp_path / "p", OLD), None
    settings = by(transport, channels=ChannelSettings(connect_s=1))

    async def body() -> None:
        async with pair(settings, by(transport), shared=True, epoch=epoch(), tokens=both) as (
            prefill,
            decode,
        ):
            await pushes_nothing(prefill, decode)

    run(body())


def test_who_only_pretends_to_be_the_target_is_found_out(run: Run, tmp_path: Path) -> None:
    """It asks, as a target does, and takes any proof."""

    async def body() -> None:
        ours = tokens(tmp_path / "p", OLD)
        async with pair(tokens=(ours, ours)) as (prefill, decode):

            async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.write(b"PDT\1" + bytes(32))
                await reader.readexactly(4 + 64)
                writer.write(b"PDT\1" + bytes(32))
                assert await reader.read() == b"", "nothing follows"
                writer.close()

            server = await asyncio.start_server(pretend, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            decode.address = tcp.join_address(host, port)
            assert "doesn't hold this PDCluster's token" in await pushes_nothing(prefill, decode)
            server.close()

    run(body())


@pytest.mark.parametrize("sent", [b"", b"PDT\1", b"GET / HTTP/1.1\r\n\r\n", bytes(200)])
def test_who_says_nothing_or_nonsense_is_not_waited_for(
    run: Run, tmp_path: Path, sent: bytes
) -> None:
    settings = KvSettings(receiver=ReceiverSettings(handshake_s=0.05))

    async def body() -> None:
        ours = tokens(tmp_path / "t", OLD)
        async with pair(None, settings, tokens=(ours, ours)) as (_, decode):
            reader, writer = await asyncio.open_connection(*tcp.split_address(decode.address))
            writer.write(sent)
            try:
                said = await asyncio.wait_for(reader.read(), WAIT_S)
            except ConnectionResetError:
                said = b"PDT\1"
            assert said.startswith(b"PDT\1"), "a challenge, and never a confirmation"
            assert len(said) <= 4 + 32
            writer.close()

    run(body())


def test_a_token_follows_another_under_running_transfers(run: Run, tmp_path: Path) -> None:
    """As one follows another: first both are accepted, then the new one is proven, then only the
    new one is left. A transfer that has begun goes on, and each new connection is made."""
    both = tokens(tmp_path / "p", OLD), tokens(tmp_path / "d", OLD)
    settings = KvSettings(
        channels=ChannelSettings(max_idle=0), exports=ExportLimits(frame_bytes=1 << 20)
    )

    async def body() -> None:
        async with pair(settings, tokens=both) as (prefill, decode):
            apart = tuple(range(56, 64))
            running = Transfer((1, 100), 30, apart, apart)
            running.open(prefill, decode)
            prefill.plane.export_progress(running.key, 8)
            at = 0
            for lines in ((OLD, NEW), (NEW, OLD), (NEW,)):
                for name in ("p", "d"):  # each end hears of it at another time
                    written(tmp_path / name, *lines)
                    ids = tuple(range(at, at + 3))
                    await hand_over(Transfer((1, at), 9, ids, ids), prefill, decode)
                    at += 3
            running.seal(prefill)
            await decode.told.wait("committed", running.key)
            running.check_bytes(prefill, decode)

    run(body())


def test_a_file_of_no_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start it ends the worker; later what there was goes on."""
    with pytest.raises(OSError, match="No such file"):
        Tokens(tmp_path / "none")
    with pytest.raises(BadToken, match="token 1: write 32 to 256"):
        tokens(tmp_path / "short", b"short")
    held = tokens(tmp_path / "t", OLD)
    given = held.prove(Purpose.KV, bytes(32))
    written(tmp_path / "t", b"half")
    with caplog.at_level(logging.WARNING):
        confirmed = held.confirm(Purpose.KV, bytes(32), given.given)
    assert confirmed is not None
    assert not given.stranger(confirmed)
    assert "tokens stay as they were" in caplog.text
