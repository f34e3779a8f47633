"""Story: the previous release serves, and is upgraded to this one under load. Not one request
fails, what was scaled stays, and no pod of a pool is replaced.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml

from e2e import previous
from e2e.cluster import images
from e2e.cluster.api import Manifest, wait_for
from e2e.cluster.images import Image
from e2e.load import Load, Question
from e2e.site import CLAIMED_MODEL, PDPOOL, Site, document, pool
from e2e.test_pools import external, uids

NAME = "upgraded"
DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return previous.unpack(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="module")
def installed(site: Site, tree: Path) -> Iterator[None]:
    """The previous release stands in for ours; at the end ours is there again."""
    made: dict[str, Image] = {name: previous.image(name, tree) for name in images.DEFAULT}
    with images.alone():
        for one in made.values():
            images.build(one)
            images.load(one, site.layout)
    try:
        site.install(
            "--set", "image.tag=previous",
            "--set", f"engine.image={made['engine-thin'].reference}",
            "--set", f"router.image={made['router'].reference}",
            chart=tree / "charts" / "pdcluster",
        )  # fmt: skip
        yield
    finally:
        site.install()


@pytest.mark.usefixtures("installed")
def test_an_upgrade_under_load(site: Site, model: Path, questions: list[Question]) -> None:
    with site.namespace(model) as namespace:
        made = document(NAME, CLAIMED_MODEL, prefill=pool(1), decode=external(1, 3))
        site.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump(made))
        site.wait_ready(namespace, NAME)
        decode = f"{NAME}-decode"
        site.kubectl("scale", "pdpool", decode, "-n", namespace, "--replicas=2")
        wait_for("two", partial(_decoders, site, namespace, 2), DEADLINE_S)
        site.wait_ready(namespace, NAME)
        before, operators = uids(workers(site, namespace)), site.operators().keys()
        with Load(
            site.layout.namespace_file, site.address(namespace, NAME), questions, streams=4
        ) as load:
            site.install()
            wait_for("the old operator's end", lambda: not operators & site.operators().keys(), 60)
            site.wait_ready(namespace, NAME)
            load.until_more(16)
        load.assert_flawless()
        assert site.api.get(*PDPOOL, decode, namespace)["spec"]["replicas"] == 2
        assert uids(workers(site, namespace)) == before, "routers are rendered anew, pools aren't"


def workers(site: Site, namespace: str) -> list[Manifest]:
    return [*site.pods(namespace, "prefill"), *site.pods(namespace, "decode")]


def _decoders(site: Site, namespace: str, count: int) -> bool:
    return len(site.pods(namespace, "decode")) == count
