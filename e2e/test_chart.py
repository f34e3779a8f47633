"""Stories of the chart on the real cluster: all that can be switched on, one namespace alone, and
an uninstall under streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import wait_for
from e2e.load import Load, Question
from e2e.prometheus import MONITORING
from e2e.site import CHART, CLAIMED_MODEL, PDCLUSTER, RELEASE, SYSTEM, Site, document, pool
from tests import foreign

NAME = "charted"
DEADLINE_S = 240.0
ONE = {"prefill": pool(1), "decode": pool(1)}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def installed(site: Site) -> Iterator[None]:
    """Whatever a story did to the release: afterwards it is as others expect it."""
    yield
    if RELEASE in site.helm("list", "--namespace", SYSTEM, "--short").split():
        site.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
    site.install()


def apply(site: Site, namespace: str, **spec: Any) -> None:
    made = document(NAME, CLAIMED_MODEL, **{**ONE, **spec})
    made["spec"]["router"]["replicas"] = 1
    site.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump(made))


def decoders(site: Site, namespace: str) -> int:
    return len(site.pods(namespace, "decode"))


@pytest.mark.usefixtures("installed")
def test_all_that_can_be_switched_on(site: Site, model: Path) -> None:
    for crd in foreign.MONITORING:
        site.api.apply(crd)
    try:
        site.install("--values", str(CHART / "ci" / "everything-values.yaml"))
        site.helm("test", RELEASE, "--namespace", SYSTEM)
        for kind in ("PodMonitor", "PrometheusRule"):
            assert site.api.items(MONITORING, kind, SYSTEM), kind
        boards = site.api.items("v1", "ConfigMap", SYSTEM, "grafana_dashboard=1")
        assert boards
        with site.namespace(model) as namespace:
            apply(site, namespace, security={"tls": {"mode": "Auto"}})
            site.wait_ready(namespace, NAME)
            for kind in ("PodMonitor", "PrometheusRule"):
                assert site.api.items(MONITORING, kind, namespace), kind
    finally:
        for crd in foreign.MONITORING:
            site.kubectl("delete", "crd", crd["metadata"]["name"])


@pytest.mark.usefixtures("installed")
def test_one_namespace_alone(site: Site, model: Path) -> None:
    """Whoever installs it there needs no right outside, and what is elsewhere isn't touched."""
    site.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
    with site.namespace(model) as ours, site.namespace(model) as other:
        site.install("--set", f"watchNamespace={ours}", "--set", "crds.enabled=false")
        release = site.helm("get", "manifest", RELEASE, "--namespace", SYSTEM)
        kinds = {one["kind"] for one in yaml.safe_load_all(release) if one}
        assert not kinds & {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
        apply(site, other)
        apply(site, ours)
        site.wait_ready(ours, NAME)
        assert not site.pdcluster(other, NAME).get("status")
        assert not site.pods(other)


@pytest.mark.usefixtures("installed")
def test_an_uninstall_under_streams(site: Site, model: Path, questions: list[Question]) -> None:
    """Without an operator what serves serves on; the next one takes it over as it is."""
    with site.namespace(model) as namespace:
        apply(site, namespace)
        site.wait_ready(namespace, NAME)
        before = uids(site, namespace)
        address = site.address(namespace, NAME)
        with Load(site.layout.namespace_file, address, questions, streams=4) as load:
            site.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait")
            load.until_more(20)
            assert site.api.find(*PDCLUSTER, NAME, namespace), "its CRD was kept, and so was it"
            assert uids(site, namespace) == before
            site.install()
            apply(site, namespace, decode=pool(2))
            wait_for("two", lambda: decoders(site, namespace) == 2, DEADLINE_S)
            site.wait_ready(namespace, NAME)
            load.until_more(8)
        load.assert_flawless()
        assert before < uids(site, namespace), "those that served are still there"


def uids(site: Site, namespace: str) -> set[str]:
    return {pod["metadata"]["uid"] for pod in site.pods(namespace)}
