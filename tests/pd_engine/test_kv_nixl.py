"""KV by nixl, over UCX without RDMA: bytes arrive, who chooses it and who doesn't, what changed
under a read fails closed, and blocks that a read may still write to belong to nobody until
that is over, whatever became of it or of its sender."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pd_core.failures import FailureKind
from pd_core.identity import Identity, Part
from pd_core.kv import KvLayout
from pd_engine.kv import agents, frames, nixl, tcp
from pd_engine.kv.agents import Agent, AgentError
from pd_engine.kv.plane import KvSettings
from pd_engine.transfer import ExportLimits, ImportLimits, KvRange, PushHead, Region, TransferId
from pd_proto.tls import Certificates
from tests.certificates import Authority
from tests.pd_engine.kv_rig import (
    LAYOUT,
    WAIT_S,
    Worker,
    epoch,
    hand_over,
    pair,
    transfer,
    worker,
)

pytestmark = pytest.mark.slow

Run = Callable[..., None]
PROCESSES_S = 110.0
"""For a test that starts processes, on a machine that has other things to do."""
BIG = KvLayout("m", "float32", block_tokens=16, layers=4, kv_heads=8, head_dim=64)
"""Blocks of 256 KiB: several reads a push, where there are many."""


def by(transport: str = "nixl", frame_bytes: int = 1 << 20, **more: Any) -> KvSettings:
    exports = ExportLimits(frame_bytes=frame_bytes)
    return KvSettings(transport=transport, auto=("nixl", "tcp"), exports=exports, **more)


@pytest.mark.parametrize("layout", [LAYOUT, BIG], ids=["small slices", "large slices"])
def test_bytes_arrive(run: Run, layout: KvLayout) -> None:
    async def body() -> None:
        for frame_bytes in (1, 300_000, 1 << 22):
            async with pair(by(frame_bytes=frame_bytes), by(), layout=layout) as (prefill, decode):
                for number, (tokens, prefix) in enumerate([(1, 0), (161, 0), (161, 2)]):
                    t = transfer(number, tokens, layout=layout, prefix_blocks=prefix)
                    before = decode.blocks(t.destination[:prefix])
                    assert await hand_over(t, prefill, decode) == "nixl"
                    assert decode.blocks(t.destination[:prefix]) == before
                assert decode.plane.connections == 1  # used again

    run(body())


def test_layers_as_they_become_final(run: Run) -> None:
    async def body() -> None:
        async with pair(by(frame_bytes=LAYOUT.layer_bytes), by()) as (prefill, decode):
            t = transfer(1, 30)
            t.open(prefill, decode)
            for tokens in (3, 12, 30):
                for layer in range(0, 6, 2):
                    prefill.plane.export_progress(t.key, tokens, layer, layer + 2)
                    await asyncio.sleep(0)
            t.seal(prefill)
            await decode.told.wait("committed", t.key)
            await prefill.told.wait("done", t.key)
            t.check_bytes(prefill, decode)

    run(body())


def test_many_at_once_from_two_senders(run: Run) -> None:
    async def body() -> None:
        async with pair(by(), by(), layout=BIG, blocks=160, epoch=epoch()) as (prefill, decode):
            other = await worker("prefill-2", layout=BIG, blocks=160, settings=by(), seed=2)
            many = [transfer(n, 150, layout=BIG, at=10 * n, pool=10 * n + 10) for n in range(16)]
            for number, t in enumerate(many):
                t.open((prefill, other)[number % 2], decode)
                t.seal((prefill, other)[number % 2])
            for number, t in enumerate(many):
                await decode.told.wait("committed", t.key)
                t.check_bytes((prefill, other)[number % 2], decode)
            await other.plane.close()

    run(body())


def test_the_words_have_tls(run: Run, tmp_path: Path) -> None:
    authority, who = Authority(), Identity("ml", "chat", Part.WORKER)
    made = [Certificates(authority.folder(tmp_path / name, who), who) for name in ("p", "d")]

    async def body() -> None:
        async with pair(by(), by(), certificates=(made[0], made[1])) as (prefill, decode):
            assert await hand_over(transfer(1, 41), prefill, decode) == "nixl"

    run(body())


# ---- who chooses it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "taken"),
    [
        ("auto", "auto", "nixl"),
        ("auto", "nixl", "nixl"),
        ("nixl", "auto", "nixl"),
        ("auto", "tcp", "tcp"),
        ("tcp", "auto", "tcp"),
    ],
)
def test_auto_takes_what_both_can_do(run: Run, ours: str, theirs: str, taken: str) -> None:
    async def body() -> None:
        async with pair(by(ours), by(theirs)) as (prefill, decode):
            for number in range(2):
                assert await hand_over(transfer(number, 20), prefill, decode) == taken

    run(body())


@pytest.mark.parametrize(
    ("ours", "theirs", "asked", "says"),
    [
        ("nixl", "tcp", "", "takes none by nixl"),
        ("auto", "tcp", "nixl", "takes none by nixl"),
        ("tcp", "nixl", "", "decode takes KV by nixl alone"),
        ("auto", "nixl", "tcp", "decode takes KV by nixl alone"),
    ],
)
def test_what_was_asked_for_by_name_has_no_substitute(
    run: Run, ours: str, theirs: str, asked: str, says: str
) -> None:
    async def body() -> None:
        async with pair(by(ours), by(theirs)) as (prefill, decode):
            t = transfer(1, 20)
            t.open(prefill, decode, transport=asked)
            failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert failure.kind == FailureKind.TRANSFER_FAILED
            assert says in failure.message
            decode.plane.cancel_import(t.key)

    run(body())


def test_where_it_is_not_installed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_LIBRARIES", ("no_such_library",))
    assert "pip install 'pdcluster[nixl]'" in agents.missing()

    async def body() -> None:
        async with pair(by("nixl"), by("nixl")) as (prefill, decode):
            t = transfer(1, 20)
            t.open(prefill, decode)
            failure = (await prefill.told.wait("export_failed", t.key))[2]
            assert "nixl-cu13 isn't installed" in failure.message
            decode.plane.cancel_import(t.key)
        async with pair(by("auto"), by("auto")) as (prefill, decode):
            assert await hand_over(transfer(1, 20), prefill, decode) == "tcp"

    run(body())


# ---- what fails closed --------------------------------------------------------------------


def test_memory_that_changes_under_the_read_fails_closed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit, as on a bad way, and after its checksum was taken."""
    real = nixl.NixlTransport.push

    async def flipped(self: Any, sock: Any, head: PushHead, block_ids: Any, *rest: Any) -> None:
        prefill.pool[block_ids[-1] * LAYOUT.block_bytes + 77] ^= 0x10
        await real(self, sock, head, block_ids, *rest)

    prefill: Any = None
    monkeypatch.setattr(nixl.NixlTransport, "push", flipped)

    async def body() -> None:
        nonlocal prefill
        async with pair(by(), by()) as (prefill, decode):
            t = transfer(1, 20)
            t.open(prefill, decode)
            t.seal(prefill)
            failure = (await decode.told.wait("import_failed", t.key))[2]
            assert "checksum" in failure.message
            await decode.told.wait("released", t.key)
            await prefill.told.wait_any(("done", "export_failed"), t.key)
            monkeypatch.setattr(nixl.NixlTransport, "push", real)
            assert await hand_over(transfer(2, 20), prefill, decode) == "nixl"

    run(body())


