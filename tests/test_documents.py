"""Each block of the documents belongs to a test: what a reader copies to start with is run here
as it stands there, what needs a cluster by `e2e/test_documents.py`, and what other tests do in
their own words is named. A block that belongs to none fails.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from e2e import docker_here
from pd_core.identity import Identity, Part
from pd_engine import settings as engine_settings
from pd_operator import api
from pd_router import settings as router_settings
from tests.cluster import http_get, said_until_ready
from tests.documents import ROOT, Block, block, blocks
from tests.pd_operator.objects import document
from tests.ports import free_port

_DEADLINE_S = 120
_HERE = "tests/test_documents.py"
_E2E = "e2e/test_documents.py"
_UP = f"{_HERE}::test_up_and_an_openai_client"
_CLUSTER = f"{_E2E}::test_what_the_documents_say_of_a_cluster"
_OBJECTS = f"{_HERE}::test_objects_are_good"
_QUICKSTART = "tests/e2e/test_quickstart.py::test_quickstart"
_TARGETS = f"{_HERE}::test_targets_exist"
_GENERATED = "tests/test_reference.py::test_pages_are_up_to_date"

RUN_BY = {
    ("README.md", "git clone"): _QUICKSTART,
    ("README.md", "ready: "): _QUICKSTART,
    ("README.md", "make test"): _TARGETS,
    ("README.md", "source .venv"): _UP,
    ("README.md", "from openai"): _UP,
    ("README.md", "$ pdcluster status"): _UP,
    ("README.md", "pdcluster serve"): f"{_HERE}::test_serve",
    ("README.md", "apiVersion"): _OBJECTS,
    ("README.md", "export REGISTRY"): _CLUSTER,
    ("README.md", "helm install"): _CLUSTER,
    ("README.md", "kubectl port-forward"): _CLUSTER,
    ("README.md", "kubectl logs"): "tests/pd_cli/test_explain.py::test_an_operators_log",
    ("README.md", "kubectl scale"): (
        "e2e/test_pools.py::test_kubectl_scale_counts_in_external_mode"
    ),
    ("README.md", "kubectl create secret"): _CLUSTER,
    ("CONTRIBUTING.md", "make check"): _TARGETS,
    ("e2e/README.md", "make kube-binaries"): _TARGETS,
    ("e2e/README.md", "helm install"): _CLUSTER,
    ("e2e/README.md", "python -m e2e.cluster demo"): f"{_E2E}::test_the_demo",
    ("e2e/README.md", "python -m e2e.cluster status"): f"{_E2E}::test_what_there_is_for_a_cluster",
    ("charts/pdcluster/README.md", "helm install"): _CLUSTER,
    ("tests/envtest/README.md", "make kube-binaries"): _TARGETS,
    ("tests/envtest/README.md", "@pytest"): (
        "tests/envtest/test_operator.py::test_events_tell_changes_and_nothing_twice"
    ),
    ("docs/concepts.md", "decode:"): _OBJECTS,
    ("docs/estimates.md", "$ pdcluster estimate"): f"{_HERE}::test_an_estimate",
    ("docs/install.md", "make quickstart"): _TARGETS,
    ("docs/install.md", "source .venv"): _UP,
    ("docs/install.md", "apiVersion"): _OBJECTS,
    ("docs/install.md", "export REGISTRY"): _CLUSTER,
    ("docs/install.md", "helm install"): _CLUSTER,
    ("docs/install.md", "kubectl port-forward"): _CLUSTER,
    ("docs/install.md", "kubectl delete pdc"): _CLUSTER,
    ("docs/install.md", "kubectl delete lease"): _CLUSTER,
    ("docs/load.md", "pdcluster serve"): f"{_HERE}::test_serve",
    ("docs/load.md", "python3 -m venv aiperf"): "tests/loadgens/test_loadgens.py::test_aiperf",
    ("docs/load.md", "python3 -m venv guidellm"): "tests/loadgens/test_loadgens.py::test_guidellm",
    ("docs/security.md", "spec:"): _OBJECTS,
    ("docs/security.md", "python -m pd_engine"): f"{_HERE}::test_flags_of_processes",
    ("docs/simulation.md", "pdcluster simulate"): f"{_HERE}::test_a_simulation",
    ("docs/simulation.md", "pdcluster up"): "tests/e2e/test_profile.py::test_a_pair",
    ("docs/reference/commands.md", "Usage: "): _GENERATED,
}
"""(document, how the block begins): the test that runs it."""


def test_each_block_is_run_by_a_test() -> None:
    seen = set()
    for one in blocks():
        keys = [key for key in RUN_BY if key[0] == one.document and one.text.startswith(key[1])]
        assert keys, f"{one.document}: no test runs this block:\n{one.text}"
        seen.update(keys)
    assert seen == set(RUN_BY), "blocks that are no more"


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_these_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test


def test_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    found = [
        command.split()[1]
        for one in blocks()
        for command in one.commands
        if command.startswith("make ")
    ]
    assert len(found) > 15
    assert set(found) <= targets


# ---- images ---------------------------------------------------------------------------


def test_images_that_are_built_are_pushed_and_installed() -> None:
    """Each Dockerfile that the chart needs, under the chart's own version."""
    registry, *commands = block("README.md", "export REGISTRY").commands
    assert block("docs/install.md", "export REGISTRY").commands == (registry, *commands)
    built = dict(
        re.findall(r"^docker build -f (\S+) -t (\S+) \.$", "\n".join(commands), re.MULTILINE)
    )
    pushed = re.findall(r"^docker push (\S+)$", "\n".join(commands), re.MULTILINE)
    assert len(built) + len(pushed) == len(commands)
    assert pushed == list(built.values())
    assert {docker_here.image(one).file for one in pushed} == {Path(file).name for file in built}
    assert {ROOT / file for file in built} == set((ROOT / "images").glob("*.Dockerfile"))
    version = yaml.safe_load((ROOT / "charts/pdcluster/Chart.yaml").read_text())["appVersion"]
    [install, *_] = block("README.md", "helm install").commands
    given = dict(re.findall(r"--set (\S+)=(\S+)", install))
    assert {f"{given['image.repository']}:{version}", given["router.image"],
            given["engine.image"]} == set(pushed)  # fmt: skip


