"""Covers what of the chart needs no Helm: its CRDs and rights are the repository's, its schema and
its table of values those of values.yaml, versions agree.
"""

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from scripts import chart

CHART = chart.ROOT / chart.CHART


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the chart is made of, and the chart, to break."""
    for name in ("crds", "operator/pd_operator/rbac.yaml", "charts/pdcluster"):
        source, target = chart.ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return tmp_path


def test_what_is_generated_is_up_to_date() -> None:
    assert chart.stale() == []


@pytest.mark.parametrize(
    "name",
    [
        "templates/crd-pdclusters.yaml",
        "templates/crd-pdpools.yaml",
        "files/rbac.yaml",
        "files/rules.yaml",
        "values.schema.json",
        "README.md",
    ],
)
def test_a_difference_is_found(copy: Path, name: str) -> None:
    file = copy / "charts" / "pdcluster" / name
    head, found, rest = file.read_text().rpartition("pdcluster")
    file.write_text(f"{head}other{rest}" if found else "")
    assert chart.stale(copy) == [f"charts/pdcluster/{name}"]


def test_a_file_that_is_missing_is_found(copy: Path) -> None:
    (copy / chart.CHART / "values.schema.json").unlink()
    assert chart.stale(copy) == ["charts/pdcluster/values.schema.json"]


def test_a_value_changed_makes_schema_and_table_stale(copy: Path) -> None:
    values = copy / chart.CHART / "values.yaml"
    values.write_text(values.read_text().replace("# From where on", "# Wherefrom", 1))
    folder = chart.CHART.as_posix()
    assert chart.stale(copy) == [f"{folder}/values.schema.json", f"{folder}/README.md"]


def test_a_readme_without_a_place_for_the_table_is_refused(copy: Path) -> None:
    (copy / chart.CHART / "README.md").write_text("# The chart\n")
    with pytest.raises(ValueError, match="has no '## Values'"):
        chart.files(copy)


def test_a_template_of_a_crd_that_is_no_more_is_found(copy: Path) -> None:
    next((copy / "crds").glob("*pdpools.yaml")).unlink()
    assert chart.stale(copy) == ["charts/pdcluster/templates/crd-pdpools.yaml"]


@pytest.mark.parametrize("text", ["a: '{{ b }}'\nmetadata:\n  name: a\n", "kind: A\n"])
def test_what_helm_would_misread_is_refused(copy: Path, text: str) -> None:
    next((copy / "crds").glob("*pdpools.yaml")).write_text(text)
    with pytest.raises(ValueError, match="Helm"):
        chart.files(copy)


def test_versions_agree() -> None:
    project = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = project["project"]["version"]
    assert (described["version"], described["appVersion"]) == (version, version)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in ("engine", "router"):
        assert values[part]["image"] == f"pdcluster-{part}:{version}"
