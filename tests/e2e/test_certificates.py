"""TLS by `security.tls.mode: Auto` among real processes: the right tokens, files that only their
user reads and that go with the cluster, strangers refused in words, and certificates and
authorities that change under sixteen streams, a worker that starts anew among them, without one
error."""

import asyncio
import socket
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from pd_core.identity import Identity, Part
from pd_operator.local.cluster import Options
from pd_operator.local.state import cache_root
from pd_operator.podspec import KV_PORT, WORK_PORT
from pd_operator.tlsplan import Terms
from pd_proto.tls import Certificates
from tests.certificates import Authority
from tests.cluster import Cluster, serving, spec
from tests.e2e.asking import body, expected, text, text_of
from tests.e2e.rotating import Stage
from tests.ports import free_port
from tests.reference import Reference

FAST = Terms(
    authority=timedelta(seconds=40),
    authority_left=timedelta(seconds=34),
    leaf=timedelta(seconds=30),
    leaf_left=timedelta(seconds=26),
    overlap=timedelta(seconds=2),
)
"""A certificate each four seconds, an authority each six; late ones have 26 s to spare."""
DEADLINE_S = 280.0


def document(model: Path, **pools: Any) -> dict[str, Any]:
    """KV by tcp, so that it's TLS too, and always from one worker to another."""
    one: dict[str, Any] = {"replicas": 1}
    return spec(
        model,
        prefill=one,
        decode=pools.get("decode", one),
        router={"routing": {"disaggregate": "always"}},
        security={"tls": {"mode": "Auto"}},
        kvTransfer={"transport": "tcp"},
    )


@pytest.fixture(scope="module")
def secured(model: Path, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("secured")
    with serving(document(model), folder) as running:
        yield running
    left = [one for one in folder.rglob("*") if one.name.endswith((".key", ".crt"))]
    assert left == []


def secrets_of(cluster: Cluster) -> Path:
    return Path(cluster.env["XDG_STATE_HOME"]) / "pdcluster" / "test" / "secrets"


def log_of(cluster: Cluster, pod: str) -> str:
    folder = Path(cluster.env["XDG_STATE_HOME"]) / "pdcluster" / "test" / "logs"
    return "".join(one.read_text() for one in folder.glob(f"{pod}*"))


def test_tokens_are_right(secured: Cluster, reference: Reference) -> None:
    content = body(text_of(60), 24)
    assert text(secured, content) == expected(reference, content)
    taken = secured.metrics(secured.pod("decode"))["pdcluster_engine_kv_bytes_total"]
    assert {dict(labels)["transport"] for labels, size in taken.items() if size} == {"tcp"}


def test_only_its_user_reads_the_keys(secured: Cluster) -> None:
    found = [one for one in secrets_of(secured).rglob("*") if one.is_file()]
    assert {one.name for one in found} >= {"ca.crt", "tls.crt", "tls.key"}
    for one in found:
        assert stat.S_IMODE(one.stat().st_mode) == 0o600
        assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700
    for pod in secured.pods():
        assert "PRIVATE KEY" not in log_of(secured, pod.name)


def test_kv_by_plain_text_is_refused(secured: Cluster) -> None:
    pod = secured.pod("decode")
    with socket.create_connection((pod.ip, KV_PORT), timeout=10) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until_end(plain)
    secured.until(lambda: "KV plane: refused 127." in log_of(secured, pod.name), "a refusal")


def until_end(sock: socket.socket) -> None:
    """Until the other end has closed."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return


def test_a_router_of_another_cluster_is_refused(secured: Cluster, tmp_path: Path) -> None:
    """Its name is the same; its authority is not."""
    pod = secured.pod("decode")
    who = Identity("default", "test", Part.ROUTER)
    ours = (secrets_of(secured) / "test-tls-workers" / "ca.crt").read_bytes()
    folder = Authority("another").folder(tmp_path / "router", who, trusting=ours)

    async def dial() -> None:
        channel = Certificates(folder, who).channel(f"{pod.ip}:{WORK_PORT}", Part.WORKER, ())
        async with channel, asyncio.timeout(30):
            call = channel.stream_stream("/pd.v1.Worker/Work")()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(dial())
    wanted = "CERTIFICATE_VERIFY_FAILED"
    secured.until(lambda: wanted in log_of(secured, pod.name), "a refusal that says why")


@pytest.mark.timeout(240)
def test_another_mode_ends_with_all_of_one_kind(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """From without to with and back: it interrupts, and what is right after it is served."""
    plain = document(model)
    del plain["spec"]["security"]
    content = body(text_of(60), 8)
    with serving(plain, tmp_path) as cluster:
        for mode in ("Auto", "Disabled"):
            before = {pod.name for pod in cluster.pods()}
            wanted = {"tls": {"mode": mode}}
            cluster.edit(lambda found, wanted=wanted: found["spec"].update(security=wanted))

            def rolled(before: set[str] = before) -> bool:
                return cluster.all_ready() and not before & {pod.name for pod in cluster.pods()}

            cluster.until(rolled, f"all pods are of mode {mode}", 100.0)
            assert text(cluster, content) == expected(reference, content)

        def left() -> set[str]:
            return {one.name for one in secrets_of(cluster).iterdir()}

        cluster.until(lambda: left() == {"test-token"}, "of Secrets the token's alone is left")


# ---- rotation ---------------------------------------------------------------------------


class Versions:
    """What a mounted Secret has held, looked at again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.bundles: list[bytes] = []
        self.leaves: list[bytes] = []

    def look(self) -> None:
        for name, seen in (("ca.crt", self.bundles), ("tls.crt", self.leaves)):
            now = (self._folder / name).read_bytes()
            if not seen or seen[-1] != now:
                seen.append(now)

    async def until(self, enough: Callable[["Versions"], bool]) -> None:
        while not enough(self):
            self.look()
            await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
def test_they_change_under_sixteen_streams(model: Path, tmp_path: Path, run) -> None:
    options = Options(
        port=free_port(), state=tmp_path / "state", cache=cache_root(), certificate_terms=FAST
    )

    async def story(stage: Stage) -> None:
        versions = Versions(stage.secrets / "test-tls-workers")
        # Old, both, new: the first authority has been forgotten.
        await versions.until(lambda seen: len(seen.bundles) >= 3 and all(stage.results))
        back = stage.kill_a_decoder()
        seen = len(versions.bundles)
        await versions.until(lambda now: len(now.bundles) >= seen + 2)
        await back()
        assert len(versions.leaves) >= 3

    async def played() -> Stage:
        stage = Stage(options)
        await stage.play(document(model, decode={"replicas": 2}), story)
        return stage

    run(played(), DEADLINE_S).assert_flawless()
