"""What README and docs say of a cluster, as it stands there. What this cluster has otherwise: its
name, free ports of this machine, images that come from no registry, and a small model where
the example has a large one.
"""

import base64
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from e2e.cluster import build, images
from e2e.cluster.envtest import kubectl
from e2e.conftest import NAME
from e2e.site import RELEASE, SYSTEM, Site, worker_template
from tests.documents import ROOT, block
from tests.ports import free_port

pytestmark = pytest.mark.timeout(1200)

DEADLINE_S = 900
_EXAMPLE = "examples/kubernetes.yaml"
_FOLDER = "llama-3.1-8b-instruct"


class Shell:
    """A terminal whose kubectl and helm know the cluster and look at one namespace."""

    def __init__(self, site: Site, folder: Path, namespace: str, **variables: str) -> None:
        self._folder = folder
        docker = folder / "bin" / "docker"
        docker.parent.mkdir()
        docker.write_text(f'#!/bin/sh\nexec {sys.executable} -m e2e.docker_here {NAME} "$@"\n')
        docker.chmod(0o755)
        config = folder / "kubeconfig"
        shutil.copy(site.kube.kubeconfig, config)
        programs = (
            docker.parent, Path(sys.executable).parent, Path(kubectl()).parent, build.built("helm"),
        )  # fmt: skip
        path = ":".join([*map(str, programs), os.environ["PATH"]])
        # Also of programs that run in the namespace's network.
        self._env = {**os.environ, "PATH": path, "KUBECONFIG": str(config), **variables}
        self.run(f"kubectl config set-context --current --namespace={namespace}")

    def run(self, command: str, folder: Path | None = None) -> str:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", _of_this_cluster(command)],
            cwd=folder or self._folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    @contextmanager
    def forwarding(self, command: str) -> Iterator[str]:
        """While `kubectl port-forward` runs; the URL of what it forwards to, on a free port."""
        port = free_port()
        command = re.sub(r" (\d+)$", rf" {port}:\1", command)
        process = subprocess.Popen(
            command.split(), env=self._env, stdout=subprocess.PIPE, text=True
        )
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("Forwarding from"), command
            yield f"http://127.0.0.1:{port}"
        finally:
            deadline.cancel()
            process.terminate()
            process.communicate(timeout=60)


def _of_this_cluster(command: str) -> str:
    program = f"{sys.executable} -m e2e.cluster"
    return re.sub(r"^python -m e2e\.cluster(?! --name)", f"{program} --name {NAME}", command)


