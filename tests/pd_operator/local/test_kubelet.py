"""The small kubelet over real processes: StatefulSets and Deployments as pods, restarts with
back-off, probes, grace periods, init containers, volumes, names, and that nothing is left.
"""

import asyncio
import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from pd_operator.local.container import HOPELESS, Backoff, Publication
from pd_operator.local.network import ClientPort
from pd_operator.observed import Ref, pod_view
from pd_operator.podparts import Manifest
from tests.pd_operator.local.rig import (
    FAKE,
    WEB,
    Rig,
    container,
    kubelet,
    probe,
    service,
    workload,
)

pytestmark = pytest.mark.slow


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def hosts(rig: Rig) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(rig.kubelet.hosts_file.read_text())
    return found


def test_a_stateful_sets_pods(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(service())
            rig.kubelet.apply(workload(replicas=2))
            await rig.until(lambda: rig.ready("web-0", "web-1"))
            first, second = rig.pod("web-0"), rig.pod("web-1")
            assert first.ip != second.ip
            assert first.ip.startswith("127.")
            assert hosts(rig) == {"web": [first.ip, second.ip]}
            [view] = [p for p in rig.kubelet.objects() if p["metadata"]["name"] == "web-0"]
            assert view["status"]["phase"] == "Running"
            assert view["metadata"]["labels"] == {"app": "web"}

            rig.kubelet.scale(WEB, 1)
            await rig.until(lambda: rig.names() == ["web-0"])
            await rig.until(lambda: hosts(rig) == {"web": [first.ip]})
            assert rig.ready("web-0")

            rig.kubelet.scale(WEB, 2)
            await rig.until(lambda: rig.ready("web-0", "web-1"))
            assert rig.pod("web-1").ip not in (first.ip, second.ip)

            rig.kubelet.delete(WEB)
            await rig.until(lambda: not rig.names())
            await rig.until(lambda: hosts(rig) == {"web": []})

    run(scenario())


def threads(rig: Rig, pod: str) -> str:
    pid = rig.pod(pod).pid
    assert pid is not None
    return psutil.Process(pid).environ()["OMP_NUM_THREADS"]


def test_workers_share_the_cores_unless_told_otherwise(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(replicas=2))
            own = container(env={"OMP_NUM_THREADS": "7"})
            rig.kubelet.apply(workload(name="other", containers=[own]))
            await rig.until(lambda: rig.ready("web-0", "web-1", "other-0"))
            assert threads(rig, "web-0") == threads(rig, "web-1") == "2"
            assert threads(rig, "other-0") == "7"

    run(scenario())


def test_only_ready_pods_have_a_name_unless_all_are_to(run, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(service("all"))
            rig.kubelet.apply(service("ready", everyone=False))
            env = {"FAKE_UNREADY_UNLESS": str(flag)}
            rig.kubelet.apply(workload(containers=[container(env=env)]))
            await rig.until(lambda: rig.names() and rig.pod("web-0").pid)
            await rig.until(lambda: hosts(rig)["all"])
            assert hosts(rig)["ready"] == []
            flag.touch()
            await rig.until(lambda: rig.ready("web-0"))
            await rig.until(lambda: hosts(rig)["ready"] == [rig.pod("web-0").ip])

    run(scenario())


def test_a_crash_is_restarted_with_its_last_words(run, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            env = {"FAKE_EXIT_UNLESS": str(flag)}
            rig.kubelet.apply(workload(containers=[container(env=env)]))
            await rig.until(lambda: rig.names() and rig.container("web-0")["restartCount"] >= 2)
            crashed = await rig.until(
                lambda: rig.container("web-0")["state"].get("waiting") and rig.container("web-0")
            )
            assert crashed["state"]["waiting"]["reason"] == "CrashLoopBackOff"
            ended = crashed["lastState"]["terminated"]
            assert (ended["exitCode"], ended["message"]) == (3, "waits for flag")
            assert any("exit code 3: waits for flag" in text for text in rig.said)
            flag.touch()
            await rig.until(lambda: rig.ready("web-0"))

    run(scenario())


def refused(unless: str = "") -> dict[str, str]:
    said = {"FAKE_EXIT_UNLESS": unless} if unless else {"FAKE_EXIT": "no such model"}
    return said | {"FAKE_EXIT_CODE": str(HOPELESS)}


def test_what_no_restart_helps_is_restarted_unless_told_otherwise(run, tmp_path: Path) -> None:
    async def restarted() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(containers=[container(env=refused())]))
            await rig.until(lambda: rig.names() and rig.container("web-0")["restartCount"] >= 2)
            assert rig.pod("web-0").given_up == ""

    async def given_up() -> None:
        async with kubelet(tmp_path, gives_up=True) as rig:
            rig.kubelet.apply(workload(containers=[container(env=refused())]))
            said = await rig.until(lambda: rig.names() and rig.pod("web-0").given_up)
            assert said == "no such model"
            assert rig.container("web-0")["restartCount"] == 0
            assert not any("starting again" in text for text in rig.said)

    async def others_go_on() -> None:
        flag = tmp_path / "flag"
        async with kubelet(tmp_path, gives_up=True) as rig:
            env = {"FAKE_EXIT_UNLESS": str(flag)}  # exit code 3
            rig.kubelet.apply(workload(containers=[container(env=env)]))
            await rig.until(lambda: rig.names() and rig.container("web-0")["restartCount"] >= 1)
            flag.touch()
            await rig.until(lambda: rig.ready("web-0"))

    async def was_ready_once() -> None:
        flag = tmp_path / "there"
        flag.touch()
        async with kubelet(tmp_path, gives_up=True) as rig:
            rig.kubelet.apply(workload(containers=[container(env=refused(str(flag)))]))
            await rig.until(lambda: rig.ready("web-0"))
            flag.unlink()
            os.kill(rig.pid("web-0"), signal.SIGKILL)
            await rig.until(lambda: rig.container("web-0")["restartCount"] >= 2)
            assert rig.pod("web-0").given_up == ""

    for scenario in (restarted, given_up, others_go_on, was_ready_once):
        run(scenario())


def test_an_init_container_gives_up_too(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path, gives_up=True) as rig:
            rig.kubelet.apply(with_model(env=refused()))
            said = await rig.until(lambda: rig.names() and rig.pod("web-0").given_up)
            assert said == "no such model"
            assert not rig.pod("web-0").ready

    run(scenario())


def test_a_killed_pod_comes_back_under_its_name_and_address(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload())
            await rig.until(lambda: rig.ready("web-0"))
            pid, address = rig.pid("web-0"), rig.pod("web-0").ip
            os.kill(pid, signal.SIGKILL)
            await rig.until(lambda: rig.ready("web-0") and rig.pid("web-0") != pid)
            found = rig.container("web-0")
            assert found["restartCount"] == 1
            assert found["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
            assert rig.pod("web-0").ip == address

    run(scenario())


def test_backoff_doubles_to_a_bound() -> None:
    backoff = Backoff(first_s=0.5, last_s=30)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4, 8, 100)] == [0.5, 1, 2, 4, 30, 30]


def test_a_stopped_process_fails_liveness_and_is_replaced(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            liveness = probe("/livez", failureThreshold=3, terminationGracePeriodSeconds=0.2)
            startup = probe("/livez", failureThreshold=300)
            made = container(startupProbe=startup, livenessProbe=liveness)
            rig.kubelet.apply(workload(containers=[made]))
            await rig.until(lambda: rig.ready("web-0"))
            pid = rig.pid("web-0")
            os.kill(pid, signal.SIGSTOP)
            await rig.until(lambda: rig.ready("web-0") and rig.pid("web-0") != pid)
            ended = rig.container("web-0")["lastState"]["terminated"]
            assert ended["exitCode"] == 128 + signal.SIGKILL
            assert ended["message"] == "liveness probe failed: no answer within 0.5 s"

    run(scenario())


def test_readiness_goes_and_comes_without_a_restart(run, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            env = {"FAKE_UNREADY_UNLESS": str(flag)}
            rig.kubelet.apply(workload(containers=[container(env=env)]))
            await rig.until(lambda: rig.ready("web-0"))
            flag.unlink()
            await rig.until(lambda: not rig.ready("web-0"))
            flag.touch()
            await rig.until(lambda: rig.ready("web-0"))
            assert rig.container("web-0")["restartCount"] == 0

    run(scenario())


def test_a_start_that_takes_too_long_is_ended(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            startup = probe("/readyz", failureThreshold=3, terminationGracePeriodSeconds=0.1)
            env = {"FAKE_DEAF": "1"}
            rig.kubelet.apply(workload(containers=[container(startupProbe=startup, env=env)]))
            await rig.until(lambda: rig.names() and rig.container("web-0")["restartCount"])
            ended = rig.container("web-0")["lastState"]["terminated"]
            assert ended["message"].startswith("startup probe failed: ")

    run(scenario())


def test_sigterm_then_sigkill_after_the_grace_period(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            stubborn = container(env={"FAKE_IGNORE_TERM": "1"})
            rig.kubelet.apply(workload(containers=[stubborn], terminationGracePeriodSeconds=0.3))
            await rig.until(lambda: rig.ready("web-0"))
            pid = rig.pid("web-0")
            rig.kubelet.delete(WEB)
            await rig.until(lambda: rig.pod("web-0").terminating)
            await rig.until(lambda: not rig.names())
            assert not alive(pid)

    run(scenario())


def test_a_drain_has_the_time_it_takes(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(containers=[container(env={"FAKE_TERM_S": "0.5"})]))
            await rig.until(lambda: rig.ready("web-0"))
            log = Path(rig.pod("web-0").log)
            rig.kubelet.delete(WEB)
            await rig.until(lambda: not rig.names())
            assert "ended by SIGTERM" in log.read_text()

    run(scenario())


def test_the_prestop_pause_comes_before_sigterm(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            pause = {"preStop": {"sleep": {"seconds": 600}}}
            pod = workload(containers=[container(lifecycle=pause)])
            pod["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 900
            rig.kubelet.apply(pod)
            await rig.until(lambda: rig.ready("web-0"))
            rig.kubelet.delete(WEB)
            await rig.until(lambda: rig.pod("web-0").terminating)
            assert rig.pod("web-0").pid is not None
            rig.kubelet.hurry()
            await rig.until(lambda: not rig.names())

    run(scenario())


def test_what_a_process_started_goes_with_it(run, tmp_path: Path) -> None:
    note = tmp_path / "child"

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(containers=[container(env={"FAKE_CHILD": str(note)})]))
            await rig.until(lambda: rig.ready("web-0"))
            child, pid = int(note.read_text()), rig.pid("web-0")
            assert alive(child)
            os.kill(pid, signal.SIGKILL)
            await rig.until(lambda: rig.ready("web-0") and rig.pid("web-0") != pid)
            assert not alive(child)

    run(scenario())


def with_model(**fields: Any) -> Manifest:
    """A workload whose init container makes /models/a."""
    made = container(**fields) | {
        "name": "model",
        "command": ["python", FAKE, "convert"],
        "args": ["--out=/models/a"],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    return workload(initContainers=[made], volumes=[{"name": "models", "emptyDir": {}}])


def test_an_init_container_comes_first_and_reports(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        models = tmp_path / "shared"
        async with kubelet(tmp_path, shared={"models": models}) as rig:
            rig.kubelet.apply(with_model())
            await rig.until(lambda: rig.ready("web-0"))
            assert (models / "a").is_dir()
            assert '{"stage": "weights", "done": 1, "total": 2}' in rig.lines
            assert rig.container("web-0", "initContainerStatuses")["ready"]
            assert not [text for text in rig.said if "not ready" in text]

    run(scenario())


def test_a_failing_init_container_says_why_and_heals(run, tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(with_model(env={"FAKE_EXIT_UNLESS": str(flag)}))

            def problem() -> str:
                if not rig.names():
                    return ""
                found = pod_view(rig.pod("web-0").document()).problem
                return found.message if found else ""

            message = await rig.until(problem)
            assert message == "model ended with exit code 3: waits for flag"
            assert not rig.pod("web-0").ready
            flag.touch()
            await rig.until(lambda: rig.ready("web-0"))

    run(scenario())


def test_volumes(run, tmp_path: Path) -> None:
    """emptyDirs are the pod's own and go with it; in memory where that is asked for; a
    hostPath is what it names."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "model.gguf").touch()
    script = (
        "import os, pathlib, sys, time\n"
        "pathlib.Path(os.environ['TMPDIR'], 'note').write_text(' '.join(sys.argv[1:]))\n"
        "pathlib.Path(os.environ['SHM'], 'big').touch()\n"
        "time.sleep(600)\n"
    )
    made = {
        "name": "engine",
        "command": ["python", "-c", script],
        "args": ["--file=/source/model.gguf", "/tmp", "/tmpfile", "--x=/tmp/y"],
        "env": [{"name": "TMPDIR", "value": "/tmp"}, {"name": "SHM", "value": "/dev/shm"}],
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "source", "mountPath": "/source/model.gguf"},
        ],
    }
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "source", "hostPath": {"path": str(data / "model.gguf"), "type": "File"}},
    ]

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(containers=[made], volumes=volumes))
            folder = tmp_path / "state" / "pods" / "web-0" / "volumes" / "tmp"
            big = tmp_path / "memory" / "web-0" / "shm" / "big"
            await rig.until(big.exists)
            assert (folder / "note").read_text() == (
                f"--file={data}/model.gguf {folder} /tmpfile --x={folder}/y"
            )
            rig.kubelet.delete(WEB)
            await rig.until(lambda: not rig.names())
            assert not folder.exists()
            assert not big.exists()

    run(scenario())


@pytest.mark.parametrize(
    ("volume", "message"),
    [
        (
            {"hostPath": {"path": "/nowhere", "type": "Directory"}},
            "hostPath /nowhere is not a folder",
        ),
        (
            {"persistentVolumeClaim": {"claimName": "m"}},
            "volume source: persistentVolumeClaim can't be mounted on this machine",
        ),
    ],
)
def test_a_volume_that_cannot_be_had(run, tmp_path: Path, volume: Manifest, message: str) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            made = container(volumeMounts=[{"name": "source", "mountPath": "/source"}])
            volumes = [{"name": "source", **volume}]
            rig.kubelet.apply(workload(containers=[made], volumes=volumes))
            await rig.until(
                lambda: rig.names() and "terminated" in rig.container("web-0")["lastState"]
            )
            assert rig.container("web-0")["lastState"]["terminated"]["message"] == message

    run(scenario())


def test_a_program_that_is_not_there(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(containers=[container(command=["/no/such/program"])]))
            await rig.until(
                lambda: rig.names() and "terminated" in rig.container("web-0")["lastState"]
            )
            message = rig.container("web-0")["lastState"]["terminated"]["message"]
            assert message.startswith("/no/such/program: ")

    run(scenario())


def test_a_deployment_replaces_its_pods_without_a_gap(run, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload("Deployment", replicas=2))
            await rig.until(lambda: len([pod for pod in rig.kubelet.pods if pod.ready]) == 2)
            before = set(rig.names())
            changed = workload("Deployment", replicas=2, containers=[container(env={"A": "1"})])
            rig.kubelet.apply(changed)

            def serving() -> int:
                return len([p for p in rig.kubelet.pods if p.ready and not p.terminating])

            def replaced() -> bool:
                assert serving() >= 2
                return not before & set(rig.names())

            await rig.until(replaced)
            assert serving() == 2
            rig.kubelet.scale(Ref("Deployment", "web"), 1)
            await rig.until(lambda: len(rig.names()) == 1)

    run(scenario())


def test_a_published_port_is_where_clients_expect_it(run, tmp_path: Path) -> None:
    with closing(ClientPort(0)) as port:
        where = ("127.0.0.1", port.port)
        publication = Publication("router", "http", where, "BIND", ("--reuse-port",))
        router = container(env={"BIND": "$(POD_IP):8000"}) | {
            "name": "router",
            "command": ["python", FAKE, "router"],
            "args": ["--http=$(BIND)", "--admin=$(POD_IP):9090"],
            "ports": [
                {"name": "http", "containerPort": 8000},
                {"name": "health", "containerPort": 9090},
            ],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        }

        async def scenario() -> None:
            async with kubelet(tmp_path, publications=(publication,)) as rig:
                rig.kubelet.apply(workload("Deployment", replicas=2, containers=[router]))
                await rig.until(lambda: len([p for p in rig.kubelet.pods if p.ready]) == 2)
                connections = [
                    found.laddr
                    for pod in rig.kubelet.pods
                    for found in psutil.Process(pod.pid).net_connections("tcp")
                    if found.status == psutil.CONN_LISTEN
                ]
                assert connections.count(where) == 2

        run(scenario())


def test_closing_ends_everything_at_once(run, tmp_path: Path) -> None:
    async def scenario() -> tuple[list[int], float]:
        async with kubelet(tmp_path) as rig:
            stubborn = container(env={"FAKE_IGNORE_TERM": "1"})
            rig.kubelet.apply(workload(replicas=3, containers=[stubborn]))
            await rig.until(lambda: rig.ready("web-0", "web-1", "web-2"))
            pids = [rig.pid(name) for name in rig.names()]
            loop = asyncio.get_running_loop()
            began = loop.time()
            await rig.kubelet.close(grace_s=0.5)
            assert not rig.names()
            return pids, loop.time() - began

    pids, took_s = run(scenario())
    assert not any(alive(pid) for pid in pids)
    assert took_s < 3
