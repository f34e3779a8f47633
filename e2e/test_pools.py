"""Story: pools are scaled from outside where that is asked for, and nowhere else; what can't
run says so without taking anything else down."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import Manifest, wait_for
from e2e.load import Load, Question
from e2e.site import CHART, CLAIMED_MODEL, PDPOOL, Site, document, pool

NAME = "pools"
DEADLINE_S = 240.0
DECODE = f"{NAME}-decode"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def namespace(site: Site, model: Path) -> Iterator[str]:
    with site.namespace(model) as name:
        yield name


def external(low: int, high: int) -> dict[str, Any]:
    made = pool(1)
    del made["replicas"]
    return made | {"scaling": {"mode": "External", "minReplicas": low, "maxReplicas": high}}


def apply(site: Site, namespace: str, **spec: Any) -> None:
    text = yaml.safe_dump(document(NAME, CLAIMED_MODEL, **spec))
    site.kubectl("apply", "-n", namespace, "-f", "-", input=text)


def has_pods(site: Site, namespace: str, count: int) -> bool:
    return len(site.pods(namespace, "decode")) == count


def test_kubectl_scale_counts_in_external_mode(site: Site, namespace: str) -> None:
    apply(site, namespace, prefill=pool(1), decode=external(1, 3))
    site.wait_ready(namespace, NAME)
    assert has_pods(site, namespace, 1)
    for replicas, pods in ((2, 2), (1, 1)):
        site.kubectl("scale", "pdpool", DECODE, "-n", namespace, f"--replicas={replicas}")
        wait_for("the pods", partial(has_pods, site, namespace, pods), DEADLINE_S)
        assert site.api.get(*PDPOOL, DECODE, namespace)["spec"]["replicas"] == replicas
    site.wait_ready(namespace, NAME)


def test_helm_upgrade_brings_new_crds_and_keeps_what_was_scaled(
    site: Site, namespace: str, questions: list[Question], tmp_path: Path
) -> None:
    apply(site, namespace, prefill=pool(1), decode=external(1, 3))
    site.wait_ready(namespace, NAME)
    site.kubectl("scale", "pdpool", DECODE, "-n", namespace, "--replicas=2")
    wait_for("the pods", partial(has_pods, site, namespace, 2), DEADLINE_S)
    site.wait_ready(namespace, NAME)
    before = uids(site.pods(namespace))
    operator = site.operators().keys()
    with Load(
        site.layout.namespace_file, site.address(namespace, NAME), questions, streams=2
    ) as load:
        site.install("--set", "logLevel=debug", chart=next_chart(tmp_path))
        wait_for("the column", lambda: "SHIPPED" in listed(site, namespace), 60)
        wait_for("the old operator's end", lambda: not operator & site.operators().keys(), 60)
        site.install()
        wait_for("no column", lambda: "SHIPPED" not in listed(site, namespace), 60)
        load.until_more(4)
    load.assert_flawless()
    assert site.api.get(*PDPOOL, DECODE, namespace)["spec"]["replicas"] == 2
    assert uids(site.pods(namespace)) == before


def listed(site: Site, namespace: str) -> str:
    return site.kubectl("get", "pdc", NAME, "-n", namespace)


def uids(objects: list[Manifest]) -> set[str]:
    return {one["metadata"]["uid"] for one in objects}


def next_chart(folder: Path) -> Path:
    """Our chart as a later release may have it: with one more column."""
    chart = folder / "pdcluster"
    shutil.copytree(CHART, chart)
    crd = chart / "templates" / "crd-pdclusters.yaml"
    text = crd.read_text()
    heading = "      additionalPrinterColumns:\n"
    assert text.count(heading) == 1
    column = "        - {name: SHIPPED, type: string, jsonPath: .metadata.uid}\n"
    crd.write_text(text.replace(heading, heading + column))
    return chart


def test_kubectl_scale_is_set_back_where_replicas_are_given(site: Site, namespace: str) -> None:
    apply(site, namespace, prefill=pool(1), decode=pool(1))
    site.wait_ready(namespace, NAME)
    site.kubectl("scale", "pdpool", DECODE, "-n", namespace, "--replicas=3")

    def set_back() -> bool:
        return bool(site.api.get(*PDPOOL, DECODE, namespace)["spec"]["replicas"] == 1)

    wait_for("the old number", set_back, 60)
    wait_for("one pod", partial(has_pods, site, namespace, 1), DEADLINE_S)
    events = site.kubectl("get", "events", "-n", namespace)
    assert "ScaleReverted" in events


def test_a_gpu_that_is_not_there_is_named_and_blocks_nobody(
    site: Site, namespace: str, questions: list[Question]
) -> None:
    apply(site, namespace, prefill=pool(1), decode=pool(1))
    site.wait_ready(namespace, NAME)
    with Load(
        site.layout.namespace_file, site.address(namespace, NAME), questions, streams=2
    ) as load:
        apply(site, namespace, prefill=pool(1), decode=pool(30))

        def told() -> bool:
            one = site.condition(namespace, NAME, "DecodeReady")
            return one.get("reason") == "Unschedulable" and "nvidia.com/gpu" in one["message"]

        wait_for("what is missing", told, 120)
        apply(site, namespace, prefill=pool(1), decode=pool(1))
        site.wait_ready(namespace, NAME)
        wait_for("one pod", partial(has_pods, site, namespace, 1), DEADLINE_S)
        load.until_more(4)
    load.assert_flawless()


def test_an_image_that_does_not_exist_takes_nothing_down(
    site: Site, namespace: str, questions: list[Question]
) -> None:
    apply(site, namespace, prefill=pool(1), decode=pool(1))
    site.wait_ready(namespace, NAME)
    with Load(
        site.layout.namespace_file, site.address(namespace, NAME), questions, streams=2
    ) as load:
        broken = pool(1)
        broken["template"]["spec"]["containers"][0]["image"] = "pdcluster.test/nothing:1"
        apply(site, namespace, prefill=pool(1), decode=broken)

        def told() -> bool:
            one = site.condition(namespace, NAME, "Degraded")
            return one.get("status") == "True" and "pdcluster.test/nothing:1" in one["message"]

        wait_for("the image's name", told, 120)
        load.until_more(4)
        apply(site, namespace, prefill=pool(1), decode=pool(1))
        site.wait_ready(namespace, NAME)
        load.until_more(4)
    load.assert_flawless()
    assert site.condition(namespace, NAME, "Degraded")["status"] == "False"
