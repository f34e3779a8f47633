"""What is watched of a PDCluster: what our programs export, and the rules about it."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from pd_operator import alerts, series
from scripts import exports
from scripts.chart import CHART, ROOT
from tests.pd_operator.objects import cluster

BOARDS = sorted((ROOT / CHART / "dashboards").glob("*.json"))
RUNBOOKS = ROOT / "docs" / "runbooks"
PROMISES = {
    "spec.slo": {
        "ttft": {"percentile": 99, "target": "500ms"},
        "tpot": {"percentile": 95, "target": "40ms"},
    }
}
_NAME = re.compile(r"(?:pdcluster[_:]|vllm:)[a-z0-9_:]*[a-z0-9]")
_PARTS = ("_bucket", "_sum", "_count", "_total")


def exported() -> dict[str, set[str]]:
    """Our metrics, each with the labels that its series may have."""
    found = exports.exported().values()
    return {one.name: set(one.labels) for some in found for one in some}


def used(expression: str) -> set[str]:
    """The metrics that it names, without what a series' name says of its part."""
    names = set(_NAME.findall(re.sub(r'"[^"]*"', '""', expression)))
    names -= {alerts.CLUSTER_LABEL, *series.OF}
    return {base(name) for name in names}


def base(name: str) -> str:
    for part in _PARTS:
        name = name.removesuffix(part)
    return name


def rules() -> list[dict[str, Any]]:
    """All rules that the operator and the chart can install."""
    idle = {**PROMISES, "spec.prefill.replicas": 0, "spec.decode.replicas": 0}
    groups = [
        *alerts.groups(cluster(**PROMISES)),
        *alerts.groups(cluster(**idle)),
        *alerts.operator_groups(),
    ]
    return [rule for group in groups for rule in group["rules"]]


class Variable(NamedTuple):
    """One that is chosen at a dashboard's top, and where its choices come from."""

    name: str
    query: str


def variables(board: Path) -> list[Variable]:
    """Those whose choices Prometheus tells."""
    made = json.loads(board.read_text())["templating"]["list"]
    return [Variable(one["name"], one["query"]) for one in made if one["type"] == "query"]


def queries(board: Path) -> list[str]:
    """Of a dashboard's panels, as Grafana gets them."""
    panels = json.loads(board.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]
