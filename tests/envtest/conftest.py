"""An API server for tests: one a test session, a namespace of its own for each test.

KUBECONFIG=… PDCLUSTER_TEST_EXISTING=1 takes a cluster that is there; tests that need to look
into the API server, or to break it, are skipped then. README.md says how to use it.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from e2e.cluster import envtest
from e2e.cluster.api import Api, install_crds, wait_for
from e2e.cluster.audit import Audit
from e2e.cluster.envtest import ApiServer, EnvTest, Kube
from e2e.cluster.process import Child

CRDS = Path(__file__).resolve().parents[2] / "crds"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that is here needs the binaries, and minutes in all."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.kube)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The API server."""
    config = envtest.existing()
    if config is None:
        with envtest.running() as own:
            yield own
        return
    there = Kube(config, tmp_path_factory.mktemp("kubeconfigs"))
    try:
        yield there
    finally:
        there.close()


@pytest.fixture(scope="session")
def crds(kube: Kube) -> list[str]:
    """Our CustomResourceDefinitions, served; their names."""
    return install_crds(kube.api, sorted(CRDS.glob("*.yaml")))


@pytest.fixture
def own_kube(kube: Kube) -> EnvTest:
    """The API server where it is ours to look into and to break."""
    if not isinstance(kube, EnvTest):
        pytest.skip("needs an API server of its own")
    return kube


@pytest.fixture
def api(kube: Kube) -> Api:
    return kube.api


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """A fresh namespace, with the ServiceAccount that pods need."""
    name = f"test-{secrets.token_hex(4)}"
    kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    if isinstance(kube, EnvTest):  # elsewhere the controller manager makes it
        account = {"name": "default", "namespace": name}
        kube.api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    else:
        wait_for(
            "the default ServiceAccount",
            lambda: kube.api.find("v1", "ServiceAccount", "default", name),
        )
    yield name
    kube.api.delete("v1", "Namespace", name)  # stays Terminating where no controllers run


@pytest.fixture
def audit(own_kube: EnvTest) -> Audit:
    """The requests that the API server answers from now on."""
    return own_kube.audit()


@pytest.fixture
def apiserver(own_kube: EnvTest) -> Iterator[ApiServer]:
    """The API server's process, to kill and to freeze; it's restored afterwards."""
    yield own_kube.apiserver
    own_kube.apiserver.restore()


@pytest.fixture
def controllers(own_kube: EnvTest) -> Iterator[Callable[..., Child]]:
    """`controllers("garbage-collector-controller")` runs these until the test's end."""
    with ExitStack() as started:

        def run(*names: str) -> Child:
            context: AbstractContextManager[Child] = own_kube.controllers(*names)
            return started.enter_context(context)

        yield run
