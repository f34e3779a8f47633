"""Tokens among real processes: two PDClusters of one namespace on one machine, of the same model.
A worker of one can't push KV to the other's, by tcp, shared memory or NIXL, nor a router give it
work; the token's file is its user's alone, and a token follows another under sixteen streams,
without one error."""

import asyncio
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pd_core.proof import Purpose, parse_tokens
from pd_operator.local.cluster import Options
from pd_operator.local.state import cache_root
from pd_operator.peertokens import TokenTerms
from pd_operator.podspec import KV_PORT, WORK_PORT
from pd_proto.tokens import NO_PROOF, Tokens
from pd_proto.v1 import engine_pb2 as pb
from pd_proto.v1 import engine_pb2_grpc
from tests.cluster import Cluster, Pod, serving, spec
from tests.e2e.asking import body, expected, text, text_of
from tests.e2e.rotating import Stage
from tests.ports import free_port
from tests.reference import Reference

DEADLINE_S = 280.0
PROMPT = list(range(3, 43))
FAST = TokenTerms(life=timedelta(seconds=2), overlap=timedelta(seconds=2))


def document(model: Path, name: str, transport: str) -> dict[str, Any]:
    one: dict[str, Any] = {"replicas": 1}
    made = spec(
        model,
        prefill=one,
        decode=one,
        router={"routing": {"disaggregate": "always"}},
        kvTransfer={"transport": transport},
    )
    return {**made, "metadata": {"name": name}}


def home_of(cluster: Cluster, name: str) -> Path:
    return Path(cluster.env["XDG_STATE_HOME"]) / "pdcluster" / name


def token_of(cluster: Cluster, name: str) -> Path:
    return home_of(cluster, name) / "secrets" / f"{name}-token" / "tokens"


def log_of(cluster: Cluster, name: str, pod: Pod) -> str:
    return "".join(
        one.read_text() for one in (home_of(cluster, name) / "logs").glob(f"{pod.name}*")
    )


class Asking:
    """A router's end of a work stream, with that PDCluster's token."""

    def __init__(self, pod: Pod, token: Path | None) -> None:
        self._address = f"{pod.ip}:{WORK_PORT}"
        self._tokens = Tokens(token) if token else None
        self.epoch = ""

    async def bind(self, channel: grpc.aio.Channel) -> Any:
        """Bound, whatever epoch it is: the first refusal names it."""
        for _ in range(2):
            call = engine_pb2_grpc.WorkerStub(channel).Work()
            proof = None
            if self._tokens is not None:
                proof = await self._tokens.answer(Purpose.WORK, call)
                assert not isinstance(proof, str)
            given = proof.given if proof else b""
            bind = pb.Bind(router="test", worker_epoch=self.epoch or "?", proof=given)
            await call.write(pb.WorkRequest(commands=[pb.Command(bind=bind)]))
            try:
                if await call.read() is not grpc.aio.EOF:
                    return call
                why = await call.details()
            except grpc.aio.AioRpcError as error:
                why = error.details() or ""
            if "epoch is " not in why:
                raise PermissionError(why)
            self.epoch = why.split("epoch is ")[1].split(",")[0]
        raise AssertionError("not bound")

    async def epoch_of(self) -> str:
        async with grpc.aio.insecure_channel(self._address) as channel:
            await self.bind(channel)
        return self.epoch

    async def push_to(self, target: pb.KvTarget) -> str:
        """Has the worker compute a prompt for that target; why it failed."""
        async with grpc.aio.insecure_channel(self._address) as channel, asyncio.timeout(60):
            call = await self.bind(channel)
            prefill = pb.Prefill(
                handle=1, id=pb.TransferId(request="r", attempt=1), token_ids=PROMPT,
                prompt_tokens=len(PROMPT), choices=[0], deadline_s=30, lease_s=30,
                sampling=pb.Sampling(max_tokens=2, seed=1, ignore_eos=True), target=target,
            )  # fmt: skip
            await call.write(pb.WorkRequest(commands=[pb.Command(prefill=prefill)]))
            while (reply := await call.read()) is not grpc.aio.EOF:
                for event in reply.events:
                    if event.HasField("failed"):
                        return str(event.failed.message)
        raise AssertionError("the stream ended")


