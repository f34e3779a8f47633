"""What surrounds the pools: NetworkPolicies with exactly the flows that there are, budgets,
accounts, monitors; where pods go; what the settings of a place don't allow.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from pd_operator import alerts
from pd_operator.api import InvalidCluster, Role
from pd_operator.desired import Desired
from pd_operator.manifests import WORKER_LABEL
from pd_operator.podparts import Manifest, Peer, Settings
from tests.pd_operator.objects import child, cluster, pool_set, rendered, routers

_GPU = {"resource": "nvidia.com/gpu"}
OPERATOR = Peer({"kubernetes.io/metadata.name": "pdcluster"}, {"app": "operator"})
PROMETHEUS = Peer({"kubernetes.io/metadata.name": "monitoring"})
KUBERNETES = Settings(
    host_paths=False,
    transports=("auto", "tcp", "nixl"),
    operators=(OPERATOR,),
    monitors_from=(PROMETHEUS,),
)

# Who speaks, to whom, on which port. "*" is anybody.
FLOWS = {
    ("*", "router", 8000),
    ("worker", "router", 7000),
    ("router", "worker", 7001),
    ("worker", "worker", 7002),
    ("operator", "router", 9090),
    ("prometheus", "router", 9090),
    ("prometheus", "worker", 9090),
    ("router", "*", 53),
    ("worker", "*", 53),
}


def who(peer: Manifest) -> str:
    labels = peer.get("podSelector", {}).get("matchLabels", {})
    if "namespaceSelector" in peer:
        return "operator" if labels else "prometheus"
    return "worker" if WORKER_LABEL in labels else str(labels["pdcluster.dev/role"])


def flows(made: Desired) -> Iterator[tuple[str, str, int]]:
    """Each direction of each policy; what both ends must allow comes twice, once an end."""
    for policy in made.surroundings:
        if policy["kind"] != "NetworkPolicy":
            continue
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        me = who({"podSelector": spec["podSelector"]})
        for rule in spec["ingress"]:
            for peer in [who(one) for one in rule["from"]] if "from" in rule else ["*"]:
                yield from ((peer, me, port["port"]) for port in rule["ports"])
        for rule in spec["egress"]:
            for peer in [who(one) for one in rule["to"]] if "to" in rule else ["*"]:
                yield from ((me, peer, port["port"]) for port in rule["ports"])


def test_policies_allow_these_flows_and_no_other() -> None:
    assert set(flows(rendered(cluster(), KUBERNETES))) == FLOWS


def test_each_process_of_a_router_has_a_port_for_workers() -> None:
    made = rendered(cluster(**{"spec.router.processes": 4}), KUBERNETES)
    policies = [one for one in made.surroundings if one["kind"] == "NetworkPolicy"]
    rules = [r for p in policies for way in ("ingress", "egress") for r in p["spec"][way]]
    control = [port for rule in rules for port in rule["ports"] if port["port"] == 7000]
    assert control == [{"protocol": "TCP", "port": 7000, "endPort": 7003}] * 2


def test_what_both_ends_see_both_allow() -> None:
    found = [one for one in flows(rendered(cluster(), KUBERNETES)) if one[2] != 53]
    ours = [one for one in found if {one[0], one[1]} <= {"worker", "router"}]
    assert sorted(ours) == sorted(list(set(ours)) * 2)


def test_only_a_model_of_the_hub_opens_the_way_there() -> None:
    hub = {"spec.model.source": {"huggingFace": {"repo": "a/b"}}}
    assert set(flows(rendered(cluster(**hub), KUBERNETES))) - FLOWS == {("worker", "*", 443)}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://otel.observability:4318", 4318),
        ("https://otel.example.org", 443),
        ("http://otel.example.org/tempo", 80),
    ],
)
def test_only_tracing_opens_the_way_to_its_collector(endpoint: str, port: int) -> None:
    traced = {"spec.tracing": {"endpoint": endpoint}}
    assert set(flows(rendered(cluster(**traced), KUBERNETES))) - FLOWS == {("router", "*", port)}


def test_clients_can_be_chosen() -> None:
    settings = Settings(clients=(PROMETHEUS,))
    assert ("*", "router", 8000) not in set(flows(rendered(cluster(), settings)))
    assert ("prometheus", "router", 8000) in set(flows(rendered(cluster(), settings)))


def test_one_budget_a_component_over_all_its_revisions() -> None:
    made = rendered(cluster())
    for name in ("router", "prefill", "decode"):
        spec = child(made, "PodDisruptionBudget", f"chat-{name}")["spec"]
        assert spec["maxUnavailable"] == 1
        assert spec["selector"]["matchLabels"] == {
            "pdcluster.dev/cluster": "chat",
            "pdcluster.dev/role": name,
        }


def test_accounts_have_no_rights_and_no_token() -> None:
    made = rendered(cluster())
    for name, workload in (("router", routers(made)), ("workers", pool_set(made, Role.DECODE))):
        account = child(made, "ServiceAccount", f"chat-{name}")
        assert account["automountServiceAccountToken"] is False
        pod = workload["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        assert pod["automountServiceAccountToken"] is False
    assert not [one for one in made.surroundings if "Role" in one["kind"]]


def test_a_pools_handle_says_no_size() -> None:
    assert "spec" not in child(rendered(cluster()), "PDPool", "chat-decode")


def test_rules_are_those_of_the_alerts() -> None:
    of = cluster(**{"spec.slo.ttft": {"percentile": 95, "target": "500ms"}})
    rule = child(rendered(of, Settings(runbooks="https://wiki.example")), "PrometheusRule", "chat")
    assert rule["spec"]["groups"] == alerts.groups(of, "https://wiki.example")


def test_monitor_and_rules_can_be_had_apart() -> None:
    def kinds(**switches: bool) -> set[str]:
        made = rendered(cluster(), Settings(**switches)).surroundings
        return {one["kind"] for one in made} & {"PodMonitor", "PrometheusRule"}

    assert kinds() == {"PodMonitor", "PrometheusRule"}
    assert kinds(rules=False) == {"PodMonitor"}
    assert kinds(pod_monitor=False) == {"PrometheusRule"}
    assert kinds(monitors=False) == set()


def pod_of(**changes: Any) -> Manifest:
    made: Manifest = pool_set(rendered(cluster(**changes)), Role.DECODE)["spec"]["template"]["spec"]
    return made


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ("Preferred", "preferredDuringSchedulingIgnoredDuringExecution"),
        ("Required", "requiredDuringSchedulingIgnoredDuringExecution"),
    ],
)
def test_workers_go_near_any_worker_themselves_included(policy: str, field: str) -> None:
    """An affinity to the other role would leave the first of each waiting for ever."""
    place = {"topologyKey": "rack", "policy": policy}
    made = rendered(cluster(**{"spec.kvTransfer.colocate": place}))
    for role in (Role.PREFILL, Role.DECODE):
        template = pool_set(made, role)["spec"]["template"]
        [term] = template["spec"]["affinity"]["podAffinity"][field]
        term = term.get("podAffinityTerm", term)
        assert term["topologyKey"] == "rack"
        wanted = term["labelSelector"]["matchLabels"]
        assert wanted.items() <= template["metadata"]["labels"].items()
        assert not wanted.items() <= routers(made)["spec"]["template"]["metadata"]["labels"].items()


def test_pods_are_spread_unless_they_are_to_share_a_host() -> None:
    assert pod_of()["topologySpreadConstraints"][0]["whenUnsatisfiable"] == "ScheduleAnyway"
    host = {"topologyKey": "kubernetes.io/hostname"}
    assert "topologySpreadConstraints" not in pod_of(**{"spec.kvTransfer.colocate": host})


def test_requests_and_limits_of_a_worker_with_a_device_are_alike() -> None:
    resources = {"requests": {"cpu": 4}, "limits": {"memory": "64Gi"}}
    template = {"spec": {"containers": [{"name": "engine", "resources": resources}]}}
    [container] = pod_of(**{"spec.decode": {"accelerator": _GPU, "template": template}})[
        "containers"
    ]
    assert container["resources"]["requests"] == container["resources"]["limits"] == {
        "cpu": "4",
        "memory": "64Gi",
        "nvidia.com/gpu": "1",
    }  # fmt: skip
    [container] = pod_of(**{"spec.decode": {"template": template}})["containers"]
    assert container["resources"] == {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi"}}


def test_nixl_gets_an_rdma_device() -> None:
    settings = Settings(host_paths=False, rdma_resource="rdma/shared")
    changes = {"spec.decode.accelerator": _GPU, "spec.kvTransfer.transport": "nixl"}
    made = rendered(cluster(**changes), settings)
    for role, devices in (
        (Role.DECODE, {"nvidia.com/gpu": "1", "rdma/shared": "1"}),
        (Role.PREFILL, {"rdma/shared": "1"}),
    ):
        [container] = pool_set(made, role)["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == {"requests": devices, "limits": devices}


def test_how_long_a_start_may_take() -> None:
    [container] = pod_of(**{"spec.decode.startTimeout": "2h"})["containers"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 7200


def test_volumes_of_the_user_are_mounted() -> None:
    spec = {
        "runtimeClassName": "nvidia",
        "imagePullSecrets": [{"name": "registry"}],
        "volumes": [{"name": "torch", "persistentVolumeClaim": {"claimName": "t"}}],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "EMPTY"}],
                "volumeMounts": [{"name": "torch", "mountPath": "/torch", "readOnly": True}],
            }
        ],
    }
    made = pod_of(**{"spec.decode.template": {"spec": spec}})
    [container] = made["containers"]
    assert {"name": "torch", "persistentVolumeClaim": {"claimName": "t"}} in made["volumes"]
    mount = {"name": "torch", "mountPath": "/torch", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert {"name": "EMPTY"} in container["env"]  # the API server drops an empty value
    assert made["runtimeClassName"] == "nvidia"
    assert made["imagePullSecrets"] == [{"name": "registry"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spec.model.source": {"hostPath": "/models"}},
            "spec.model.source.hostPath: is for `pdcluster up` on one machine: restricted pods "
            "can't mount it; write persistentVolumeClaim, image or huggingFace",
        ),
        (
            {"spec.kvTransfer.transport": "shm"},
            "spec.kvTransfer.transport: is shm, and pods share no memory; write auto or tcp or "
            "nixl",
        ),
    ],
)
def test_what_a_place_does_not_allow(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCluster) as caught:
        rendered(cluster(**changes), KUBERNETES)
    assert [str(error) for error in caught.value.errors] == [message]
