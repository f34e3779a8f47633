"""The chart with Helm and a real API server: lint and every feature's example, what the server says
to each object, the `restricted` Pod Security Standard, exactly the operator's rights, and a
release's life: installed, upgraded, uninstalled, with the CRDs staying.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import build, envtest
from e2e.cluster.envtest import EnvTest, Kube
from pd_operator import alerts, flags
from scripts import chart_values
from scripts.chart import CHART, ROOT
from tests.foreign import MONITORING

HELM_DEADLINE_S = 60
KUBE_VERSION = "1.34.4"
NAMESPACE = "pdcluster-system"
EXAMPLES = sorted((ROOT / CHART / "ci").glob("*-values.yaml"))
LONG = "a-release-with-a-name-that-is-as-long-as-helm-allows"


@pytest.fixture(scope="module")
def server() -> Iterator[EnvTest]:
    """One of its own: a release wants the CRDs for itself."""
    with envtest.running() as own:
        metadata = {
            "name": NAMESPACE,
            "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        }
        own.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        kinds = yaml.safe_dump_all(MONITORING)
        own.kubectl("apply", "-f", "-", input=kinds)
        own.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=30s")
        for name in ("default", "pdcluster"):
            account = {"name": name, "namespace": NAMESPACE}
            own.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
        yield own


def helm(*arguments: str, kubeconfig: Path | None = None) -> str:
    place = ["--kubeconfig", str(kubeconfig)] if kubeconfig else []
    done = subprocess.run(
        [str(build.built("helm") / "helm"), *arguments, *place],
        capture_output=True,
        text=True,
        timeout=HELM_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(*arguments: str, release: str = "pdcluster") -> list[dict[str, Any]]:
    text = helm(
        *("template", release, str(ROOT / CHART), "--namespace", NAMESPACE),
        *("--kube-version", KUBE_VERSION, *arguments),
    )
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(server: Kube, values: Path) -> None:
    helm("lint", str(ROOT / CHART), "--strict", "--kube-version", KUBE_VERSION, "-f", str(values))
    objects = rendered("-f", str(values))
    text = yaml.safe_dump_all(objects)
    server.kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", input=text)
    called = yaml.safe_load(values.read_text()).get("nameOverride", "pdcluster")
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == f"{called}-operator"
        assert labels["app.kubernetes.io/part-of"] == "pdcluster"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        scoped = one["kind"] not in (
            "CustomResourceDefinition",
            "ClusterRole",
            "ClusterRoleBinding",
        )
        assert ("namespace" in one["metadata"]) == scoped


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_pods_are_restricted_and_the_operator_knows_its_flags(server: Kube, values: Path) -> None:
    objects = rendered("-f", str(values), "--set", "priorityClassName=")
    [deployment] = of_kind(objects, "Deployment")
    template = deployment["spec"]["template"]
    spec = {**template["spec"], "serviceAccountName": "pdcluster"}
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "operator", "labels": template["metadata"]["labels"]},
            "spec": spec,
        },
        *of_kind(objects, "Pod"),
    ]
    for pod in pods:
        server.kubectl(
            *("create", "-n", NAMESPACE, "--dry-run=server", "-f", "-"), input=json.dumps(pod)
        )
    flags.parse(spec["containers"][0]["args"])


def rules_of(objects: list[dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
    [found] = [one["rules"] for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    return list(found)


def test_rights_are_exactly_the_operators() -> None:
    wanted = yaml.safe_load((ROOT / "operator/pd_operator/rbac.yaml").read_text())
    tokens = wanted["namespaced"] + wanted["peerTokens"]
    wide = rendered()
    name = f"{NAMESPACE}-pdcluster"
    assert rules_of(wide, "ClusterRole", name) == tokens + wanted["clusterWide"]
    more = rules_of(rendered("--set", "certificates.enabled=true"), "ClusterRole", name)
    assert more == tokens + wanted["certificates"] + wanted["clusterWide"]
    less = rules_of(rendered("--set", "peerTokens.enabled=false"), "ClusterRole", name)
    assert less == wanted["namespaced"] + wanted["clusterWide"]
    assert rules_of(wide, "Role", "pdcluster-lease") == wanted["lease"]
    narrow = rendered("--set", "watchNamespace=serving")
    assert rules_of(narrow, "Role", "pdcluster") == tokens
    assert rules_of(narrow, "Role", "pdcluster-lease") == wanted["lease"]
    assert not of_kind(narrow, "ClusterRole")
    assert not of_kind(narrow, "ClusterRoleBinding")
    roles = of_kind(narrow, "Role") + of_kind(narrow, "RoleBinding")
    assert {one["metadata"]["namespace"] for one in roles} == {"serving"}


def test_the_operator_is_let_in_to_routers() -> None:
    [deployment] = of_kind(rendered(), "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    [peer] = flags.parse(arguments).options.settings.operators
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert peer.namespace_labels == {"kubernetes.io/metadata.name": NAMESPACE}
    assert peer.pod_labels.items() <= labels.items()
    assert peer.pod_labels == deployment["spec"]["selector"]["matchLabels"]


REFUSED = {
    "nonsense=1": "at '': additional properties 'nonsense' not allowed",
    "image.sha=x": "at '/image': additional properties 'sha' not allowed",
    "image.digest=sha256:abc": "at '/image/digest': 'sha256:abc' does not match pattern",
    "replicas=-1": "at '/replicas': minimum: got -1, want 0",
    "logLevel=loud": "at '/logLevel': value must be one of 'debug', 'info', 'warning', 'error'",
    "watchNamespace=Not_A_Name": "at '/watchNamespace': 'Not_A_Name' does not match pattern",
    "networkPolicies.clients[0].podSelector.a=b": (
        "at '/networkPolicies/clients/0': additional properties 'podSelector' not allowed"
    ),
    "networkPolicies.clients=everybody": "at '/networkPolicies/clients': got string, want array",
    "crds.enabled=perhaps": "at '/crds/enabled': got string, want boolean",
    "extraArgs[0]=resync": "at '/extraArgs/0': 'resync' does not match pattern '^--'",
    "dashboards.labels.a=1": "at '/dashboards/labels/a': got number, want string",
    "monitors.runbooks=wiki": "at '/monitors/runbooks': 'wiki' does not match pattern",
    "metrics.rules=true": "at '/metrics/rules': got boolean, want object",
    "affinity.podAffinty.a=b": "at '/affinity': additional properties 'podAffinty' not allowed",
    "resources.limit.cpu=1": "at '/resources': additional properties 'limit' not allowed",
    "tolerations[0].effect=Never": "at '/tolerations/0/effect': value must be one of",
    "topologySpreadConstraints[0].maxSkew=1": (
        "at '/topologySpreadConstraints/0': missing properties 'topologyKey', 'whenUnsatisfiable'"
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_unknown_and_wrong_values_are_refused(wrong: str) -> None:
    with pytest.raises(AssertionError) as refused:
        rendered("--set", wrong)
    assert REFUSED[wrong] in str(refused.value)


OTHERWISE: dict[str, Any] = {
    "crds.enabled": False,
    "affinity": {"podAffinity": {}},
    "extraArgs": ["--resync-s=1"],
    "image.digest": f"sha256:{'1' * 64}",
    "image.pullPolicy": "Always",
    "imagePullSecrets": [{"name": "other"}],
    "logLevel": "error",
    "monitors.runbooks": "https://other.example",
    "networkPolicies.clients": [{"podLabels": {"a": "b"}}],
    "networkPolicies.monitors": [{"podLabels": {"a": "b"}}],
    "rdmaResource": "other/rdma",
    "resources": {"requests": {"cpu": 3}},
    "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
}
"""Another value than the default, where a type doesn't say one."""


