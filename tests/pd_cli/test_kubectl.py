"""Covers pd_cli.kubectl, `kubectl pd …`: what it asks of kubectl and makes of the answers.

kubectl is played by a small program on the PATH that answers as it does.
"""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pd_cli.kubectl import complete
from pd_operator import web
from tests.documents import ROOT
from tests.pd_cli.test_explain import lines
from tests.pd_cli.test_requests import entry as known_request
from tests.pd_cli.test_top import state

_PLAYED = """#!{python}
import json, os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(folder, "asked"), "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
words = [word for word in sys.argv[1:] if not word.startswith("--")]
answers = json.load(open(os.path.join(folder, "answers")))
if words[0] == "port-forward":
    print("Forwarding from 127.0.0.1:%s -> 9090" % answers["port"], flush=True)
    time.sleep(60)
key = " ".join(words[:2])
if key not in answers:
    print("Error from server (NotFound): " + key, file=sys.stderr)
    sys.exit(1)
found = answers[key]
print(found if isinstance(found, str) else json.dumps(found))
"""
CONDITION = {"type": "Ready", "status": "False", "reason": "Waiting", "message": "1/2 workers"}


def pod(name: str, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    metadata = {"name": name, "namespace": "system"}
    return {"metadata": metadata, "status": {"conditions": conditions}}


class Played:
    """A kubectl that gives these answers, by its first two words."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "kubectl"
        program.write_text(_PLAYED.replace("{python}", sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self.answers: dict[str, Any] = {}

    def pd(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        with self.started(*arguments) as process:
            out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    @contextmanager
    def started(self, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        (self._folder / "answers").write_text(json.dumps(self.answers))
        process = subprocess.Popen(
            [sys.executable, "-c", "from pd_cli.kubectl import main; main()", *arguments],
            env=os.environ | {"PATH": f"{self._folder}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        with process:
            try:
                yield process
            finally:
                process.kill()

    @property
    def asked(self) -> list[str]:
        return (self._folder / "asked").read_text().splitlines()


@pytest.fixture
def kubectl(tmp_path: Path) -> Played:
    return Played(tmp_path)


@contextmanager
def router(document: dict[str, Any], path: str = "/debug/state") -> Iterator[int]:
    """A router's admin port on this machine."""
    ports: list[int] = []
    there, over = threading.Event(), threading.Event()

    async def serve() -> None:
        page = json.dumps(document).encode()
        async with web.serving({("127.0.0.1", 0): {path: lambda: web.Page(page)}}) as found:
            ports.extend(found)
            there.set()
            await asyncio.to_thread(over.wait, 60)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert there.wait(30)
        yield ports[0]
    finally:
        over.set()
        thread.join()


def test_status_of_all_is_kubectls(kubectl: Played) -> None:
    kubectl.answers = {"get pdclusters": "NAME   READY\nchat   True"}
    assert kubectl.pd("-n", "team", "status").stdout == "NAME   READY\nchat   True\n"
    assert kubectl.asked == ["--namespace=team get pdclusters"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "access"),
    [
        ("status -n team", "--namespace=team"),
        (
            "status --namespace=team --context c --kubeconfig f",
            "--namespace=team --context=c --kubeconfig=f",
        ),
        ("-n other --context c status -n team", "--namespace=other --context=c --namespace=team"),
    ],
)
def test_access_is_told_before_the_verb_and_after_it(
    arguments: str, access: str, kubectl: Played
) -> None:
    kubectl.answers = {"get pdclusters": "none"}
    done = kubectl.pd(*arguments.split())
    assert done.stdout == "none\n", done.stderr
    assert kubectl.asked == [f"{access} get pdclusters"]


@pytest.mark.slow
def test_status_of_one_says_what_is_wrong(kubectl: Played) -> None:
    kubectl.answers = {
        "get pdcluster": {"status": {"conditions": [CONDITION]}},
        "get pods": "the pods",
        "get events": "the events",
    }
    said = kubectl.pd("--context", "c", "status", "chat").stdout
    for words in ("Ready            False    Waiting", "1/2 workers", "the pods", "the events"):
        assert words in said
    assert all(line.startswith("--context=c get ") for line in kubectl.asked)


@pytest.mark.slow
def test_status_for_programs_is_kubernetes_objects(kubectl: Played) -> None:
    one, its_pod, event = {"status": {"conditions": [CONDITION]}}, pod("p-0"), {"reason": "Scaled"}
    kubectl.answers = {
        "get pdclusters": {"items": [one]},
        "get pdcluster": one,
        "get pods": {"items": [its_pod]},
        "get events": {"items": [event]},
    }
    assert json.loads(kubectl.pd("status", "-o", "json").stdout) == {"clusters": [one]}
    found = json.loads(kubectl.pd("status", "chat", "-n", "team", "-o", "json").stdout)
    assert found == {"clusters": [one], "pods": [its_pod], "events": [event]}
    assert "--namespace=team get pods -l pdcluster.dev/cluster=chat -o json" in kubectl.asked