class Liar:
    """A sender that speaks the protocol and offers a region of its choice."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.agent = Agent("liar", nixl._address(prefill.memory.view), prefill.memory.view.nbytes)
        self.prefill, self.decode = prefill, decode

    async def welcomed(self, region: Region, to: str = "") -> tuple[Any, frames.Reply]:
        sock = await tcp.connect(self.decode.address)
        target = to or self.decode.epoch
        hello = frames.encode_hello("liar", "liar", target, LAYOUT, "nixl", region)
        await tcp.send_all(sock, hello)
        try:
            return sock, frames.parse_reply(await tcp.receive_message(sock))
        except tcp.ConnectionEnded:
            sock.close()
            raise

    def region(self, **changed: Any) -> Region:
        view = self.prefill.memory.view
        told = {"agent": self.agent.metadata, "address": nixl._address(view), "size": view.nbytes}
        return Region(**{**told, **changed})


def test_regions_that_are_none(run: Run) -> None:
    async def body() -> None:
        async with pair(by(), by("auto")) as (prefill, decode):
            liar = Liar(prefill, decode)
            for size in (0, LAYOUT.block_bytes + 1, 1 << 63):
                with pytest.raises(tcp.ConnectionEnded):
                    await liar.welcomed(liar.region(size=size))
            # What NIXL can't use leaves tcp.
            for agent in (b"", b"nonsense", liar.agent.metadata[: len(liar.agent.metadata) // 2]):
                sock, reply = await liar.welcomed(liar.region(agent=agent))
                assert reply == frames.Welcome(decode.epoch, "tcp")
                sock.close()
            sock, reply = await liar.welcomed(liar.region(), to="somebody else")
            assert isinstance(reply, frames.Refusal)
            sock.close()
            liar.agent.close()
            assert await hand_over(transfer(2, 20), prefill, decode) == "nixl"

    run(body())


@pytest.mark.parametrize("what", ["memory of others", "no such block", "too few blocks"])
def test_pushes_from_where_no_pool_is(run: Run, what: str) -> None:
    async def body() -> None:
        async with pair(by(), by()) as (prefill, decode):
            liar = Liar(prefill, decode)
            key, size = (1, 1), LAYOUT.block_bytes
            now = time.monotonic()
            grant = decode.plane.open_import(key, "r", 1, (3, 4), 0, (0,), now, token_count=8)
            others = bytearray(prefill.memory.view.nbytes)
            address = nixl._address(memoryview(others))
            region = liar.region(address=address) if what == "memory of others" else liar.region()
            sock, reply = await liar.welcomed(region)
            assert reply == frames.Welcome(decode.epoch, "nixl")
            blocks = {"no such block": (1, 1 << 20), "too few blocks": (1,)}.get(what, (1, 2))
            head = PushHead(grant, TransferId("r", 1), KvRange(0, 6, 0, 2), 2 * size, 0)
            await tcp.send_all(sock, frames.encode_push(head, blocks))
            failure = (await decode.told.wait("import_failed", key))[2]
            assert "ended within a frame" in failure.message
            await decode.told.wait("released", key)
            assert not any(decode.pool)
            sock.close()
            liar.agent.close()
            assert await hand_over(transfer(2, 20), prefill, decode) == "nixl"

    run(body())


# ---- nothing is given away that may still be written to ------------------------------------


class Held:
    """Reads that don't end before they are let go, or ever; what NIXL says is kept back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = asyncio.Event()
        self.hold = True
        self.fail = False
        self.closing = threading.Event()
        self.may_close = threading.Event()
        self.may_close.set()
        begin, done, close = Agent.begin, Agent.done, Agent.close

        def begun(agent: Agent, *what: Any) -> int:
            self.begun.set()
            return begin(agent, *what)

        def ended(agent: Agent, read: int) -> bool | None:
            if self.fail:
                return False
            return None if self.hold else done(agent, read)

        def closed(agent: Agent) -> None:
            self.closing.set()
            assert self.may_close.wait(WAIT_S)
            close(agent)

        monkeypatch.setattr(Agent, "begin", begun)
        monkeypatch.setattr(Agent, "done", ended)
        monkeypatch.setattr(Agent, "close", closed)