LEAVES = {
    ".".join(one.path): one
    for one in chart_values.leaves(chart_values.read((ROOT / CHART / "values.yaml").read_text()))
}
EVERYTHING = ROOT / CHART / "ci" / "everything-values.yaml"


def other(one: chart_values.Value) -> Any:
    """A value that neither the chart's own nor that of the everything example is."""
    now: Any = yaml.safe_load(EVERYTHING.read_text())
    for name in one.path:
        now = now.get(name, {}) if isinstance(now, dict) else {}
    now = one.default if now in ({}, []) else now
    if isinstance(now, dict):
        return {"other": "value"}
    return {bool: lambda: not now, int: lambda: now + 1, str: lambda: "other"}[type(now)]()


@pytest.mark.parametrize("name", LEAVES)
def test_each_value_changes_what_is_made(name: str) -> None:
    value = OTHERWISE[name] if name in OTHERWISE else other(LEAVES[name])
    base = ["-f", str(EVERYTHING)]
    assert rendered(*base, "--set-json", f"{name}={json.dumps(value)}") != rendered(*base)


def values(name: str) -> list[dict[str, Any]]:
    return rendered("-f", str(ROOT / CHART / "ci" / f"{name}-values.yaml"))


def test_what_watches_is_there_only_where_it_is_wanted() -> None:
    kinds = {one["kind"] for one in rendered()}
    assert not kinds & {"PodMonitor", "PrometheusRule", "ConfigMap", "NetworkPolicy"}
    everything = {one["kind"] for one in values("everything")}
    assert everything >= {"PodMonitor", "PrometheusRule", "ConfigMap", "NetworkPolicy"}