@pytest.mark.slow
def test_open_tells_where(kubectl: Played) -> None:
    kubectl.answers = {"get pods": {"items": [pod("r-0")]}, "port": 4711}
    for arguments, said in (
        ((), "http://127.0.0.1:4711/ until"),
        (("-o", "json"), '"http://127.0'),
    ):
        with kubectl.started("open", "chat", *arguments) as process:
            assert process.stdout is not None
            line = process.stdout.readline() + ("" if not arguments else process.stdout.readline())
            assert said in line
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


COMPLETED = {
    ("st",): ("status\t", ":4"),
    ("status", "--out"): ("--output\t", ":4"),
    ("status", "--output", "j"): ("json\n", ":4"),
    ("validate", "--file", ""): ("", ":0"),
    (): ("explain\t", ":4"),
}


@pytest.mark.parametrize("words", COMPLETED)
def test_kubectl_is_told_what_may_follow(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kubectl_complete-pd", *words])
    complete()
    said = capsys.readouterr().out
    first, last = COMPLETED[words]
    assert said.startswith(first or last)
    assert said.endswith(f"{last}\n")


def test_kubectl_finds_what_completes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["kubectl_complete-pd"] == "pd_cli.kubectl:complete"


@pytest.mark.slow
def test_top_goes_through_forwarded_ports(kubectl: Played) -> None:
    with router(state("chat-router-0")) as port:
        kubectl.answers = {"get pods": {"items": [pod("r-0"), pod("r-1", False)]}, "port": port}
        done = kubectl.pd("top", "chat", "--once")
    assert "d-10" in done.stdout, done.stderr
    forwards = [line for line in kubectl.asked if "port-forward" in line]
    assert forwards == ["port-forward pod/r-0 :9090"]


@pytest.mark.slow
def test_requests_go_through_forwarded_ports(kubectl: Played) -> None:
    found = {"requests": [known_request("chatcmpl-1", 1.0)]}
    with router(found, "/debug/requests") as port:
        kubectl.answers = {"get pods": {"items": [pod("r-0")]}, "port": port}
        done = kubectl.pd("requests", "chat")
    assert done.returncode == 0, done.stderr
    assert "What happened to chatcmpl-1" in done.stdout


@pytest.mark.slow
def test_explain_reads_the_operators_logs(kubectl: Played) -> None:
    kubectl.answers = {"get pods": {"items": [pod("op-0")]}, "logs op-0": "nothing of the kind"}
    done = kubectl.pd("explain", "chat")
    assert (done.returncode, "no decision about chat" in done.stderr) == (1, True)
    assert "logs --namespace=system --tail=5000 op-0" in kubectl.asked
    kubectl.answers["logs op-0"] = "\n".join(lines())
    done = kubectl.pd("explain", "chat", "--last", "1", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["scaling"]["to"]) == (0, 2)
    # Another operator that only starts has no log.
    kubectl.answers["get pods"] = {"items": [pod("op-1", ready=False), pod("op-0")]}
    assert kubectl.pd("explain", "chat").returncode == 0
    del kubectl.answers["logs op-0"]
    assert "Error from server" in kubectl.pd("explain", "chat").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "answers", "says"),
    [
        (("top", "chat"), {"get pods": {"items": []}}, "NotFound"),
        (
            ("open", "chat"),
            {"get pods": {"items": [pod("r-0", False)]}, "get pdcluster": "chat"},
            "no router of chat is ready; see: kubectl pd status chat",
        ),
        (("explain", "chat"), {"get pods": {"items": []}}, "no operator's pod is found"),
        (("status", "chat"), {}, "Error from server (NotFound): get pdcluster"),
    ],
)
def test_what_can_not_be_had_is_said(
    arguments: tuple[str, ...], answers: dict[str, Any], says: str, kubectl: Played
) -> None:
    kubectl.answers = answers
    done = kubectl.pd(*arguments)
    assert done.returncode == 1
    assert says in done.stderr


@pytest.mark.slow
def test_without_kubectl(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from pd_cli.kubectl import main; main()", "status"],
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, "there is no kubectl on the PATH" in done.stderr) == (1, True)


def test_commands_that_need_no_cluster_are_the_same(kubectl: Played) -> None:
    done = kubectl.pd("estimate", "--help")
    assert "Estimate the hand-over" in done.stdout, done.stderr