def test_a_cancel_within_a_read_quarantines_until_it_is_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        held = Held(monkeypatch)
        async with pair(by(), by()) as (prefill, decode):
            t = transfer(1, 41)
            t.open(prefill, decode)
            t.seal(prefill)
            await held.begun.wait()
            assert decode.plane.cancel_import(t.key)
            for _ in range(50):
                await asyncio.sleep(0)
            assert decode.told.names(t.key) == ["quarantined"]
            held.hold = False
            await decode.told.wait("released", t.key)
            await prefill.told.wait_any(("done", "export_failed"), t.key)
            assert await hand_over(transfer(2, 41), prefill, decode) == "nixl"
            assert not held.closing.is_set()  # a read that ended well ends no agent

    run(body())


@pytest.mark.parametrize("how", ["never ends", "fails"])
def test_a_read_that_is_not_known_to_be_over_ends_its_agent_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(agents, "_DRAIN_S", 0.1)
    monkeypatch.setattr(agents, "_OTHERS_S", 0.1)

    async def body() -> None:
        held = Held(monkeypatch)
        held.may_close.clear()
        held.fail = how == "fails"
        settings = by(imports=ImportLimits(payload_s=0.2), tick_s=0.02)
        async with pair(by(), settings) as (prefill, decode):
            t = transfer(1, 41)
            t.open(prefill, decode)
            t.seal(prefill)
            await asyncio.to_thread(held.closing.wait, WAIT_S)
            names = decode.told.names(t.key)
            assert "released" not in names
            # Another reader serves meanwhile.
            held.hold = held.fail = False
            assert await hand_over(transfer(2, 41), prefill, decode) == "nixl"
            if how == "never ends":
                assert decode.told.names(t.key) == ["quarantined", "import_failed"]
            assert "released" not in decode.told.names(t.key)
            held.may_close.set()
            await decode.told.wait("released", t.key)
            await prefill.told.wait_any(("done", "export_failed"), t.key)

    run(body())


