"""Covers alerts: which there are for which PDCluster, how limits follow from its promises."""

import re
from typing import Any

import pytest

from pd_operator import alerts
from tests.pd_operator.objects import cluster

ALWAYS = {
    "PDClusterNoWorkers", "PDClusterRequestsFail", "PDClusterRequestsRefused",
    "PDClusterRetriesFrequent", "PDClusterKVFull", "PDClusterWorkersLost",
}  # fmt: skip


def made(runbooks: str = "", **changes: Any) -> dict[str, dict[str, Any]]:
    """By name: alerts and recorded series."""
    groups = alerts.groups(cluster(**changes), runbooks)
    return {rule.get("alert") or rule["record"]: rule for one in groups for rule in one["rules"]}


def slo(metric: str, percentile: float, target: str) -> dict[str, Any]:
    return {f"spec.slo.{metric}": {"percentile": percentile, "target": target}}


def limits(rule: dict[str, Any]) -> list[float]:
    return [float(text) for text in re.findall(r"\} > ([0-9.]+)", rule["expr"])]


def test_without_promises_only_what_every_cluster_has() -> None:
    assert set(made()) == ALWAYS | {"PDClusterHandOversSlow"}
    together: dict[str, Any] = {
        "spec.prefill": ..., "spec.decode": ..., "spec.colocated": {"replicas": 1},
    }  # fmt: skip
    assert set(made(**together)) == ALWAYS


def test_a_promise_is_recorded_over_each_window_and_burns_at_two_speeds() -> None:
    found = made(**slo("ttft", 99, "500ms"))
    windows = {f"pdcluster:ttft_late:ratio_rate{window}" for window in alerts.WINDOWS}
    more = {"pdcluster:slo:target_seconds", "pdcluster:slo:objective"}
    burns = {"PDClusterTTFTBurnsFast", "PDClusterTTFTBurnsSlowly"}
    assert set(found) == ALWAYS | {"PDClusterHandOversSlow"} | windows | more | burns
    late = found["pdcluster:ttft_late:ratio_rate5m"]
    assert 'ttft_seconds_bucket{namespace="default"' in late["expr"]
    assert 'le="0.5"' in late["expr"]
    assert late["labels"] == {"namespace": "default", "pdcluster": "chat"}
    assert limits(found["PDClusterTTFTBurnsFast"]) == pytest.approx([0.144, 0.144, 0.06, 0.06])
    assert limits(found["PDClusterTTFTBurnsSlowly"]) == pytest.approx([0.03, 0.03, 0.01, 0.01])


def test_a_wide_budget_can_still_be_overspent() -> None:
    found = made(**slo("tpot", 90, "50ms"))
    assert limits(found["PDClusterTPOTBurnsFast"]) == pytest.approx([0.55, 0.55, 0.55, 0.55])
    assert all(limit < 1 for limit in limits(found["PDClusterTPOTBurnsSlowly"]))


def test_a_target_between_two_bounds_is_read_off_both() -> None:
    late = made(**slo("ttft", 99, "400ms"))["pdcluster:ttft_late:ratio_rate1h"]["expr"]
    assert re.findall(r'([0-9.]+) \* sum\(rate\(\w+\{[^}]*le="([0-9.]+)"', late) == [
        ("0.5", "0.3"),
        ("0.5", "0.5"),
    ]


def test_where_nothing_runs_on_purpose_only_who_waits_matters() -> None:
    zero = {"spec.prefill.replicas": 0, "spec.decode.replicas": 0}
    assert "held_requests" in made(**zero)["PDClusterNoWorkers"]["expr"]
    assert "held_requests" not in made()["PDClusterNoWorkers"]["expr"]


def test_every_alert_says_whom_it_is_about_and_what_to_do() -> None:
    found = made("https://wiki.example/runbooks/", **slo("ttft", 99, "1s"))
    for name, rule in found.items():
        if name.startswith("PD"):
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert rule["labels"]["pdcluster"] == "chat"
            assert rule["annotations"]["summary"].startswith("default/chat: ")
            assert rule["annotations"]["runbook_url"] == f"https://wiki.example/runbooks/{name}.md"
    assert "runbook_url" not in made()["PDClusterNoWorkers"]["annotations"]
