"""The API server that tests use, itself: that it validates, says who may do what, counts
requests, fails when told to, and is gone when its tests are, however they ended.
"""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from e2e.cluster import cluster, envtest, layout, teardown
from e2e.cluster.api import Api, ApiError, Manifest, install_crds, wait_for
from e2e.cluster.audit import Audit
from e2e.cluster.envtest import ApiServer, EnvTest, Kube
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.process import Child

WIDGETS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.harness.pdcluster.dev"},
    "spec": {
        "group": "harness.pdcluster.dev",
        "scope": "Namespaced",
        "names": {"plural": "widgets", "singular": "widget", "kind": "Widget"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "low": {"type": "integer", "default": 1},
                                    "high": {"type": "integer", "default": 9},
                                },
                                "x-kubernetes-validations": [
                                    {
                                        "rule": "self.low <= self.high",
                                        "message": "low is above high: lower it",
                                    }
                                ],
                            },
                            "status": {
                                "type": "object",
                                "x-kubernetes-preserve-unknown-fields": True,
                            },
                        },
                    }
                },
            }
        ],
    },
}


def config_map(name: str, **data: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def widget(name: str, **spec: int) -> Manifest:
    return {
        "apiVersion": "harness.pdcluster.dev/v1",
        "kind": "Widget",
        "metadata": {"name": name},
        "spec": spec,
    }


@pytest.fixture(scope="module")
def widgets(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("crds") / "widgets.yaml"
    file.write_text(yaml.safe_dump(WIDGETS))
    assert install_crds(kube.api, [file]) == [WIDGETS["metadata"]["name"]]


@pytest.mark.usefixtures("widgets")
def test_a_custom_resource_is_defaulted_and_checked(api: Api, namespace: str):
    made = api.apply(widget("right", low=3), namespace)
    assert made["spec"] == {"low": 3, "high": 9}

    with pytest.raises(ApiError, match="low is above high: lower it") as refused:
        api.apply(widget("wrong", low=10), namespace)

    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    status = {"status": {"seen": 1}}
    api.patch("harness.pdcluster.dev/v1", "Widget", "right", status, namespace, sub="status")
    [only] = api.items("harness.pdcluster.dev/v1", "Widget", namespace)
    assert (only["status"], only["kind"]) == ({"seen": 1}, "Widget")


def test_server_side_apply_keeps_who_owns_what(api: Api, namespace: str):
    first = api.apply(config_map("shared", ours="1"), namespace, manager="one")
    again = api.apply(config_map("shared", ours="1"), namespace, manager="one")
    assert again["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]

    with pytest.raises(ApiError) as conflict:
        api.apply(config_map("shared", ours="2"), namespace, manager="other", force=False)
    assert conflict.value.code == 409

    api.apply(config_map("shared", theirs="2"), namespace, manager="other")
    both = api.get("v1", "ConfigMap", "shared", namespace)
    assert both["data"] == {"ours": "1", "theirs": "2"}
    api.delete("v1", "ConfigMap", "shared", namespace)
    api.delete("v1", "ConfigMap", "shared", namespace)  # not there: no error
    assert api.find("v1", "ConfigMap", "shared", namespace) is None


def test_a_service_account_may_do_what_its_rules_say(kube: Kube, namespace: str):
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "create", "patch"]}]
    account = Api(kube.service_account(namespace, "limited", rules=rules))
    try:
        account.apply(config_map("allowed", key="value"), namespace)
        with pytest.raises(ApiError, match="cannot list resource") as refused:
            account.items("v1", "ConfigMap", namespace)
        with pytest.raises(ApiError):
            account.get("v1", "ConfigMap", "allowed", "default")
    finally:
        account.close()
    assert refused.value.code == 403


def test_kubectl_takes_the_same_way(kube: Kube, namespace: str):
    kube.api.apply(config_map("seen", key="value"), namespace)
    said = kube.kubectl("get", "configmap", "seen", "-n", namespace, "-o", "jsonpath={.data.key}")
    assert said == "value"
    with pytest.raises(ClusterError, match="not found"):
        kube.kubectl("get", "configmap", "unseen", "-n", namespace)