@pytest.fixture(scope="module", params=["tcp", "shm", "nixl"])
def two(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Cluster, str]]:
    """Two PDClusters of the namespace `default`, of one user, one machine, one model."""
    transport = str(request.param)
    folders = [tmp_path_factory.mktemp(name) for name in ("ours", "theirs")]
    with (
        serving(document(model, "ours", transport), folders[0]) as ours,
        serving(document(model, "theirs", transport), folders[1]) as theirs,
    ):
        yield ours, theirs, transport
    assert [one for folder in folders for one in folder.rglob("tokens")] == []


@pytest.mark.timeout(240)
def test_a_worker_of_another_pushes_nothing(
    two: tuple[Cluster, Cluster, str], reference: Reference
) -> None:
    """Its own PDCluster's target only doesn't know the grant: there the token opens the door."""
    ours, theirs, transport = two
    stranger = Asking(theirs.pod("prefill"), token_of(theirs, "theirs"))
    content = body(text_of(60), 24)
    for cluster, name, said in ((ours, "ours", NO_PROOF), (theirs, "theirs", "")):
        assert text(cluster, content) == expected(reference, content), "KV goes within it"
        pod = cluster.pod("decode")
        epoch = asyncio.run(Asking(pod, token_of(cluster, name)).epoch_of())
        target = pb.KvTarget(
            worker=pod.name, epoch=epoch, kv_address=f"{pod.ip}:{KV_PORT}",
            transport=transport, grant=b"g" * 16,
        )  # fmt: skip
        blocks = cluster.blocks(pod)
        why = asyncio.run(stranger.push_to(target))
        refused = [line for line in log_of(cluster, name, pod).splitlines() if NO_PROOF in line]
        if said:
            assert "token isn't the target's" in why
            assert "KV plane: refused" in refused[0]
        else:
            assert "token" not in why
            assert not refused
        assert cluster.blocks(pod) == blocks
        assert text(cluster, content) == expected(reference, content), "and goes on"


def test_a_router_of_another_gives_no_work(two: tuple[Cluster, Cluster, str]) -> None:
    ours, theirs, _ = two
    pod = ours.pod("decode")
    for token in (token_of(theirs, "theirs"), None):
        with pytest.raises(PermissionError, match=NO_PROOF):
            asyncio.run(Asking(pod, token).epoch_of())
    assert NO_PROOF in log_of(ours, "ours", pod)


def test_only_its_user_reads_the_token(two: tuple[Cluster, Cluster, str]) -> None:
    found = []
    for cluster, name in ((two[0], "ours"), (two[1], "theirs")):
        file = token_of(cluster, name)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        [token] = parse_tokens(file.read_bytes())
        found.append(token)
        for pod in cluster.pods():
            assert token.decode() not in log_of(cluster, name, pod)
    assert found[0] != found[1]


# ---- rotation ---------------------------------------------------------------------------


async def firsts(file: Path, enough: int) -> None:
    """Until so many tokens have been the first one, which is proven."""
    seen: set[bytes] = set()
    while len(seen) < enough:
        seen.add(parse_tokens(file.read_bytes())[0])
        await asyncio.sleep(0.1)


@pytest.mark.timeout(300)
def test_they_change_under_sixteen_streams(model: Path, tmp_path: Path, run) -> None:
    """A worker that starts anew among them, without one error."""
    options = Options(
        port=free_port(), state=tmp_path / "state", cache=cache_root(), token_terms=FAST
    )
    made = document(model, "test", "tcp")
    made["spec"]["decode"] = {"replicas": 2}

    async def story(stage: Stage) -> None:
        file = stage.secrets / "test-token" / "tokens"
        await firsts(file, 3)
        back = stage.kill_a_decoder()
        await firsts(file, 3)
        await back()
        await stage.each_was_answered()

    async def played() -> Stage:
        stage = Stage(options)
        await stage.play(made, story)
        return stage

    run(played(), DEADLINE_S).assert_flawless()
