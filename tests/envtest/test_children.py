"""What a PDCluster becomes, on a real API server: the server gives every object back as we
said it, so that nothing is applied twice; its pods pass the `restricted` standard; what others
add stays, and what they change of ours shows.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from e2e.cluster.api import Api, ApiError, Manifest
from pd_core.sketch import WindowSketch
from pd_operator import api as pdcluster
from pd_operator import desired, pins, rollout, status
from pd_operator.api import Cluster, Role
from pd_operator.desired import Desired
from pd_operator.measured import Samples
from pd_operator.observed import observe
from pd_operator.podparts import Peer, Settings
from pd_operator.rollout import Apply, Delete
from tests.pd_operator.objects import document, running

pytestmark = pytest.mark.usefixtures("crds")

GPU = {"accelerator": {"product": "NVIDIA-H100-80GB-HBM3"}}
SETTINGS = Settings(
    host_paths=False,
    transports=("auto", "tcp", "nixl"),
    operators=(Peer({"kubernetes.io/metadata.name": "pdcluster"}, {"app": "operator"}),),
    monitors_from=(Peer({"kubernetes.io/metadata.name": "monitoring"}),),
    monitors=False,  # its kinds aren't there
)
TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "nodeSelector": {"zone": "c"},
        "tolerations": [{"operator": "Exists"}, {"key": "gpu", "effect": "NoSchedule"}],
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [
            {"name": "torch", "persistentVolumeClaim": {"claimName": "torch"}},
            {"name": "cache", "emptyDir": {"sizeLimit": "1024Mi"}},
            {"name": "plain", "emptyDir": {}},
        ],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "EMPTY"}, {"name": "A", "value": "$(POD_IP)"}],
                "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "2048Mi"}},
                "volumeMounts": [
                    {"name": "torch", "mountPath": "/torch", "readOnly": True},
                    {"name": "cache", "mountPath": "/cache"},
                ],
            }
        ],
    },
}
TOGETHER: Mapping[str, Any] = {"spec.prefill": ..., "spec.decode": ..., "spec.colocated": {}}
CLUSTERS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "longest name": {"metadata.name": "a" * 40},
    "devices": {
        "spec.prefill": {**GPU, "template": TEMPLATE},
        "spec.decode": {**GPU, "replicas": 0},
        "spec.kvTransfer": {
            "transport": "nixl",
            "colocate": {"topologyKey": "example.com/rack", "policy": "Required"},
        },
        "spec.slo": {"ttft": {"target": "1s"}, "tpot": {"target": "50ms"}},
    },
    "same host": {"spec.kvTransfer.colocate": {"topologyKey": "kubernetes.io/hostname"}},
    "colocated": {**TOGETHER, "spec.router.template": {"spec": {"nodeSelector": {"a": "b"}}}},
    "hub": {"spec.model.source": {"huggingFace": {"repo": "a/b", "tokenSecret": "hub"}}},
    "claim": {
        "spec.model.name": "meta-llama/Llama-3:8b",
        "spec.model.source": {"persistentVolumeClaim": {"claimName": "models", "path": "a/b"}},
    },
    "image": {"spec.model.source": {"image": "models/llama:3"}},
    "certificates": {"spec.security": {"tls": {"mode": "Auto"}}},
}


def made(api: Api, namespace: str, changes: Mapping[str, Any]) -> tuple[Cluster, Desired]:
    """A PDCluster that the server has, and what it is to become."""
    body = api.create(document(**{"metadata.namespace": namespace, **changes}), namespace)
    cluster = pdcluster.parse(body)
    return cluster, desired.render(cluster, desired.fixed_replicas(cluster), SETTINGS)


def everything(wanted: Desired) -> list[Manifest]:
    pools = [one for pool in wanted.pools for one in (pool.service, pool.stateful_set)]
    return [*wanted.surroundings, *pools]


def seen(api: Api, wanted: Desired) -> list[Manifest]:
    """The same objects as the server has them."""
    return [
        api.get(one["apiVersion"], one["kind"], one["metadata"]["name"],
                one["metadata"]["namespace"])
        for one in everything(wanted)
    ]  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_nothing_is_applied_twice(api: Api, namespace: str, name: str) -> None:
    _, wanted = made(api, namespace, CLUSTERS[name])
    for one in everything(wanted):
        api.apply(one, namespace, manager="pdcluster-operator")
    assert rollout.plan(wanted, observe(seen(api, wanted))).operations == ()


def test_what_others_add_stays_and_what_they_change_comes_back(api: Api, namespace: str) -> None:
    _, wanted = made(api, namespace, {})
    for one in everything(wanted):
        api.apply(one, namespace, manager="pdcluster-operator")
    theirs = {"name": "router", "env": [{"name": "THEIRS", "value": "1"}]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "chat-router", "labels": {"theirs": "1"}},
        "spec": {"template": {"spec": {"containers": [theirs]}}},
    }
    api.apply(deployment, namespace, manager="somebody")
    policy: dict[str, Any] = {"spec": {"ingress": [{}]}}
    api.patch("networking.k8s.io/v1", "NetworkPolicy", "chat-workers", policy, namespace)
    budget = {"spec": {"maxUnavailable": 0}}
    api.patch("policy/v1", "PodDisruptionBudget", "chat-decode", budget, namespace)
    api.patch("v1", "Service", "chat-router", {"spec": {"type": "NodePort"}}, namespace)

    found = rollout.plan(wanted, observe(seen(api, wanted))).operations

    names = [(one.ref.kind, one.ref.name) for one in found if isinstance(one, Apply)]
    assert sorted(names) == [
        ("NetworkPolicy", "chat-workers"),
        ("PodDisruptionBudget", "chat-decode"),
        ("Service", "chat-router"),
    ]
    for one in found:
        assert isinstance(one, Apply)
        api.apply(one.manifest, namespace, manager="pdcluster-operator")
    objects = seen(api, wanted)
    assert rollout.plan(wanted, observe(objects)).operations == ()
    [router] = [one for one in objects if one["kind"] == "Deployment"]
    [container] = router["spec"]["template"]["spec"]["containers"]
    assert theirs["env"][0] in container["env"]


def test_what_an_edit_no_longer_says_goes(api: Api, namespace: str) -> None:
    cluster, before = made(api, namespace, {"spec.decode": {"template": TEMPLATE}})
    for one in everything(before):
        api.apply(one, namespace, manager="pdcluster-operator")
    plain = replace(
        cluster, pools=tuple(replace(p, template=pdcluster.Template()) for p in cluster.pools)
    )
    unguarded = replace(SETTINGS, network_policies=False)
    wanted = desired.render(plain, desired.fixed_replicas(plain), unguarded)

    found = rollout.plan(wanted, observe(seen(api, before)))

    gone = [one.ref.name for one in found.operations if isinstance(one, Delete)]
    assert gone == ["chat-router", "chat-workers"]
    assert found.rolling == {Role.DECODE}


@pytest.mark.parametrize("name", CLUSTERS)
def test_pods_pass_the_restricted_standard(api: Api, namespace: str, name: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    api.patch("v1", "Namespace", namespace, {"metadata": {"labels": labels}})
    _, wanted = made(api, namespace, CLUSTERS[name])
    for one in wanted.surroundings:
        if one["kind"] == "ServiceAccount":
            api.apply(one, namespace)
    workloads = [one for one in everything(wanted) if "template" in one.get("spec", {})]
    assert len(workloads) >= 2
    for index, one in enumerate(workloads):
        template = copy.deepcopy(one["spec"]["template"])
        template["metadata"]["name"] = f"pod-{index}"
        pod = api.create({"apiVersion": "v1", "kind": "Pod", **template}, namespace)
        assert not pod["spec"].get("volumes") or all(
            "serviceAccountToken" not in str(volume) for volume in pod["spec"]["volumes"]
        )
    root = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(workloads[0]["spec"]["template"])}
    root["metadata"]["name"] = "root"
    root["spec"]["securityContext"] = {"runAsUser": 0}
    with pytest.raises(ApiError, match="restricted"):
        api.create(root, namespace)


def test_two_of_them_and_two_namespaces_dont_meet(api: Api, namespace: str) -> None:
    """No two objects of one name, and no selector that finds another's pods."""
    _, one = made(api, namespace, {})
    _, other = made(api, namespace, {"metadata.name": "chat-p"})
    names = [
        (each["kind"], each["metadata"]["name"]) for each in everything(one) + everything(other)
    ]
    assert len(names) == len(set(names))
    for each in everything(one) + everything(other):
        api.apply(each, namespace, manager="pdcluster-operator")
    for wanted in (one, other):
        assert rollout.plan(wanted, observe(seen(api, wanted))).operations == ()