# ---- objects, programs and flags ----------------------------------------------------


def _objects() -> list[Block]:
    return [one for one in blocks() if one.language == "yaml"]


@pytest.mark.parametrize("one", _objects(), ids=lambda one: f"{one.document}:{one.text[:12]!r}")
def test_objects_are_good(one: Block) -> None:
    """Whole ones as they are, parts within an object that has the rest."""
    found = yaml.safe_load(one.text)
    if "kind" not in found:
        part = found.get("spec", found)
        found = document(**{f"spec.{name}": value for name, value in part.items()})
    api.parse(found)


def test_flags_of_processes() -> None:
    of_engine, of_router = block("docs/security.md", "python -m pd_engine").commands
    worker = ["--role=decode", "--model=m", "--served-name=m", "--worker-name=w", "--host=::1"]
    rest = of_engine.removeprefix("python -m pd_engine ... ").lower().split()
    of_worker = engine_settings.parse([*worker, *rest]).tls_cluster
    assert of_worker == Identity("namespace", "name", Part.WORKER)
    router = ["--model=m", "--router-name=r"]
    router += [f"--{name}=[::1]:{at}" for at, name in enumerate(("http", "admin", "control"), 1)]
    rest = of_router.removeprefix("python -m pd_router ... ").lower().split()
    assert router_settings.parse([*router, *rest]).tls_cluster == Identity(
        "namespace", "name", Part.ROUTER
    )


# ---- commands on this machine -------------------------------------------------------


def shell(command: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """As typed there, with this Python's programs first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output(command: str, folder: Path, **environment: str) -> str:
    process = shell(command, folder, **environment)
    said, _ = process.communicate(timeout=_DEADLINE_S)
    assert process.returncode == 0, said
    return said


@contextmanager
def serving(command: str, port: int, **environment: str) -> Iterator[None]:
    """From `ready:` to a good end by Ctrl-C."""
    process = shell(command, ROOT, **environment)
    try:
        said = said_until_ready(process, port)
        yield
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=_DEADLINE_S)
        assert process.returncode == 0, "".join(said) + rest
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_up_and_an_openai_client(tmp_path: Path) -> None:
    port, state = free_port(), {"XDG_STATE_HOME": str(tmp_path)}
    activate, up = block("README.md", "source .venv").commands
    assert activate == "source .venv/bin/activate"
    assert block("docs/install.md", "source .venv").commands == (activate, up)
    assert up.endswith(" --port 8000")
    program = block("README.md", "from openai").text.replace(":8000/", f":{port}/")
    shown = block("README.md", "$ pdcluster status")
    with serving(up.replace("8000", str(port)), port, **state):
        (tmp_path / "ask.py").write_text(program)
        assert "Paris" in output(f"python {tmp_path}/ask.py", ROOT)
        [status] = shown.commands
        found = output(status, ROOT, **state).splitlines()
    head, row = shown.output.splitlines()
    assert found[0].split() == head.split()
    assert found[1].split()[:4] == row.split()[:4]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_serve(tmp_path: Path) -> None:
    port, state = free_port(), {"XDG_STATE_HOME": str(tmp_path)}
    [command] = block("docs/load.md", "pdcluster serve").commands
    [short] = block("README.md", "pdcluster serve").commands
    assert command == f"{short} --port 8000"
    with serving(command.replace("8000", str(port)), port, **state):
        status, models = http_get(f"http://127.0.0.1:{port}/v1/models")
        assert status == 200
        assert "smollm2-135m-instruct" in models


@pytest.mark.slow
def test_an_estimate(tmp_path: Path) -> None:
    shown = block("docs/estimates.md", "$ pdcluster estimate")
    [command] = shown.commands
    assert output(command, tmp_path) == shown.output


@pytest.mark.slow
def test_a_simulation(tmp_path: Path) -> None:
    [command] = block("docs/simulation.md", "pdcluster simulate").commands
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    excerpt = ROOT / "tests" / "pd_sim" / "data" / "azure_excerpt.csv"
    shutil.copy(excerpt, tmp_path / "azure_conv_2023.csv")
    output(command, tmp_path)
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")
