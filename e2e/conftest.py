"""One cluster for all stories, with the operator installed by Helm as a user installs it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import build, cluster, images
from e2e.cluster.envtest import Kube
from e2e.cluster.layout import Layout
from e2e.load import Question
from e2e.site import Site
from tests.reference import Reference
from tests.tiny_model import tiny_model_dir

NAME = os.environ.get("PDCLUSTER_E2E_CLUSTER", "e2e")  # who works beside others takes another
QUESTIONS = 12
ANSWER_TOKENS = 120


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster with the operator; all of it goes at the end."""
    layout = Layout(NAME)
    build.build(build.PROGRAMS["helm"])
    cluster.up(layout)
    try:
        images.provide(layout)
        kube = Kube(cluster.kubeconfig_of(layout), tmp_path_factory.mktemp("kubeconfigs"))
        try:
            place = Site(kube, layout)
            place.install()
            yield place
        finally:
            kube.close()
    finally:
        cluster.down(layout)


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="session")
def questions(model: Path) -> list[Question]:
    """Prompts of many lengths, with what transformers says to them."""
    reference = Reference(model, threads=2)
    found = []
    for number in range(QUESTIONS):
        words = "".join(f"{number * 100 + i} boats go out to the sea, " for i in range(400))
        body = {
            "model": "tiny",
            "prompt": words[: 150 + 170 * number],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        new = reference.generate(str(body["prompt"]), ANSWER_TOKENS, ignore_eos=True)
        found.append(Question(body, reference.decode(new)))
    return found
