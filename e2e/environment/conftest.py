"""A cluster with our images and nothing else in it: no operator, no chart."""

import secrets
from collections.abc import Iterator

import pytest

from e2e.cluster import cluster, images
from e2e.cluster.api import Api, wait_for
from e2e.cluster.envtest import Kube
from e2e.cluster.layout import Layout

NAME = "e2e"  # the stories' cluster: whoever comes first starts it


@pytest.fixture(scope="session")
def layout() -> Iterator[Layout]:
    found = Layout(NAME)
    cluster.up(found)
    try:
        images.provide(found)
        yield found
    finally:
        cluster.down(found)


@pytest.fixture(scope="session")
def kube(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    found = Kube(cluster.kubeconfig_of(layout), tmp_path_factory.mktemp("kubeconfigs"))
    yield found
    found.close()


@pytest.fixture
def api(kube: Kube) -> Api:
    return kube.api


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    """Under the `restricted` Pod Security Standard."""
    name = f"test-{secrets.token_hex(3)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": name, "labels": labels}
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    wait_for(
        "the default ServiceAccount", lambda: api.find("v1", "ServiceAccount", "default", name)
    )
    yield name
    api.delete("v1", "Namespace", name)  # goes by itself; the next test has its own
