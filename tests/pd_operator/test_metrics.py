"""Covers pd_operator.metrics and series: what is told of each PDCluster is Prometheus' text,
begins at 0 where the first event counts, and ends with the PDCluster or its pool.
"""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pd_operator import rollout
from pd_operator.api import Role
from pd_operator.keys import Key
from pd_operator.metrics import Metrics
from pd_operator.observed import Ref
from pd_operator.scaling.types import Hold, Scale
from pd_operator.series import Series

CHAT, CODE = Key("ml", "chat"), Key("ml", "code")
COUNTS = {"desired": 3, "ready": 2, "draining": 1, "outdated": 0}
SET = Ref("StatefulSet", "chat-p-1")


def told(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric's series by their labels' values, the PDCluster's name first."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        tuple(v for k, v in one.labels.items() if k != "pdcluster_namespace"): one.value
        for family in families
        for one in family.samples
        if one.name == f"pdcluster_operator_{name}"
    }


def decided(metrics: Metrics, key: Key, **decisions: Any) -> None:
    metrics.decided(key, {Role(role): one for role, one in decisions.items()})


def test_the_first_of_what_is_rare_counts() -> None:
    """From 0 on: `increase` sees no event that a series begins with."""
    metrics = Metrics()
    decided(metrics, CHAT, prefill=Hold(1, "AtTarget", "", {}))
    moves = told(metrics, "scaling_decisions_total")
    assert moves["chat", "prefill", "scale", "MoreDemand"] == 0
    assert moves["chat", "prefill", "hold", "AtTarget"] == 1
    assert told(metrics, "operations_total")["chat", "delete", "StatefulSet"] == 0
    metrics.operated(CHAT, rollout.Delete(SET))
    decided(metrics, CHAT, prefill=Scale(2, "MoreDemand", "", {}))
    moves = told(metrics, "scaling_decisions_total")
    assert moves["chat", "prefill", "scale", "MoreDemand"] == 1
    assert told(metrics, "operations_total")["chat", "delete", "StatefulSet"] == 1


def test_a_fixed_pool_has_no_series_of_moves() -> None:
    metrics = Metrics()
    decided(metrics, CHAT, decode=Hold(1, "FixedReplicas", "", {}))
    assert told(metrics, "scaling_decisions_total") == {
        ("chat", "decode", "hold", "FixedReplicas"): 1
    }
    # Sized by its promise from now on: its first move counts.
    decided(metrics, CHAT, decode=Hold(1, "AtTarget", "", {}))
    assert told(metrics, "scaling_decisions_total")["chat", "decode", "scale", "MoreDemand"] == 0


def test_series_end_with_their_pdcluster_and_no_other() -> None:
    metrics = Metrics()
    for key in (CHAT, CODE):
        decided(metrics, key, prefill=Hold(1, "AtTarget", "", {}))
        metrics.operated(key, rollout.Scale(SET, 2))
        metrics.pools(key, {Role.PREFILL: COUNTS})
    metrics.forget(CHAT)
    metrics.forget(CHAT)
    for name in ("scaling_decisions_total", "operations_total", "pool_replicas"):
        assert {labels[0] for labels in told(metrics, name)} == {"code"}
    assert b'pdcluster="chat"' not in metrics.render()


def test_a_pool_that_is_no_more_has_no_size() -> None:
    metrics = Metrics()
    metrics.pools(CHAT, {Role.PREFILL: COUNTS, Role.DECODE: COUNTS})
    metrics.pools(CHAT, {Role.COLOCATED: COUNTS})
    assert told(metrics, "pool_replicas") == {
        ("chat", "colocated", state): count for state, count in COUNTS.items()
    }


def test_large_counts_are_exact() -> None:
    made = Series("pdcluster_operator_x", "counter", "What.", ["kind"])
    made.add(CHAT, "Pod", amount=16_777_217)
    made.add(CHAT, "Pod")
    assert list(made.lines())[-1].endswith(" 16777218.0\n")