def test_the_push_of_another_sender_goes_on_beside_a_failed_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, done = Agent.begin, Agent.done
    failed: set[tuple[int, int]] = set()

    def begun(agent: Agent, peer: str, spans: Any) -> int:
        read = begin(agent, peer, spans)
        if peer == "prefill-epoch-1":
            failed.add((id(agent), read))
        return read

    def fails(agent: Agent, read: int) -> bool | None:
        return False if (id(agent), read) in failed else done(agent, read)

    async def body() -> None:
        async with pair(by(), by(), layout=BIG, blocks=160) as (prefill, decode):
            other = await worker("prefill-2", layout=BIG, blocks=160, settings=by(), seed=2)
            first = transfer(1, 200, layout=BIG, at=0, pool=20)
            second = transfer(2, 2200, layout=BIG, at=20, pool=160)
            await hand_over(transfer(3, 20, layout=BIG, at=0, pool=20), other, decode)
            monkeypatch.setattr(Agent, "begin", begun)
            monkeypatch.setattr(Agent, "done", fails)
            first.open(prefill, decode)
            first.seal(prefill)
            second.open(other, decode)
            second.seal(other)
            assert "ended within" in (await decode.told.wait("import_failed", first.key))[2].message
            await decode.told.wait("committed", second.key)
            second.check_bytes(other, decode)
            await decode.told.wait("released", first.key)
            await prefill.told.wait_any(("done", "export_failed"), first.key)
            await other.plane.close()

    run(body())


def test_an_agent_that_fails_has_no_reads() -> None:
    pool = memoryview(bytearray(1 << 16))
    agent = Agent("lonely", nixl._address(pool), len(pool))
    with pytest.raises(AgentError, match="can't read from nobody"):
        agent.begin("nobody", [(nixl._address(pool), 1, 8)])
    with pytest.raises(AgentError, match="describes no NIXL agent"):
        agent.meet(b"nonsense")
    agent.close()


# ---- senders that die, stop, and come again -------------------------------------------------

