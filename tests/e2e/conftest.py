"""Clusters and references that the tests of a file share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, serving, spec
from tests.reference import Reference
from tests.tiny_model import tiny_model_dir


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each of these starts processes that load a model."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model, threads=1)  # a tiny model gains nothing by more


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker, left as they were by each test. Prompts always go
    from one to the other: how short or how cached one is must not decide what is tested."""
    one: dict[str, int] = {"replicas": 1}
    router = {"routing": {"disaggregate": "always"}}
    made = spec(model, prefill=one, decode=one, router=router)
    with serving(made, tmp_path_factory.mktemp("cluster")) as running:
        yield running
