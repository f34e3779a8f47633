"""The CRDs on a real API server: every bad file is refused in the words that are pinned, good
ones get their defaults, old objects can be changed in other fields, columns and /scale work,
and whatever the server accepts `pd_operator.api` accepts, too.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Api, ApiError, Manifest, install_crds, wait_for
from e2e.cluster.envtest import Kube
from pd_operator import api as pdcluster
from tests.envtest.conftest import CRDS
from tests.pd_operator import corpus
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")

VERSION = "pdcluster.dev/v1alpha1"
EXAMPLES = sorted((CRDS.parent / "examples").glob("*.yaml"))
SERVED = [name for name, case in corpus.CASES.items() if case.reaches_a_server]


def path(namespace: str, name: str = "") -> str:
    found = f"/apis/{VERSION}/namespaces/{namespace}/pdclusters"
    return f"{found}/{name}" if name else found


def create(api: Api, namespace: str, body: Any) -> Manifest:
    made: Manifest = api.call("POST", f"{path(namespace)}?fieldValidation=Strict", body)
    return made


def replace(api: Api, namespace: str, body: Any, version: str) -> Manifest:
    body = copy.deepcopy(body)
    body["metadata"]["resourceVersion"] = version
    where = f"{path(namespace, body['metadata']['name'])}?fieldValidation=Strict"
    made: Manifest = api.call("PUT", where, body)
    return made


@pytest.fixture(scope="module")
def shared(kube: Kube) -> Iterator[str]:
    """One namespace for objects that are all refused."""
    name = "test-refused"
    kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    kube.api.delete("v1", "Namespace", name)


@pytest.mark.parametrize("name", SERVED)
def test_a_bad_file_is_refused_in_these_words(api: Api, shared: str, name: str) -> None:
    case = corpus.CASES[name]
    if case.before is None:
        with pytest.raises(ApiError) as refused:
            create(api, shared, case.document)
    else:
        made = create(api, shared, case.before)
        try:
            with pytest.raises(ApiError) as refused:
                replace(api, shared, case.document, made["metadata"]["resourceVersion"])
        finally:
            api.delete(VERSION, "PDCluster", made["metadata"]["name"], shared)
    assert refused.value.code in (400, 422)
    for words in case.server:
        assert words in str(refused.value)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_taken_and_mean_the_same_with_defaults(
    api: Api, namespace: str, file: Path
) -> None:
    # What follows in a file is for other programs than the API server.
    [written] = [one for one in yaml.safe_load_all(file.read_text()) if one["kind"] == "PDCluster"]
    made = create(api, namespace, written)
    written["metadata"] = made["metadata"]
    assert pdcluster.parse(made) == pdcluster.parse(written)


def test_what_a_whole_object_becomes_is_read_again(api: Api, namespace: str) -> None:
    """Every field at once; what the server adds has no other meaning than its absence."""
    body = whole(namespace)
    made = create(api, namespace, body)
    body["metadata"] = made["metadata"]
    assert pdcluster.parse(made) == pdcluster.parse(body)


def whole(namespace: str) -> Manifest:
    container = {
        "name": "engine",
        "image": "engine:2",
        "imagePullPolicy": "Never",
        "env": [{"name": "A", "value": "1"}, {"name": "B"}],
        "resources": {"requests": {"cpu": 2, "memory": "1.5Gi"}, "limits": {"memory": "1.5Gi"}},
        "volumeMounts": [{"name": "torch", "mountPath": "/torch", "readOnly": True}],
    }
    spec = {
        "nodeSelector": {"zone": "b"},
        "tolerations": [{"operator": "Exists"}, {"key": "gpu", "effect": "NoSchedule"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry.example"}],
        "volumes": [
            {"name": "torch", "persistentVolumeClaim": {"claimName": "torch", "readOnly": True}},
            {"name": "a", "configMap": {"name": "a"}},
            {"name": "b", "secret": {"secretName": "b"}},
            {"name": "c", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
        ],
        "containers": [container],
    }
    labels = {"team": "a", "example.com/tier": ""}
    template = {"metadata": {"labels": labels, "annotations": {"note": "any Text."}}, "spec": spec}
    return document(
        **{
            "metadata.namespace": namespace,
            "spec.model.name": "org/Model-1.2:it",
            "spec.model.source": {"huggingFace": {"repo": "a/b", "tokenSecret": "hub.token"}},
            "spec.model.maxModelLen": 4096,
            "spec.slo": {
                "ttft": {"percentile": 99.9, "target": "1m30s"},
                "tpot": {"target": "5ms"},
            },
            "spec.prefill": {
                "scaling": {"maxReplicas": 8, "minReplicas": 0, "scaleDownWindow": "10m"},
                "accelerator": {"product": "NVIDIA-H100-80GB-HBM3"},
                "template": template,
                "startTimeout": "1h",
            },
            "spec.decode": {
                "replicas": 2,
                "accelerator": {},
                "engine": {
                    "kvCacheFraction": 0.85,
                    "chunkTokens": 0,
                    "threads": 4,
                    "speculation": {
                        "method": "draft",
                        "draftModel": {"source": {"huggingFace": {"repo": "a/small"}}},
                    },
                },
            },
            "spec.router": {"replicas": 2},
            "spec.kvTransfer": {"colocate": {"topologyKey": "example.com/rack"}},
            "spec.rollout": {"maxSurge": 0, "maxUnavailable": 1, "drainTimeout": "90s"},
            "spec.budget": {"gpus": 10, "ratio": {"min": 0.25, "max": 4}},
        }
    )


@pytest.mark.usefixtures("own_kube")
def test_an_old_object_that_breaks_a_rule_can_be_changed_elsewhere(
    api: Api, namespace: str, tmp_path: Path
) -> None:
    """As after an upgrade with a stricter rule on a leaf: here a rule is put aside meanwhile."""
    file = CRDS / "pdcluster.dev_pdclusters.yaml"
    strict = yaml.safe_load(file.read_text())
    lax = copy.deepcopy(strict)
    [version] = lax["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["rollout"]["properties"]["drainTimeout"]["x-kubernetes-validations"]
    old = tmp_path / "old.yaml"
    old.write_text(json.dumps(lax))
    bad = document(**{"spec.rollout.drainTimeout": "soon"})
    try:
        install_crds(api, [old])
        made = wait_for("the old rules", lambda: _created(api, namespace, bad))
    finally:
        install_crds(api, [file])
    wait_for("the new rules", lambda: _refused(api, namespace, {**bad, "metadata": {"name": "b"}}))

    made["spec"]["decode"]["replicas"] = 3
    changed = replace(api, namespace, made, made["metadata"]["resourceVersion"])
    assert changed["spec"]["decode"]["replicas"] == 3
    made["spec"]["rollout"]["drainTimeout"] = "later"
    with pytest.raises(ApiError, match="write a duration from 1s to 24h"):
        replace(api, namespace, made, changed["metadata"]["resourceVersion"])


def _created(api: Api, namespace: str, body: Manifest) -> Manifest | None:
    try:
        return create(api, namespace, body)
    except ApiError:
        return None


def _refused(api: Api, namespace: str, body: Manifest) -> bool:
    try:
        create(api, namespace, body)
    except ApiError:
        return True
    api.delete(VERSION, "PDCluster", body["metadata"]["name"], namespace)
    return False


def test_columns_and_explanations(kube: Kube, api: Api, namespace: str) -> None:
    create(api, namespace, document())
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "AllReady",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    status = {
        "summary": {"prefill": "2/2", "decode": "3/3"},
        "ttft": "120ms",
        "tpot": "8.4ms",
        "conditions": [condition],
    }
    api.patch(VERSION, "PDCluster", "chat", {"status": status}, namespace, sub="status")
    header, row = kube.kubectl("get", "pdc", "-n", namespace).splitlines()
    assert header.split() == ["NAME", "READY", "PREFILL", "DECODE", "TTFT", "TPOT", "MODEL", "AGE"]
    assert row.split()[:-1] == ["chat", "True", "2/2", "3/3", "120ms", "8.4ms", "smollm2"]

    said = kube.kubectl("explain", "pdcluster.spec.slo.ttft")
    assert "Time to first token" in said
    assert "-required-" in said


def test_a_pool_is_scaled(kube: Kube, api: Api, namespace: str) -> None:
    """With a default, since a size that nobody says any more would make kubectl scale fail."""
    pool = {"apiVersion": VERSION, "kind": "PDPool", "metadata": {"name": "chat-decode"}}
    made = api.apply(pool, namespace)
    assert made["spec"]["replicas"] == 1
    kube.kubectl("scale", "pdpool", "chat-decode", "--replicas=3", "-n", namespace)
    assert api.get(VERSION, "PDPool", "chat-decode", namespace)["spec"]["replicas"] == 3
    selector = {"status": {"replicas": 3, "selector": "pdcluster.dev/role=decode"}}
    api.patch(VERSION, "PDPool", "chat-decode", selector, namespace, sub="status")
    scale = api.call("GET", f"/apis/{VERSION}/namespaces/{namespace}/pdpools/chat-decode/scale")
    assert scale["status"] == {"replicas": 3, "selector": "pdcluster.dev/role=decode"}
    with pytest.raises(ApiError, match="less than or equal to 1000"):
        api.patch(VERSION, "PDPool", "chat-decode", {"spec": {"replicas": 1001}}, namespace)
