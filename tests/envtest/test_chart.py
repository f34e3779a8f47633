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
from pd_operator import flags
from scripts.chart import CHART, ROOT

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
    for one in objects:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "pdcluster-operator"
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
    wide = rendered()
    name = f"{NAMESPACE}-pdcluster"
    assert rules_of(wide, "ClusterRole", name) == wanted["namespaced"] + wanted["clusterWide"]
    assert rules_of(wide, "Role", "pdcluster-lease") == wanted["lease"]
    narrow = rendered("--set", "watchNamespace=serving")
    assert rules_of(narrow, "Role", "pdcluster") == wanted["namespaced"]
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


@pytest.mark.parametrize(
    "wrong",
    [
        "nonsense=1",
        "image.sha=x",
        "image.digest=sha256:abc",
        "replicas=-1",
        "logLevel=loud",
        "watchNamespace=Not_A_Name",
        "networkPolicies.clients[0].podSelector.a=b",
        "networkPolicies.clients=everybody",
        "crds.enabled=perhaps",
        "extraArgs[0]=resync",
    ],
)
def test_unknown_and_wrong_values_are_refused(wrong: str) -> None:
    with pytest.raises(AssertionError, match="schema"):
        rendered("--set", wrong)


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
