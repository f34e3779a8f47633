"""The engine's gRPC sides with TLS: its work port takes its own PDCluster's routers alone and
says whom it refused and why, and it announces itself to no other router."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from pd_core.identity import Identity, Part
from pd_engine import server
from pd_engine.announce import Announcer
from pd_engine.outbox import Outbox
from pd_proto import tls
from pd_proto.tls import Certificates
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from tests.certificates import Authority

WORKER = Identity("ml", "chat", Part.WORKER)
ROUTER = WORKER.peer(Part.ROUTER)
EPOCH = "epoch-1"
DEADLINE_S = 10.0
Run = Callable[[Coroutine[Any, Any, Any]], Any]


async def listening(certificates: Certificates) -> tuple[grpc.aio.Server, int]:
    core: Any = SimpleNamespace(
        open_stream=lambda: (1, Outbox()),
        close_stream=lambda _: None,
        handle=lambda *_: None,
        commands_done=lambda: None,
    )
    return await server.serve(core, EPOCH, "127.0.0.1", 0, certificates)


async def bind(channel: grpc.aio.Channel) -> str:
    """ "" when the worker is bound, else why it isn't."""
    async with channel, asyncio.timeout(DEADLINE_S):
        call = engine_pb2_grpc.WorkerStub(channel).Work()
        try:
            command = pb.Command(bind=pb.Bind(router="r", worker_epoch=EPOCH))
            await call.write(pb.WorkRequest(commands=[command]))
            reply = await call.read()
            if reply is not grpc.aio.EOF:
                return "" if reply.events[0].HasField("bound") else "no Bound"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return f"{(await call.code()).name}: {await call.details()}"


def test_its_own_routers_are_let_in(run: Run, tmp_path: Path) -> None:
    authority = Authority()
    ours = Certificates(authority.folder(tmp_path / "worker", WORKER), WORKER)
    theirs = Certificates(authority.folder(tmp_path / "router", ROUTER), ROUTER)

    async def body() -> None:
        serving, port = await listening(ours)
        assert not await bind(theirs.channel(f"127.0.0.1:{port}", Part.WORKER, ()))
        await serving.stop(None)

    run(body())


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("a router of another PDCluster", "spiffe://pdcluster/ml/other/router"),
        ("a worker of its own", "spiffe://pdcluster/ml/chat/worker"),
        ("another authority", "CERTIFICATE_VERIFY_FAILED"),
        ("no certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("no TLS", "WRONG_VERSION_NUMBER"),
    ],
)
def test_strangers_are_refused(
    run: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    who: str,
    why: str,
) -> None:
    """What gRPC refuses by itself it says on the process's standard error."""
    authority = Authority()
    ours = Certificates(authority.folder(tmp_path / "worker", WORKER), WORKER)
    folder = tmp_path / "stranger"

    def channel(address: str) -> grpc.aio.Channel:
        match who:
            case "a router of another PDCluster":
                authority.folder(folder, Identity("ml", "other", Part.ROUTER))
            case "a worker of its own":
                authority.folder(folder, WORKER)
            case "another authority":
                Authority("another").folder(folder, ROUTER, trusting=authority.pem)
            case "no certificate":
                credentials = grpc.ssl_channel_credentials(authority.pem)
                name = ("grpc.ssl_target_name_override", WORKER.dns_name)
                return grpc.aio.secure_channel(address, credentials, options=(name,))
            case _:
                return tls.dial(None, address, Part.WORKER, ())
        return Certificates(folder, ROUTER).channel(address, Part.WORKER, ())

    async def body() -> str:
        serving, port = await listening(ours)
        answer = await bind(channel(f"127.0.0.1:{port}"))
        await serving.stop(None)
        return answer

    with caplog.at_level(logging.WARNING):
        assert run(body())
    said = [r.getMessage() for r in caplog.records if "refused ipv4:127" in r.getMessage()]
    assert why in "\n".join(said) + capfd.readouterr().err


class Router(engine_pb2_grpc.ControlServicer):
    """Takes any announcement."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def Announce(self, requests: Any, context: Any) -> None:
        self.heard.append((await anext(aiter(requests))).hello.worker)
        await context.write(pb.RouterNotice(refusal=pb.Refusal(reason="heard")))


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (ROUTER, "heard"),
        (Identity("ml", "other", Part.ROUTER), "Hostname Verification"),
        (WORKER, "Hostname Verification"),
        (None, "WRONG_VERSION_NUMBER"),
    ],
)
def test_it_announces_itself_to_its_own_routers_alone(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: Identity | None, why: str
) -> None:
    authority = Authority()
    ours = Certificates(authority.folder(tmp_path / "worker", WORKER), WORKER)
    theirs = None
    if shown is not None:
        theirs = Certificates(authority.folder(tmp_path / "router", shown), shown)
    said = asyncio.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "announcement ended" in record.getMessage():
                said.set()

    async def body() -> list[str]:
        router, serving = Router(), grpc.aio.server()
        engine_pb2_grpc.add_ControlServicer_to_server(router, serving)
        port = tls.listen(theirs, serving, "127.0.0.1:0")
        await serving.start()
        nothing: Any = SimpleNamespace()
        announcer = Announcer(
            nothing,
            nothing,
            pb.Hello(worker="w"),
            pb.TokenizerBundle(),
            [f"127.0.0.1:{port}"],
            ours,
        )
        announcing = asyncio.create_task(announcer.run())
        async with asyncio.timeout(DEADLINE_S):
            await said.wait()
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)
        await serving.stop(None)
        return router.heard

    listener = Listening()
    with caplog.at_level(logging.INFO, logger="pd_engine.announce"):
        logger = logging.getLogger("pd_engine.announce")
        logger.addHandler(listener)
        try:
            heard = run(body())
        finally:
            logger.removeHandler(listener)
    assert (heard[:1] == ["w"]) == (shown == ROUTER)
    assert any("announcement ended" in m and why in m for m in caplog.messages)
