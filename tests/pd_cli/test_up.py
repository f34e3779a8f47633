"""`pdcluster up` over fake containers: ready, status, edits good and bad, every way to end
it, and that none leaves a process, a port or a file in shared memory.
"""

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import CliRunner

from pd_cli import session
from pd_cli import up as up_command
from pd_operator.local.cluster import Options
from tests.pd_cli.up_rig import Up, alive, engine_env, pdcluster, refused, up
from tests.pd_operator.objects import document
from tests.ports import free_port

pytestmark = pytest.mark.slow


def assert_nothing_left(of: Up, pids: list[int]) -> None:
    assert not [pid for pid in pids if alive(pid)]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", of.port)) != 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("pdcluster-chat-")]
    left = sorted(entry.name for entry in (of.folder / "pdcluster" / "chat").iterdir())
    assert left == ["lock", "logs"]


def pods(of: Up, pool: str) -> list[dict[str, object]]:
    return [pod for pod in of.state()["pods"] if pod["pool"] == pool]


def serving(of: Up, pool: str) -> list[str]:
    return [str(pod["name"]) for pod in pods(of, pool) if pod["ready"] and not pod["terminating"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ready_then_a_signal(run, tmp_path: Path, number: signal.Signals) -> None:
    async def scenario() -> None:
        async with up(tmp_path, **{"spec.decode.replicas": 2}) as running:
            await running.ready()
            pids = await running.until(lambda: len(running.pids()) == 4 and running.pids())
            assert await running.stop(number) == 0
            assert_nothing_left(running, pids)
            assert running.printed.count("model: weights") == 1
            assert [line for line in running.printed if line.startswith("ready: ")] == [
                f"ready: http://127.0.0.1:{running.port}/v1"
            ]

    run(scenario())


def test_status_logs_and_down(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path, **{"metadata.namespace": "apps"}) as running:
            await running.ready()
            await running.until(lambda: serving(running, "router"))
            code, said = await pdcluster(tmp_path, "status")
            assert code == 0
            header, row = said.splitlines()
            assert header.split() == [
                "NAME", "READY", "PREFILL", "DECODE", "TTFT", "TPOT", "MODEL", "AGE",
            ]  # fmt: skip
            assert row.split()[:7] == ["chat", "True", "1/1", "1/1", "-", "-", "smollm2"]

            _, said = await pdcluster(tmp_path, "status", "-o", "json")
            found = json.loads(said)
            [cluster] = found["clusters"]
            assert cluster["url"] == f"http://127.0.0.1:{running.port}/v1"
            [router] = [pod for pod in found["pods"] if pod["pool"] == "router"]
            assert cluster["live_page"] == f"http://{router['ip']}:9090/"
            await running.line(f"^live page: {cluster['live_page']}$")
            assert cluster["document"]["metadata"]["generation"] == 1
            assert {pod["pool"] for pod in found["pods"]} == {"prefill", "decode", "router"}
            for pod in found["pods"]:
                assert pod["cluster"] == "chat"
                assert alive(pod["pid"])
                assert pod["ready"]
                assert pod["restarts"] == 0
                assert Path(pod["log"]).read_text() == "serving\n"
                address = pod["admin"] if pod["pool"] == "router" else pod["health"]
                assert address == f"http://{pod['ip']}:9090"

            _, said = await pdcluster(tmp_path, "status", "chat")
            assert "DecodeReady" in said
            assert f"live page: {cluster['live_page']}" in said
            _, said = await pdcluster(tmp_path, "logs", "chat-d-")
            assert said == "serving\n"
            _, said = await pdcluster(tmp_path, "logs", "chat-", "-o", "json")
            logs = {
                one["pod"].rpartition(".")[0] or one["pod"]: one for one in json.loads(said)["logs"]
            }
            assert len(logs) == 3
            assert all(one["text"] == Path(one["log"]).read_text() for one in logs.values())
            _, said = await pdcluster(tmp_path, "down", "chat", "-o", "json")
            assert json.loads(said) == {"ended": ["chat"]}
            assert await running.ended() == 0
            assert await pdcluster(tmp_path, "status") == (0, "no PDCluster is running\n")
            assert await pdcluster(tmp_path, "down") == (0, "no PDCluster is running\n")
            assert (await pdcluster(tmp_path, "down", "chat"))[0] == 1
            assert (await pdcluster(tmp_path, "status", "chat"))[0] == 1

    run(scenario())


def test_a_second_up_of_the_name_or_the_port_is_refused(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            code, said = await refused(tmp_path, free_port())
            assert (code, said.splitlines()[0]) == (
                1,
                f'PDCluster "chat" is running already (pid {running.process.pid}); edit its '
                "file, if it has one, or end it with: pdcluster down chat",
            )
            (tmp_path / "other.yaml").write_text(
                yaml.safe_dump(document(**{"metadata.name": "other"}))
            )
            code, said = await refused(tmp_path, running.port, "other.yaml")
            assert (code, said) == (
                1,
                f"port {running.port} is used by another PDCluster; choose another with --port\n",
            )

    run(scenario())


def test_a_port_of_another_program_is_refused(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "chat.yaml").write_text(yaml.safe_dump(document()))
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            code, said = await refused(tmp_path, other.getsockname()[1])
        assert code == 1
        assert "is used by another program; choose another with --port" in said

    run(scenario())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec: [", "chat.yaml:1:8: expected the node content"),
        ("kind: Pod\napiVersion: v1\n", "chat.yaml: kind: is"),
    ],
)
def test_a_bad_file_is_exit_code_2(run, tmp_path: Path, text: str, message: str) -> None:
    async def scenario() -> None:
        (tmp_path / "chat.yaml").write_text(text)
        code, said = await refused(tmp_path, 0)
        assert code == 2
        assert message in said

    run(scenario())


def test_edits_take_effect(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            [old] = await running.until(lambda: serving(running, "decode"))
            running.write(document(**{"spec.decode.replicas": 2}))
            await running.until(lambda: len(serving(running, "decode")) == 2)
            await running.line(r"chat.yaml: in effect$")
            assert old in serving(running, "decode")

            changed = {"spec.decode": {"replicas": 2, "engine": {"maxRunning": 8}}}
            running.write(document(**changed))

            def rolled() -> bool:
                now = [str(pod["name"]) for pod in pods(running, "decode")]
                assert len(serving(running, "decode")) >= 1
                return len(now) == 2 and old not in now and serving(running, "decode") == now

            await running.until(rolled)
            assert await running.stop() == 0

    run(scenario())


def test_a_broken_edit_leaves_what_runs(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            before = running.pids()
            running.write("spec: [")
            await running.line(r"chat\.yaml:1:8: ")
            running.write(document(**{"spec.decode.replicas": -1}))
            await running.line(r"chat\.yaml: spec\.decode\.replicas: is -1; write a whole number")
            running.write(document(**{"spec.model.name": "b", "metadata.name": "other"}))
            await running.line(r"metadata\.name: changed from \"chat\" to \"other\"")
            running.file.unlink()
            await running.line(r"chat\.yaml: No such file")
            while "isn't applied: " not in (await pdcluster(tmp_path, "status", "chat"))[1]:
                assert running.process.returncode is None
            refusals = [line for line in running.printed if line.endswith("stays as it is")]
            await running.until(lambda: len(refusals) == 4 or running.printed[-1] in refusals)
            assert running.pids() == before

            running.write(document(**{"spec.decode.replicas": 2}))
            await running.until(lambda: len(serving(running, "decode")) == 2)
            assert "isn't applied" not in (await pdcluster(tmp_path, "status", "chat"))[1]
            assert await running.stop() == 0

    run(scenario())


def test_a_broken_engine_setting_leaves_the_old_revision_serving(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            [old] = await running.until(lambda: serving(running, "decode"))
            template = engine_env(FAKE_EXIT="no such attention")
            running.write(document(**{"spec.decode.template": template}))
            await running.line("exit code 3: no such attention; starting again in 1 s")
            assert serving(running, "decode") == [old]
            # The status follows what is printed; the test's own deadline bounds the wait.
            while "no such attention" not in (await pdcluster(tmp_path, "status", "chat"))[1]:
                assert running.process.returncode is None

            running.write(document())
            await running.until(lambda: [pod["name"] for pod in pods(running, "decode")] == [old])
            assert await running.stop() == 0

    run(scenario())


def test_a_killed_and_a_stopped_worker_come_back(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            for number in (signal.SIGKILL, signal.SIGSTOP):
                [before] = await running.until(
                    lambda: serving(running, "decode") and pods(running, "decode")
                )
                os.kill(int(str(before["pid"])), number)

                def back(before: dict[str, object] = before) -> bool:
                    [now] = pods(running, "decode")
                    return bool(now["ready"]) and now["pid"] not in (None, before["pid"])

                await running.until(back)
                assert pods(running, "decode")[0]["ip"] == before["ip"]
            assert await running.stop() == 0

    run(scenario())


def test_kill_9_takes_the_children_along_and_the_next_up_is_none_the_worse(
    run, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            pids = await running.until(lambda: len(running.pids()) == 3 and running.pids())
            running.process.kill()
            assert await running.ended() == -signal.SIGKILL
            await running.until(lambda: not [pid for pid in pids if alive(pid)])
            assert await pdcluster(tmp_path, "status") == (0, "no PDCluster is running\n")
        async with up(tmp_path) as again:
            await again.ready()
            pids = again.pids()
            assert await again.stop() == 0
            assert_nothing_left(again, pids)

    run(scenario())


def test_a_second_ctrl_c_ends_it_at_once(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        stubborn = engine_env(FAKE_IGNORE_TERM="1")
        async with up(tmp_path, **{"spec.decode.template": stubborn}) as running:
            await running.ready()
            pids = running.pids()
            loop = asyncio.get_running_loop()
            running.process.send_signal(signal.SIGINT)
            await running.line("^stopping")
            began = loop.time()
            assert await running.stop() == 0
            assert loop.time() - began < 3
            assert_nothing_left(running, pids)

    run(scenario())


def test_ctrl_c_is_bounded(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        stubborn = engine_env(FAKE_IGNORE_TERM="1")
        async with up(tmp_path, **{"spec.decode.template": stubborn}) as running:
            await running.ready()
            pids = running.pids()
            assert await running.stop() == 0
            assert_nothing_left(running, pids)

    run(scenario(), 60)


def test_ctrl_c_before_it_is_ready(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        waiting = engine_env(FAKE_UNREADY_UNLESS=str(tmp_path / "never"))
        async with up(tmp_path, **{"spec.decode.template": waiting}) as running:
            await running.line(r"chat-d-.*: starting")
            assert await running.stop() == 0
            assert not [line for line in running.printed if line.startswith("ready")]
            assert_nothing_left(running, [])

    run(scenario())


def test_routers_are_replaced_without_a_gap(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            env = [{"name": "A", "value": "1"}]
            template = {"spec": {"containers": [{"name": "router", "env": env}]}}
            [before] = await running.until(lambda: serving(running, "router"))
            running.write(document(**{"spec.router.template": template}))
            while before in serving(running, "router"):
                await connects(running.port)
            await connects(running.port)
            assert await running.stop() == 0

    run(scenario())


def test_the_live_page_can_be_switched_off(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            await running.until(lambda: running.state()["live_page"])
            running.write(document(**{"spec.router.livePage": False}))
            await running.until(lambda: running.state()["live_page"] == "")
            assert await running.stop() == 0

    run(scenario())
    asked: list[Options] = []
    monkeypatch.setattr(session, "run", lambda _, options: asked.append(options) or 0)
    for flags in ([], ["--no-live-page"]):
        CliRunner().invoke(up_command.command, ["-f", "chat.yaml", *flags])
    assert [options.settings.live_page for options in asked] == [True, False]


async def connects(port: int) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    await writer.wait_closed()


def test_children_have_nothing_of_the_terminal(run, tmp_path: Path) -> None:
    """Ctrl-C in a terminal goes to the foreground group: only `up` may be in it."""

    async def scenario() -> None:
        async with up(tmp_path) as running:
            await running.ready()
            groups = {os.getpgid(pid) for pid in running.pids()}
            assert os.getpgid(running.process.pid) not in groups
            assert all(psutil.Process(pid).terminal() is None for pid in running.pids())
            assert await running.stop() == 0

    run(scenario())