@pytest.mark.parametrize("name", ["plain", "colocated", "devices"])
def test_a_status_comes_back_as_it_was_written(api: Api, namespace: str, name: str) -> None:
    """Or it would be written again and again."""
    cluster, wanted = made(api, namespace, CLUSTERS[name])
    sketch = WindowSketch()
    sketch.add(0.123, 0.0)
    samples = Samples(ttft=sketch.counts(0.0), tpot=sketch.counts(0.0))
    objects = observe(running(wanted))
    plan = rollout.plan(wanted, objects)
    now = "2026-01-01T00:00:00Z"
    written = status.status_of(cluster, wanted, objects, plan, samples, {}, now)
    written["decode"] = written.get("decode", {}) | {
        "decision": {"replicas": 2, "reason": "Burst", "message": "m", "time": now}
    }
    body = {
        "apiVersion": pdcluster.API_VERSION,
        "kind": "PDCluster",
        "metadata": {"name": cluster.name},
        "status": written,
    }
    got = api.apply(body, namespace, manager="pdcluster-operator-status", sub="status")
    assert got["status"] == written


def test_a_newer_operator_wants_what_is_there(api: Api, namespace: str) -> None:
    """Also where the server has added its own defaults to what the record holds."""
    cluster, wanted = made(api, namespace, {"spec.decode": {"template": TEMPLATE}})
    for one in everything(wanted):
        api.apply(one, namespace, manager="pdcluster-operator")
    newer = replace(SETTINGS, version="9.9.9", engine_image="pdcluster-engine:9.9.9")
    objects = observe(seen(api, wanted))

    anew = desired.render(cluster, desired.fixed_replicas(cluster), newer)
    assert rollout.plan(anew, objects).rolling == {Role.PREFILL, Role.DECODE}
    kept = pins.keep(anew, cluster, objects)

    assert rollout.plan(kept, objects).operations == ()
