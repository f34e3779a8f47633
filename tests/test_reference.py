"""Covers scripts.reference: the pages that are made of the code are up to date, name every field,
metric and command, and a difference is found; links of pages lead somewhere.
"""

import shutil
from pathlib import Path

import pytest
import yaml

from pd_cli import kubectl, main
from scripts import exports, reference
from scripts.check_repo import broken_links, tracked_files

pytestmark = pytest.mark.slow

PAGES = [path.as_posix() for path in reference.files()]


def test_pages_are_up_to_date() -> None:
    assert reference.stale() == []


@pytest.mark.parametrize("name", PAGES)
def test_a_difference_is_found(tmp_path: Path, name: str) -> None:
    for part in ("docs/reference", "crds"):
        shutil.copytree(reference.ROOT / part, tmp_path / part)
    assert reference.stale(tmp_path) == []
    page = tmp_path / name
    page.write_text(page.read_text() + "more\n")
    assert reference.stale(tmp_path) == [name]
    page.unlink()
    assert reference.stale(tmp_path) == [name]


def test_metrics_and_commands_are_all_there() -> None:
    metrics = reference.metrics()
    for found in exports.exported().values():
        assert found
        for one in found:
            assert f"`{one.series}`" in metrics
    commands = reference.commands()
    found = [f"pdcluster {name}" for name in main._COMMANDS]
    found += [f"kubectl pd {name}" for name in kubectl.main.commands]
    assert len(found) > 15
    assert list(reference.all_commands()) == found
    for name in found:
        assert f"## {name}\n" in commands
        assert f"| `{name}` | " in commands


def test_fields_of_pools_are_said_once() -> None:
    page = reference.fields(reference.ROOT)
    assert "`spec.prefill.engine.chunkTokens`" in page
    assert "`spec.decode.engine.chunkTokens`" not in page
    assert "`spec.decode`" in page
    crd = yaml.safe_load((reference.ROOT / "crds/pdcluster.dev_pdclusters.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in schema["properties"]:
        assert f"`spec.{name}`" in page


def test_links_lead_somewhere(tmp_path: Path) -> None:
    assert broken_links(tracked_files()) == []
    page = tmp_path / "page.md"
    page.write_text("[a](b.md#c) [d](page.md) [e](https://example.com/x) [f](#g)")
    assert broken_links([page]) == [f"{page}: links to b.md, which isn't there"]


def test_each_rule_stands_at_its_field() -> None:
    page = reference.fields(reference.ROOT)
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    disk = rows["spec.prefill.engine.retention.disk"]
    assert "is written through host memory, of which there is none: write hostMemory" in disk
    assert "host memory, of which" not in rows["spec.prefill.engine.retention"]
    assert "a pool is missing" in rows["spec"]
    assert "write slo.ttft, or mode: External" in rows["spec.prefill.scaling"]
    assert "write slo.tpot, or mode: External" in rows["spec.decode.scaling"]
    assert "write one of volumes" in rows["spec.router.template.spec.containers[]"]