def got(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def smaller(example: Path) -> str:
    """The example with what a worker needs here, and one worker a pool."""
    made = yaml.safe_load(example.read_text())
    spec = made["spec"]
    spec["model"] |= {"maxModelLen": 1024, "dtype": "float32"}
    for role in ("prefill", "decode"):
        spec[role]["scaling"]["minReplicas"] = 1
        spec[role] |= {
            "engine": {"threads": 1, "kvCacheTokens": 8192},
            "template": worker_template(),
        }
    container = {"name": "router", "imagePullPolicy": "Never"}
    spec["router"]["template"] = {"spec": {"containers": [container]}}
    return yaml.safe_dump(made)


@pytest.fixture
def large(model: Path, tmp_path: Path) -> Path:
    """A volume as the example wants it: the model lies in a folder of it."""
    folder = tmp_path / "volume"
    shutil.copytree(model, folder / _FOLDER)
    return folder


def test_what_the_documents_say_of_a_cluster(site: Site, large: Path, tmp_path: Path) -> None:
    _, *build_and_push = block("README.md", "export REGISTRY").commands
    helm, *rest = block("README.md", "helm install").commands
    [with_images] = block("e2e/README.md", "helm install").commands
    plain = helm.partition(" --set ")[0]
    assert with_images.startswith(f"{plain} --set "), "the same, and where the images are"
    assert block("docs/install.md", "helm install").commands == (
        helm,
        f"helm test {RELEASE} --namespace {SYSTEM}",
        *rest[:2],
    )
    of_chart = [
        one.replace("pdcluster.yaml", _EXAMPLE).replace("pdcluster/chat", "pdcluster/llama")
        for one in block("charts/pdcluster/README.md", "helm install").commands
    ]
    assert set(of_chart) == set(block("docs/install.md", "helm install").commands)
    forwards = block("docs/install.md", "kubectl port-forward").commands
    assert block("README.md", "kubectl port-forward").commands == forwards

    (tmp_path / "charts").symlink_to(ROOT / "charts")
    (tmp_path / "examples").mkdir()
    (tmp_path / _EXAMPLE).write_text(smaller(ROOT / _EXAMPLE))
    site.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
    with site.namespace(large, claim="models") as namespace:
        shell = Shell(site, tmp_path, namespace, REGISTRY="registry.test/team")
        for command in build_and_push:
            shell.run(command, ROOT)
        shell.run(helm)
        shell.run(f"helm test {RELEASE} --namespace {SYSTEM}")
        *before, listing = rest
        for command in before:
            shell.run(command)
        head, row = shell.run(listing).splitlines()
        assert dict(zip(head.split(), row.split(), strict=False))["READY"] == "True"
        api, page = forwards
        with shell.forwarding(api) as url:
            assert "llama-3.1-8b" in got(f"{url}/v1/models")
        with shell.forwarding(page) as url:
            assert "<html" in got(f"{url}/")
        [keys] = block("README.md", "kubectl create secret").commands
        shell.run(keys)
        assert_a_key(site, namespace)
        removed_and_installed_again(shell, site, with_images)


def assert_a_key(site: Site, namespace: str) -> None:
    data = site.api.get("v1", "Secret", "chat-keys", namespace)["data"]
    assert re.fullmatch("sk-[0-9a-f]{32}", base64.b64decode(data["team-a"]).decode())


def removed_and_installed_again(shell: Shell, site: Site, install: str) -> None:
    """Nothing of ours is left in between; other stories go on with what is there afterwards."""
    for command in block("docs/install.md", "kubectl delete pdc").commands:
        shell.run(command)
    [lease] = block("docs/install.md", "kubectl delete lease").commands
    shell.run(lease)
    assert "pdcluster.dev" not in site.kubectl("get", "crd", "-o", "name")
    assert RELEASE not in site.helm("list", "--all-namespaces", "--short").split()
    shell.run(f"{install} --wait --timeout 120s")


def test_the_demo(site: Site, tmp_path: Path) -> None:
    shell = Shell(site, tmp_path, "demo")
    make, wait, listing, forward = block("e2e/README.md", "python -m e2e.cluster demo").commands
    try:
        shell.run(make, ROOT)
        shell.run(wait)
        assert "1/1" in shell.run(listing)
        with shell.forwarding(forward) as url:
            assert "smollm2" in got(f"{url}/v1/models")
    finally:
        site.api.delete("v1", "Namespace", "demo")
        site.api.delete("v1", "PersistentVolume", "demo-packages")


def test_what_there_is_for_a_cluster(site: Site, tmp_path: Path) -> None:
    status, load, execute, other = block("e2e/README.md", "python -m e2e.cluster status").commands
    shell = Shell(site, tmp_path, "default")
    assert "pdcluster.test/router" in shell.run(status, ROOT)
    archive = tmp_path / "router.tar"
    images.export(images.IMAGES["router"], archive)
    shell.run(load.replace("FILE…", str(archive)), ROOT)
    there = re.sub(r"curl \S+$", "curl -sk https://10.96.0.1/version", execute)
    assert "gitVersion" in shell.run(there, ROOT)
    second = f"{NAME}-second"
    up = other.replace("--name other", f"--name {second}")
    try:
        assert "KUBECONFIG" in shell.run(up, ROOT)
    finally:
        shell.run(up.removesuffix("up") + "down", ROOT)