_PREFILL = """
import asyncio, sys
from tests.pd_engine.kv_rig import epoch, hand_over, worker
from tests.pd_engine.test_kv_nixl import BIG, by
from pd_proto.v1 import engine_pb2 as pb

async def main():
    grant, epoch, address = bytes.fromhex(sys.argv[1]), sys.argv[2], sys.argv[3]
    made = await worker("p", layout=BIG, settings=by(), seed=1, epoch=grant.hex())
    target = pb.KvTarget(worker="decode", epoch=epoch, kv_address=address, grant=grant)
    made.plane.open_export((1, 1), "r", 1, target, tuple(range(40)), 640, 30)
    made.plane.export_progress((1, 1), 320)
    await made.told.wait_any(("export_failed", "done"), (1, 1))
    print("over", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def sender(root: Path, decode: Worker, key: tuple[int, int]) -> "subprocess.Popen[str]":
    blocks, now = tuple(range(40)), time.monotonic()
    grant = decode.plane.open_import(key, "r", 1, blocks, 0, (0,), now, token_count=640)
    command = [sys.executable, "-c", _PREFILL, grant.hex(), decode.epoch, decode.address]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


def one_thread() -> None:
    """For the loop's calls that block, so that the rest can be counted."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


def holdings() -> tuple[int, int]:
    """Descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


async def no_more_than(before: tuple[int, int]) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(now > then for now, then in zip(holdings(), before, strict=True)):
            await asyncio.sleep(0.01)


def test_nothing_is_left_of_a_sender_that_was_killed(run: Run, root: Path) -> None:
    async def body() -> None:
        one_thread()
        files = set(os.listdir("/dev/shm"))
        decode = await worker("decode", layout=BIG, settings=by(), epoch=epoch())
        before = (0, 0)
        for number in range(3):
            key = (1, number)
            killed = sender(root, decode, key)
            try:
                while not any(decode.block(19)[-64:]):
                    await asyncio.sleep(0.01)
            finally:
                killed.kill()
                killed.communicate()
            await decode.told.wait("import_failed", key)
            await decode.told.wait("released", key)
            async with asyncio.timeout(WAIT_S):
                while decode.plane.connections:
                    await asyncio.sleep(0.01)
            decode.pool[:] = bytes(len(decode.pool))
            if number == 0:
                before = holdings()  # the first agent's are there to stay
        await no_more_than(before)
        await decode.plane.close()
        assert set(os.listdir("/dev/shm")) <= files

    run(body(), PROCESSES_S)


def test_a_sender_that_stops_within_a_read(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over UCX's tcp, where a read needs the other process: nothing answers, until it wakes up
    and finds the blocks in other hands."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(agents, "_DRAIN_S", 0.1)
    monkeypatch.setattr(agents, "_OTHERS_S", 0.1)
    begin = Agent.begin
    stopped: list[Any] = []

    def stops(agent: Agent, *what: Any) -> int:
        while stopped:
            stopped.pop().send_signal(signal.SIGSTOP)
        return begin(agent, *what)

    monkeypatch.setattr(Agent, "begin", stops)

    async def body() -> None:
        settings = by(imports=ImportLimits(payload_s=0.5), tick_s=0.02)
        decode = await worker("decode", layout=BIG, settings=settings, epoch=epoch())
        process = sender(root, decode, (1, 1))
        stopped.append(process)
        try:
            while stopped:
                await asyncio.sleep(0.01)
            failure = (await decode.told.wait("import_failed", (1, 1)))[2]
            assert "the payload didn't come in time" in failure.message
            await decode.told.wait("released", (1, 1))
            mark = b"\xaa" * len(decode.pool)
            decode.pool[:] = mark
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "over\n"
            assert bytes(decode.pool) == mark
        finally:
            process.kill()
            process.communicate()
        await decode.plane.close()

    run(body(), PROCESSES_S)


def test_senders_that_come_and_go_leave_nothing(run: Run) -> None:
    async def body() -> None:
        one_thread()
        decode = await worker("decode", settings=by())
        before = (0, 0)
        for number in range(8):
            prefill = await worker(f"p{number}", settings=by(), seed=1, epoch=epoch())
            assert await hand_over(transfer(number, 41), prefill, decode) == "nixl"
            await prefill.plane.close()
            async with asyncio.timeout(WAIT_S):
                while decode.plane.connections:
                    await asyncio.sleep(0.01)
            if number == 1:
                before = holdings()
        await no_more_than(before)
        await decode.plane.close()

    run(body())
