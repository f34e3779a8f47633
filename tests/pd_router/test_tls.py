"""Router and workers speak TLS to each other, both ways: certificates and their authority
change under running streams; whoever is no worker of the same PDCluster is refused at the
control port and isn't dialled, and a log line says why."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pd_core.identity import Identity, Part
from pd_proto.tls import Certificates
from tests.certificates import Authority
from tests.pd_router.rig import rig, until

pytestmark = pytest.mark.slow

ROUTER = Identity("ml", "chat", Part.ROUTER)
WORKER = ROUTER.peer(Part.WORKER)
STREAMS = 16
Run = Callable[[Coroutine[Any, Any, Any]], Any]


def test_certificates_and_authority_change_under_running_streams(run: Run, tmp_path: Path) -> None:
    """As an authority is replaced: first all trust both, then they show new certificates,
    then they trust only the new one. At each step streams run on, and a worker comes."""
    old, new = Authority("old"), Authority("new")

    async def body() -> None:
        certificates = Certificates(old.folder(tmp_path / "router", ROUTER), ROUTER)
        old.folder(tmp_path / "worker", WORKER)
        worker = Certificates(tmp_path / "worker", WORKER)
        async with rig(late_s=60, certificates=certificates) as r:
            await r.add("prefill", "p-0", certificates=worker)
            decode = await r.add("decode", "d-0", certificates=worker)
            gate = decode.gate("decode")  # nobody ends before all has changed
            started = [r.start(max_tokens=50) for _ in range(STREAMS)]
            await asyncio.gather(*(sink.first_token() for _, sink, _ in started))
            steps = [(old, new.pem), (new, old.pem), (new, b"")]
            for number, (authority, trusting) in enumerate(steps):
                for name, identity in (("router", ROUTER), ("worker", WORKER)):
                    authority.folder(tmp_path / name, identity, trusting=trusting)
                    joined = Certificates(tmp_path / "worker", WORKER)
                    await r.add("prefill", f"p-{number}-{name}", certificates=joined)
            gate.set()
            for request, sink, _ in started:
                await sink.wait()
                sink.assert_right(request)
            assert not r.hooks.retries, "no stream broke"
            await r.complete()
            await r.nothing_held()

    run(body())


STRANGERS = {
    "a worker of another PDCluster": "spiffe://pdcluster/ml/other/worker",
    "a router of its own": "spiffe://pdcluster/ml/chat/router",
    "another authority": "CERTIFICATE_VERIFY_FAILED",
    "no TLS": "WRONG_VERSION_NUMBER",
}


@pytest.mark.parametrize("who", STRANGERS)
def test_no_stranger_announces_itself(
    run: Run,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    who: str,
) -> None:
    """What gRPC refuses by itself it says on the process's standard error."""
    authority = Authority()
    theirs: Certificates | None = None
    folder = tmp_path / "stranger"
    match who:
        case "a worker of another PDCluster":
            authority.folder(folder, Identity("ml", "other", Part.WORKER))
            theirs = Certificates(folder, WORKER)
        case "a router of its own":
            theirs = Certificates(authority.folder(folder, ROUTER), WORKER)
        case "another authority":
            Authority("another").folder(folder, WORKER, trusting=authority.pem)
            theirs = Certificates(folder, WORKER)

    async def body() -> None:
        ours = Certificates(authority.folder(tmp_path / "router", ROUTER), ROUTER)
        async with rig(certificates=ours) as r:
            stranger = await r.join("both", "stranger", certificates=theirs)
            await until(lambda: len(stranger.refusals) > 1, "it was refused, twice")
            assert not r.workers.views()

    with caplog.at_level(logging.WARNING):
        run(body())
    said = [r.getMessage() for r in caplog.records if "refused ipv4:127" in r.getMessage()]
    assert STRANGERS[who] in "\n".join(said) + capfd.readouterr().err


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (Identity("ml", "other", Part.WORKER), "Hostname Verification"),
        (ROUTER, "Hostname Verification"),
    ],
)
def test_no_work_goes_to_a_stranger(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, shown: Identity, why: str
) -> None:
    """A worker announces another's address as its own."""
    authority = Authority()

    async def body() -> None:
        ours = Certificates(authority.folder(tmp_path / "router", ROUTER), ROUTER)
        theirs = Certificates(authority.folder(tmp_path / "worker", WORKER), WORKER)
        other = Certificates(authority.folder(tmp_path / "other", shown), WORKER)
        async with rig(certificates=ours) as r, rig(certificates=ours) as elsewhere:
            there = await elsewhere.join("both", "other", certificates=other)
            liar = await r.join("both", "liar", certificates=theirs)
            liar.stop_announcing()
            liar.port = there.port
            liar.announce_to(r.control)
            link = "no work stream"
            await until(lambda: any(link in m and why in m for m in caplog.messages), link)
            assert not r.usable(liar)

    with caplog.at_level(logging.WARNING):
        run(body())
