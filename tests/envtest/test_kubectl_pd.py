"""`kubectl pd` by a real kubectl: found as a plugin, completed, and what it shows of an object."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cluster.api import Api
from e2e.cluster.envtest import Kube, kubectl
from tests.pd_operator.objects import document

Run = Callable[..., "subprocess.CompletedProcess[str]"]
_PROGRAMS = {"kubectl-pd": "main", "kubectl_complete-pd": "complete"}


@pytest.fixture
def run(kube: Kube, tmp_path: Path) -> Run:
    """kubectl with both programs on its PATH, as an installed package has them."""
    for name, function in _PROGRAMS.items():
        code = f"from pd_cli.kubectl import {function}; {function}()"
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
        program.chmod(0o755)
    folders = [str(tmp_path), str(Path(kubectl()).parent), os.environ["PATH"]]
    env = {**os.environ, "PATH": ":".join(folders), "KUBECONFIG": str(kube.kubeconfig)}

    def call(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [kubectl(), *words]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    return call


@pytest.mark.usefixtures("crds")
def test_status_for_people_and_for_programs(run: Run, api: Api, namespace: str) -> None:
    api.create(document(**{"metadata.namespace": namespace}))
    said = run("pd", "status", "-n", namespace)
    assert (said.returncode, said.stdout.split()[:2]) == (0, ["NAME", "READY"])
    found = json.loads(run("pd", "status", "chat", "-n", namespace, "-o", "json").stdout)
    assert [one["metadata"]["name"] for one in found["clusters"]] == ["chat"]
    assert found["pods"] == found["events"] == []
    missing = run("pd", "status", "nope", "-n", namespace, "-o", "json")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert 'pdclusters.pdcluster.dev "nope" not found' in missing.stderr


@pytest.mark.parametrize(
    ("words", "first", "directive"),
    [
        (("st",), "status\t", ":4"),
        (("status", "-o", ""), "text", ":4"),
        (("validate", "-f", ""), ":0", ":0"),
    ],
)
def test_kubectl_completes_it(run: Run, words: tuple[str, ...], first: str, directive: str) -> None:
    lines = run("__complete", "pd", *words).stdout.splitlines()
    assert lines[0].startswith(first)
    assert lines[-1] == directive