def test_requests_are_counted_by_who_made_them(kube: Kube, api: Api, namespace: str, audit: Audit):
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"]}]
    account = Api(kube.service_account(namespace, "counted", rules=rules))
    try:
        audit.forget()
        account.apply(config_map("one"), namespace)
        account.apply(config_map("one"), namespace)
        account.get("v1", "ConfigMap", "one", namespace)
        account.items("v1", "ConfigMap", namespace)
        api.apply(config_map("two"), namespace)
    finally:
        account.close()

    writes = audit.writes(user=f"{namespace}:counted")
    assert [(w.verb, w.resource, w.name, w.code) for w in writes] == [
        ("patch", "configmaps", "one", 201),
        ("patch", "configmaps", "one", 200),
    ]
    assert [w.user for w in audit.writes(resource="configmaps")][-1] == "admin"
    reads = audit.requests(user=f"{namespace}:counted", resource="configmaps")
    assert {r.verb for r in reads} == {"patch", "get", "list"}
    audit.forget()
    assert audit.writes(user=f"{namespace}:counted") == []


def test_a_killed_server_comes_back_with_all_it_had(api: Api, namespace: str, apiserver: ApiServer):
    api.apply(config_map("kept", key="value"), namespace)
    apiserver.kill()
    with pytest.raises((OSError, urllib3.exceptions.HTTPError)):
        api.get("v1", "ConfigMap", "kept", namespace)

    apiserver.start()

    assert api.get("v1", "ConfigMap", "kept", namespace)["data"] == {"key": "value"}


def test_a_frozen_server_answers_nothing_until_it_is_thawed(
    api: Api, namespace: str, apiserver: ApiServer
):
    api.apply(config_map("kept", key="value"), namespace)
    path = api.path("v1", "ConfigMap", "kept", namespace)
    apiserver.freeze()
    with pytest.raises((OSError, urllib3.exceptions.HTTPError)):
        api.call("GET", path, deadline_s=1)

    apiserver.thaw()

    assert api.call("GET", path)["data"] == {"key": "value"}


def test_controllers_run_where_a_test_asks_for_them(
    api: Api, namespace: str, controllers: Callable[..., Child]
):
    owner = api.apply(config_map("owner"), namespace)
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": "owner",
        "uid": owner["metadata"]["uid"],
    }
    owned = config_map("owned")
    owned["metadata"]["ownerReferences"] = [reference]
    api.apply(owned, namespace)
    controllers("garbage-collector-controller")

    api.delete("v1", "ConfigMap", "owner", namespace)

    wait_for(
        "what was owned is collected",
        lambda: api.find("v1", "ConfigMap", "owned", namespace) is None,
        deadline_s=60,
    )


def test_nothing_is_left_when_the_tests_are_killed(own_kube: EnvTest, tmp_path: Path):
    """Another process starts one more API server and is killed: the kernel ends the server."""
    script = textwrap.dedent("""
        import os, pathlib, sys, time
        from e2e.cluster import cluster, envtest, layout, teardown
        with envtest.running() as own:
            pids = f"{own.apiserver.pid} {own._etcd.pid}"
            pathlib.Path(sys.argv[1]).write_text(pids)
            time.sleep(600)
    """)
    file = tmp_path / "pids"
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(file)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(envtest.__file__).parents[2],
    )
    try:
        wait_for("another API server runs", lambda: file.exists() and file.read_text(), 90)
        pids = [int(pid) for pid in file.read_text().split()]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait(timeout=10)

    wait_for("both are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20)
    assert own_kube.api.call("GET", "/readyz") == "ok"


def test_a_cluster_that_is_there_is_taken(
    kube: Kube, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv(envtest.EXISTING, raising=False)
    assert envtest.existing() is None
    monkeypatch.setenv(envtest.EXISTING, "1")
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    assert envtest.existing() == kube.kubeconfig
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match="needs KUBECONFIG to name one file"):
        envtest.existing()


def test_the_end_of_a_cluster_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever waits at the one that is removed takes the next one, like everybody else."""
    monkeypatch.setattr(layout, "FOLDERS", tmp_path)
    monkeypatch.setattr(teardown, "remove", lambda *_: None)
    cluster.down(Layout("gone"))
    assert list(tmp_path.iterdir()) == []

    lock, removed = fcntl.flock, []

    def overtaken(*arguments: Any) -> None:
        if not removed:
            removed.append(True)
            (tmp_path / "next.lock").unlink()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with cluster.alone(Layout("next")):
        assert removed
        with pytest.raises(ClusterError, match="another command works on cluster 'next'"):
            cluster.down(Layout("next"))
    cluster.down(Layout("next"))
    assert list(tmp_path.iterdir()) == []
