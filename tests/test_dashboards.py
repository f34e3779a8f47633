"""Covers the chart's dashboards and all rules, without Prometheus: they are what `panels` says,
each query is PromQL over metrics and labels that we export, each metric is looked at somewhere
or is on a list with its reason, and each alert has its page.
"""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from pd_operator import alerts
from scripts.chart import CHART, ROOT
from scripts.panels import BOARDS as SAID
from tests.watched import BOARDS, RUNBOOKS, exported, queries, rules, used

# Exported, and neither on a dashboard nor in an alert, because:
ELSEWHERE = {
    "vllm:num_requests_running": "inference gateways read it",
    "vllm:num_requests_waiting": "inference gateways read it",
    "vllm:kv_cache_usage_perc": "inference gateways read it",
}
_STEP = {"$__rate_interval": "1m", "$namespace": "ns", "$cluster": "chat"}
_SCRAPED = {"namespace", alerts.CLUSTER_LABEL}


def plain(query: str) -> str:
    for name, value in _STEP.items():
        query = query.replace(name, value)
    return query


def all_expressions() -> list[str]:
    found = [query for board in BOARDS for query in queries(board)]
    return [*found, *(rule["expr"] for rule in rules())]


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Each series that it selects: name, and labels that must match."""
    promql_parser.parse(plain(expression))
    found = re.findall(r"([a-z0-9_:]+)\{([^}]*)\}", plain(expression))
    return [(name, set(re.findall(r"(\w+)!?=", labels))) for name, labels in found]


def test_the_boards_are_what_is_said() -> None:
    assert [path.stem for path in BOARDS] == sorted(board.name for board in SAID)
    for board in SAID:
        path = ROOT / CHART / "dashboards" / f"{board.name}.json"
        made = json.loads(path.read_text())
        assert (made["title"], made["uid"]) == (board.title, f"pdcluster-{board.name}")
        shown = [panel for panel in made["panels"] if panel["type"] != "row"]
        wanted = list(board.panels())
        assert [panel["title"] for panel in shown] == [panel.title for panel in wanted]
        for panel, said in zip(shown, wanted, strict=True):
            assert [(t["expr"], t["legendFormat"]) for t in panel["targets"]] == [
                (query.expression, query.legend) for query in said.queries
            ]
            assert panel["fieldConfig"]["defaults"]["unit"] == said.unit


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_lie_beside_each_other(path: Path) -> None:
    made = json.loads(path.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_variables_are_those_that_queries_use() -> None:
    for path in BOARDS:
        made = json.loads(path.read_text())
        known = {one["name"] for one in made["templating"]["list"]} | {"__rate_interval"}
        assert set(re.findall(r"\$(\w+)", path.read_text())) <= known, path.name


@pytest.mark.parametrize("expression", sorted(set(all_expressions())))
def test_expressions_are_promql_over_what_we_export(expression: str) -> None:
    known = exported()
    recorded = {rule["record"]: set(rule["labels"]) for rule in rules() if "record" in rule}
    for name in used(expression):
        assert name in known or name in recorded, name
    for series, labels in selectors(expression):
        own = recorded.get(series)
        if own is None:
            own = known[next(iter(used(series)))] | _SCRAPED | {"le"}
        assert labels <= own, series


def test_every_metric_is_looked_at_or_has_its_reason() -> None:
    looked_at: set[str] = set().union(*map(used, all_expressions()))
    assert set(exported()) - looked_at == set(ELSEWHERE)


def test_every_alert_has_its_page_and_every_page_its_alert() -> None:
    found: dict[str, dict[str, Any]] = {r["alert"]: r for r in rules() if "alert" in r}
    assert {path.stem for path in RUNBOOKS.glob("PD*.md")} == set(found)
    index = (RUNBOOKS / "README.md").read_text()
    for name, rule in found.items():
        assert rule["annotations"]["runbook"] == f"docs/runbooks/{name}.md"
        text = (RUNBOOKS / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        for head in ("## What it means", "## What to look at", "## What to do"):
            assert head in text, name
        assert f"({name}.md)" in index
