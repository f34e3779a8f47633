"""Story: TLS between pods is asked for by one word. Certificates come before pods, are made anew
under streams that run, and go with the PDCluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.api import wait_for
from e2e.load import Load, Question
from e2e.site import CLAIMED_MODEL, PDCLUSTER, Site, document, pool

NAME = "tls"
SECRETS = {f"{NAME}-tls-{part}" for part in ("ca", "router", "workers")}
DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def namespace(site: Site, model: Path) -> Iterator[str]:
    """With an operator that may keep certificates."""
    site.install("--set", "certificates.enabled=true")
    try:
        with site.namespace(model) as name:
            yield name
    finally:
        site.install()


def secrets(site: Site, namespace: str) -> dict[str, str]:
    """Their uids, by name."""
    label = f"pdcluster.dev/cluster={NAME}"
    found = site.api.items("v1", "Secret", namespace, label)
    return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found}


def test_tls_by_one_word(site: Site, namespace: str, questions: list[Question]) -> None:
    wanted = {"tls": {"mode": "Auto"}}
    made = document(NAME, CLAIMED_MODEL, prefill=pool(1), decode=pool(1), security=wanted)
    site.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump(made))
    site.wait_ready(namespace, NAME)
    before = secrets(site, namespace)
    assert set(before) == SECRETS
    with Load(
        site.layout.namespace_file, site.address(namespace, NAME), questions, streams=2
    ) as load:
        site.kubectl("delete", "secret", "-n", namespace, f"{NAME}-tls-workers")

        def made_anew() -> bool:
            now = secrets(site, namespace)
            return set(now) == SECRETS and now != before

        wait_for("a new certificate", made_anew, 60)
        load.until_more(4)
    load.assert_flawless()


def test_they_go_with_it(site: Site, namespace: str) -> None:
    site.api.delete(*PDCLUSTER, NAME, namespace)
    wait_for("no Secret of it", lambda: not secrets(site, namespace), DEADLINE_S)
