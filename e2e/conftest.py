"""One cluster for all stories, with the operator installed by Helm as a user installs it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import load
from e2e.load import Question
from e2e.site import Site, running
from tests.tiny_model import tiny_model_dir

NAME = os.environ.get("PDCLUSTER_E2E_CLUSTER", "e2e")  # who works beside others takes another


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The cluster with the operator; all of it goes at the end."""
    with running(NAME) as place:
        yield place


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="session")
def questions(model: Path) -> list[Question]:
    return load.questions(model)
