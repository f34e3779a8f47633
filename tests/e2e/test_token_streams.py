"""A PDCluster's token on the streams of gRPC, by a real router's and a real worker's ends without
a model: who holds it announces itself and is given work; whoever doesn't is refused, on either
side, and a log line says why; a token follows another while streams live."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from pd_engine import server
from pd_engine.announce import Announcer
from pd_proto.tokens import NO_PROOF, NO_TOKEN_THERE, NOT_CONFIRMED, Tokens
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from pd_router.workers import Workers, WorkersConfig
from tests.pd_engine.stub_core import stub_core
from tests.pd_router.rig import until

pytestmark = pytest.mark.slow

OLD, NEW = b"old" * 14, b"new" * 14
EPOCH, MODEL = "epoch-1", "m"
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def written(file: Path, *lines: bytes) -> Path:
    """Another file in its place, as a mounted Secret changes."""
    beside = file.with_suffix(".next")
    beside.write_bytes(b"\n".join(lines) + b"\n")
    return beside.replace(file)


def tokens(file: Path, *lines: bytes) -> Tokens | None:
    return Tokens(written(file, *lines)) if lines else None


def hello(name: str, port: int) -> pb.Hello:
    return pb.Hello(
        worker=name, epoch=EPOCH, role=pb.ROLE_BOTH, work_address=f"127.0.0.1:{port}",
        model=MODEL, model_hash="h", layout_hash="l", bundle_hash="",
        kv_format=pb.KvFormat(dtype="float32", quantization="none", block_tokens=4, layers=1,
                              kv_heads=1, head_dim=8, block_bytes=256, protocol_version=1),
        capacity=pb.Capacity(kv_blocks=8, max_model_tokens=32, max_running=1, max_queued=1),
    )  # fmt: skip


@asynccontextmanager
async def router(held: Tokens | None) -> AsyncIterator[tuple[Workers, int]]:
    workers = Workers(WorkersConfig(MODEL, "r", heartbeat_s=0.1), tokens=held)
    port = await workers.start("127.0.0.1", 0)
    try:
        yield workers, port
    finally:
        await workers.close()


@asynccontextmanager
async def worker(
    name: str, held: Tokens | None, routers: int, listening: Tokens | None = None
) -> AsyncIterator[None]:
    """`listening`: what its work port goes by, where that is something else."""
    serving, port = await server.serve(
        stub_core(), EPOCH, "127.0.0.1", 0, tokens=listening if listening is not None else held
    )
    health: Any = SimpleNamespace(registered=False)
    announcer = Announcer(
        stub_core(), health, hello(name, port), pb.TokenizerBundle(), [f"127.0.0.1:{routers}"],
        tokens=held,
    )  # fmt: skip
    announcing = asyncio.create_task(announcer.run())
    try:
        yield
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await serving.stop(None)


def test_a_token_follows_another_while_streams_live(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one follows another, at each side at another time; at each step a worker comes, and those
    that are there stay."""

    async def body() -> None:
        ours, theirs = tokens(tmp_path / "r", OLD), tokens(tmp_path / "w", OLD)
        async with router(ours) as (there, port), worker("w-0", theirs, port):
            await until(there.ready, "the first worker serves")
            for number, lines in enumerate(((OLD, NEW), (NEW, OLD), (NEW,))):
                for side in ("r", "w"):
                    written(tmp_path / side, *lines)
                    async with worker(f"w-{number}-{side}", theirs, port):
                        await until(
                            lambda: sum(v.usable for v in there.views()) == 2, "another one serves"
                        )
                    await until(
                        lambda: [v.id.name for v in there.views() if v.usable] == ["w-0"],
                        "it has gone, and the first is still there",
                    )
            said = list(caplog.messages)  # before the first one's own end
        assert not any("refused" in m or "w-0 work stream lost" in m for m in said)

    with caplog.at_level(logging.WARNING):
        run(body())


@pytest.mark.parametrize("theirs", [(NEW,), ()], ids=["of another PDCluster", "without"])
def test_no_stranger_announces_itself(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: tuple[bytes, ...]
) -> None:
    async def body() -> None:
        ours = tokens(tmp_path / "r", OLD)
        async with (
            router(ours) as (there, port),
            worker("stranger", tokens(tmp_path / "w", *theirs), port),
        ):
            said = "announcement ended: " + NO_PROOF
            await until(lambda: any(said in m for m in caplog.messages), "the worker says why")
            assert not there.views()

    with caplog.at_level(logging.INFO):
        run(body())
    assert any("refused ipv4:127" in m and NO_PROOF in m for m in caplog.messages)


@pytest.mark.parametrize(
    ("theirs", "why"), [((NEW,), NO_PROOF), ((), NO_TOKEN_THERE)], ids=["of another", "without"]
)
def test_it_announces_itself_to_its_own_routers_alone(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, theirs: tuple[bytes, ...], why: str
) -> None:
    class Taking(engine_pb2_grpc.ControlServicer):
        """A router that asks for nothing and hears of no worker before it has answered."""

        async def Announce(self, requests: Any, context: Any) -> None:
            await context.send_initial_metadata(())
            async for one in requests:
                raise AssertionError(f"it was told: {one}")

    async def body() -> None:
        ours = tokens(tmp_path / "w", OLD)
        if theirs:
            async with (
                router(tokens(tmp_path / "r", *theirs)) as (_, port),
                worker("w", ours, port),
            ):
                await until(lambda: any(why in m for m in caplog.messages), why)
            return
        serving = grpc.aio.server()
        engine_pb2_grpc.add_ControlServicer_to_server(Taking(), serving)
        port = int(serving.add_insecure_port("127.0.0.1:0"))
        await serving.start()
        async with worker("w", ours, port):
            await until(lambda: any(why in m for m in caplog.messages), why)
        await serving.stop(None)

    with caplog.at_level(logging.INFO):
        run(body())


def test_a_router_that_takes_any_proof_is_found_out(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Pretending(engine_pb2_grpc.ControlServicer):
        async def Announce(self, requests: Any, context: Any) -> None:
            await context.send_initial_metadata((("pdcluster-challenge-bin", bytes(32)),))
            async for _ in requests:
                welcome = pb.Welcome(router="r", confirmation=bytes(32))
                await context.write(pb.RouterNotice(welcome=welcome))

    async def body() -> None:
        serving = grpc.aio.server()
        engine_pb2_grpc.add_ControlServicer_to_server(Pretending(), serving)
        port = int(serving.add_insecure_port("127.0.0.1:0"))
        await serving.start()
        async with worker("w", tokens(tmp_path / "w", OLD), port):
            await until(lambda: any(NOT_CONFIRMED in m for m in caplog.messages), "it is seen")
        await serving.stop(None)

    with caplog.at_level(logging.INFO):
        run(body())
    assert not any("router=127" in m and m.endswith(" announced") for m in caplog.messages)


def test_no_work_goes_to_a_stranger(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker of ours announces the address of one of another PDCluster."""

    async def body() -> None:
        ours, others = tokens(tmp_path / "r", OLD), tokens(tmp_path / "o", NEW)
        async with router(ours) as (there, port), worker("liar", ours, port, listening=others):
            await until(
                lambda: any("no work stream" in m and NO_PROOF in m for m in caplog.messages),
                "the router says why",
            )
            assert not there.ready()

    with caplog.at_level(logging.WARNING):
        run(body())
