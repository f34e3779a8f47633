"""Covers what of the chart needs no Helm: its CRDs and rights are the repository's, its schema
knows every value and refuses others, versions agree.
"""

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    ],
)
def test_a_difference_is_found(copy: Path, name: str) -> None:
    file = copy / "charts" / "pdcluster" / name
    file.write_text(file.read_text().replace("pdcluster", "other", 1))
    assert chart.stale(copy) == [f"charts/pdcluster/{name}"]
    file.unlink()
    assert chart.stale(copy) == [f"charts/pdcluster/{name}"]


def test_a_template_of_a_crd_that_is_no_more_is_found(copy: Path) -> None:
    next((copy / "crds").glob("*pdpools.yaml")).unlink()
    assert chart.stale(copy) == ["charts/pdcluster/templates/crd-pdpools.yaml"]


@pytest.mark.parametrize("text", ["a: '{{ b }}'\nmetadata:\n  name: a\n", "kind: A\n"])
def test_what_helm_would_misread_is_refused(copy: Path, text: str) -> None:
    next((copy / "crds").glob("*pdpools.yaml")).write_text(text)
    with pytest.raises(ValueError, match="Helm"):
        chart.files(copy)


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every part of the schema that is about an object, with its path."""
    if schema.get("type") == "object":
        yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from objects(part, f"{path}.{name}")
    if "items" in schema:
        yield from objects(schema["items"], f"{path}[]")


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    free = {".resources.requests", ".resources.limits", ".affinity", ".global"}
    for path, part in objects(schema):
        if path not in free:
            assert part.get("additionalProperties") in (False, {"type": "string"}), path
    assert set(values) == set(schema["properties"]) - {"global"}
    for name, value in values.items():
        known = schema["properties"][name].get("properties")
        if known and isinstance(value, dict):
            assert set(value) <= set(known), name


def test_versions_agree() -> None:
    project = tomllib.loads((chart.ROOT / "pyproject.toml").read_text())
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = project["project"]["version"]
    assert (described["version"], described["appVersion"]) == (version, version)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for part in ("engine", "router"):
        assert values[part]["image"] == f"pdcluster-{part}:{version}"
