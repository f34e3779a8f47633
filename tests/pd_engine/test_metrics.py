"""Covers pd_engine.metrics: what is rare begins at 0, so that its first time is an increase."""

from prometheus_client.parser import text_string_to_metric_families

from pd_core.failures import FailureKind
from pd_engine.metrics import Metrics
from pd_engine.types import Load


def counted(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """A counter's values by one of its labels."""
    families = text_string_to_metric_families(metrics.scrape().decode())
    return {
        one.labels[label]: one.value
        for family in families
        for one in family.samples
        if one.name == f"pdcluster_engine_{name}_total"
    }


def test_every_kind_of_failure_begins_at_0() -> None:
    metrics = Metrics("m", "decode", "d-0")
    metrics.follow(Load)
    assert counted(metrics, "failures", "kind") == {kind.value: 0 for kind in FailureKind}
    metrics.failure(FailureKind.STEP_FAILED)
    found = counted(metrics, "failures", "kind")
    assert found["step_failed"] == 1
    assert sum(found.values()) == 1


def test_so_does_what_can_happen_to_each_store() -> None:
    metrics = Metrics("m", "decode", "d-0")
    metrics.follow(Load)
    names = ("kv_store_failures", "kv_restores_declined")
    assert [counted(metrics, name, "store") for name in names] == [{}, {}]
    metrics.follow_kept(lambda: {"memory": 3, "disk": 0})
    for name in names:
        assert counted(metrics, name, "store") == {"memory": 0, "disk": 0}