def test_dashboards_are_config_maps_that_the_sidecar_finds() -> None:
    found = of_kind(values("dashboards"), "ConfigMap")
    boards = sorted((ROOT / CHART / "dashboards").glob("*.json"))
    assert len(found) == len(boards) == 3
    for made, path in zip(found, boards, strict=True):
        assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert made["metadata"]["annotations"] == {"grafana_folder": "PDCluster"}
        [(name, text)] = made["data"].items()
        assert name == f"pdcluster-{path.name}"
        assert json.loads(text) == json.loads(path.read_text())


def test_alerts_about_the_operator_are_those_of_the_code() -> None:
    objects = values("monitoring")
    [rule] = of_kind(objects, "PrometheusRule")
    assert rule["spec"]["groups"] == alerts.operator_groups("https://wiki.example/runbooks")
    [monitor] = of_kind(objects, "PodMonitor")
    [deployment] = of_kind(objects, "Deployment")
    selected = monitor["spec"]["selector"]["matchLabels"]
    assert selected == deployment["spec"]["selector"]["matchLabels"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    for one in (rule, monitor):
        assert one["metadata"]["labels"]["release"] == "prometheus"


def test_the_operators_policy_lets_in_monitors_and_the_test() -> None:
    objects = values("everything")
    [policy] = of_kind(objects, "NetworkPolicy")
    [rule] = policy["spec"]["ingress"]
    test, *monitors = rule["from"]
    [pod] = of_kind(objects, "Pod")
    assert test["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert monitors == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
            "podSelector": {},
        },
        {
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
        },
    ]


def test_names_follow_the_release_and_fit() -> None:
    long = rendered(release=LONG)
    [deployment] = of_kind(long, "Deployment")
    assert deployment["metadata"]["name"].startswith(LONG[:40])
    assert all(len(one["metadata"]["name"]) <= 125 for one in long)
    assert len(of_kind(long, "Service")[0]["metadata"]["name"]) <= 63
    names = {(one["kind"], one["metadata"]["name"]) for one in long}
    fixed = {key for key in names if key[0] != "CustomResourceDefinition"}
    others = {(one["kind"], one["metadata"]["name"]) for one in rendered()}
    assert not fixed & others


def test_a_releases_life(server: EnvTest) -> None:
    """Installed with its CRDs, upgraded, uninstalled: the CRDs stay, and are taken up again."""

    def run(*arguments: str) -> str:
        return helm(*arguments, "--namespace", NAMESPACE, kubeconfig=server.kubeconfig)

    server.api.delete("v1", "ServiceAccount", "pdcluster", NAMESPACE)
    crd = ("apiextensions.k8s.io/v1", "CustomResourceDefinition", "pdclusters.pdcluster.dev")
    run("install", "pdcluster", str(ROOT / CHART))
    kept = server.api.get(*crd)
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    source = yaml.safe_load((ROOT / "crds/pdcluster.dev_pdclusters.yaml").read_text())
    version, wanted = kept["spec"]["versions"][0], source["spec"]["versions"][0]
    fields = [
        one["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
        for one in (version, wanted)
    ]
    assert set(fields[0]) == set(fields[1])
    run("upgrade", "pdcluster", str(ROOT / CHART), "--set", "replicas=2")
    deployment = server.api.get("apps/v1", "Deployment", "pdcluster", NAMESPACE)
    assert deployment["spec"]["replicas"] == 2
    run("uninstall", "pdcluster")
    assert server.api.find("apps/v1", "Deployment", "pdcluster", NAMESPACE) is None
    assert server.api.find(*crd) is not None
    run("install", "pdcluster", str(ROOT / CHART))
    assert server.api.get(*crd)["metadata"]["uid"] == kept["metadata"]["uid"]
