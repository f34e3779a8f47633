"""Covers replicas: who owns a pool's size in each mode, what is set back with an event, what is
written into PDPools and that nothing is when they are right, seeding, changes of the mode."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest

from pd_operator import replicas
from pd_operator.api import Cluster, Role
from pd_operator.observed import Observed, observe
from pd_operator.podparts import Manifest
from pd_operator.replicas import HANDED_OVER, MARK, Standing
from tests.pd_operator.objects import cluster, rendered, running

D = Role.DECODE
FIXED: dict[str, Any] = {"spec.decode.replicas": 3}
SLO: dict[str, Any] = {
    "spec.slo": {"tpot": {"target": "50ms"}},
    "spec.decode.replicas": ...,
    "spec.decode.scaling": {"minReplicas": 2, "maxReplicas": 6},
}
EXTERNAL: dict[str, Any] = {
    "spec.decode.replicas": ...,
    "spec.decode.scaling": {"minReplicas": 2, "maxReplicas": 6, "mode": "External"},
}


def pd_pool(value: int = 1, mark: str = "", role: str = "decode") -> Manifest:
    metadata: dict[str, Any] = {
        "name": f"chat-{role}",
        "generation": 7,
        "labels": {"pdcluster.dev/cluster": "chat", "pdcluster.dev/role": role},
    }
    if mark:
        metadata["annotations"] = {MARK: mark}
    return {"kind": "PDPool", "metadata": metadata, "spec": {"replicas": value}}


@dataclass
class Line:
    """What a reconcile does about sizes, again and again, with one PDPool."""

    of: Cluster
    pool: Manifest | None = None
    status: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def observed(self) -> Observed:
        return observe([self.pool] if self.pool else [])

    def standing(self) -> Standing:
        return replicas.standings(self.of, self.observed(), self.status)[D]

    def look(self, decided: int | None = None) -> int:
        """The size after one look. `decided`: what scaling says, else as it stands."""
        before = replicas.standings(self.of, self.observed(), self.status)
        sizes = {role: one.replicas for role, one in before.items()}
        if decided is not None:
            sizes[D] = decided
        for write in replicas.writes(self.of, self.observed(), sizes):
            assert self.pool is not None
            assert write.name == "chat-decode"
            self.pool = copy.deepcopy(self.pool)
            self.pool["spec"]["replicas"] = write.replicas
            self.pool["metadata"].setdefault("annotations", {})[MARK] = write.mark
        self.events += [one.text for one in replicas.notices(self.of, before, sizes)]
        self.status = {"decode": {"desired": sizes[D]}}
        assert replicas.writes(self.of, self.observed(), sizes) == []
        return sizes[D]

    @property
    def value(self) -> int:
        assert self.pool is not None
        return int(self.pool["spec"]["replicas"])

    def scale(self, value: int) -> None:
        """kubectl scale."""
        assert self.pool is not None
        self.pool["spec"]["replicas"] = value


@pytest.mark.parametrize(
    ("changes", "seed"), [(FIXED, 3), (SLO, 2), (EXTERNAL, 2)], ids=["fixed", "SLO", "External"]
)
def test_a_new_pool_is_seeded_without_an_event(changes: dict[str, Any], seed: int) -> None:
    line = Line(cluster(**changes))
    assert line.look() == seed
    line.pool = pd_pool()  # with the schema's default
    assert line.look() == seed
    assert line.value == seed
    assert line.events == []


@pytest.mark.parametrize("changes", [FIXED, SLO], ids=["fixed", "SLO"])
def test_a_foreign_value_is_set_back_with_an_event(changes: dict[str, Any]) -> None:
    line = Line(cluster(**changes), pd_pool())
    size = line.look()
    line.scale(5)
    assert line.look() == size
    assert line.value == size
    assert len(line.events) == 1
    assert "decode was scaled to 5 by somebody else" in line.events[0]
    assert f"set back to {size}" in line.events[0]
    assert "mode: External" in line.events[0]
    line.look()
    assert len(line.events) == 1


def test_in_external_mode_the_pdpool_is_the_truth() -> None:
    line = Line(cluster(**EXTERNAL), pd_pool())
    line.look()
    for value in (5, 3, 6):
        line.scale(value)
        assert line.look() == value
        assert line.value == value
    assert line.events == []


@pytest.mark.parametrize(("value", "size"), [(9, 6), (0, 2)])
def test_in_external_mode_the_bounds_hold_but_nobody_is_fought(value: int, size: int) -> None:
    line = Line(cluster(**EXTERNAL), pd_pool())
    line.look()
    line.scale(value)
    assert line.look() == size
    assert line.value == value
    assert line.standing().wanted == value
    assert line.events == []


def test_decisions_are_written_and_known_after_a_crash() -> None:
    """The PDPool was written, the status wasn't: the operator knows its own value."""
    line = Line(cluster(**SLO), pd_pool())
    line.look()
    line.look(decided=4)
    assert (line.value, line.events) == (4, [])
    line.status = {"decode": {"desired": 2}}
    assert line.look() == 4
    assert line.events == []


def test_an_edit_of_fixed_replicas_is_no_foreign_value() -> None:
    line = Line(cluster(**FIXED), pd_pool())
    line.look()
    line.of = cluster(**{"spec.decode.replicas": 5})
    assert line.look() == 5
    assert (line.value, line.events) == (5, [])


def test_a_foreign_value_that_happens_to_be_right_is_no_event() -> None:
    line = Line(cluster(**SLO), pd_pool())
    line.look()
    line.scale(4)
    assert line.look(decided=4) == 4
    assert line.events == []


def test_a_pool_object_that_was_deleted_comes_back_as_it_was() -> None:
    for changes in (SLO, EXTERNAL):
        line = Line(cluster(**changes), pd_pool())
        line.look()
        if changes is SLO:
            line.look(decided=5)
        else:
            line.scale(5)
            line.look()
        line.pool = pd_pool()
        assert line.look() == 5
        assert line.value == 5
        assert line.events == []


def test_changes_of_the_mode_keep_the_size() -> None:
    line = Line(cluster(**FIXED), pd_pool())
    line.look()
    line.of = cluster(**SLO)
    assert line.look() == 3
    assert line.look(decided=4) == 4
    line.of = cluster(**EXTERNAL)
    assert line.look() == 4
    line.scale(6)
    assert line.look() == 6
    line.of = cluster(**SLO)
    assert line.look() == 6
    line.of = cluster(**FIXED)
    assert line.look() == 3
    assert line.events == []


def test_scaled_in_the_moment_of_the_hand_over_counts() -> None:
    line = Line(cluster(**SLO), pd_pool())
    line.look()
    line.of = cluster(**EXTERNAL)
    line.scale(5)
    assert line.look() == 5
    assert (line.value, line.events) == (5, [])
    assert line.pool is not None
    assert line.pool["metadata"]["annotations"][MARK] == HANDED_OVER


def test_new_bounds_hold_at_once() -> None:
    line = Line(cluster(**SLO), pd_pool())
    line.look(decided=6)
    line.of = cluster(**SLO | {"spec.decode.scaling": {"minReplicas": 1, "maxReplicas": 4}})
    assert line.look() == 4
    assert line.value == 4


def test_without_pdpools_the_status_says_the_size() -> None:
    line = Line(cluster(**SLO))
    assert line.look(decided=4) == 4
    assert line.look() == 4


@pytest.mark.parametrize("mark", ["many", "-1", "", "3.5"])
def test_a_mark_that_is_none_of_ours_counts_as_none(mark: str) -> None:
    line = Line(cluster(**SLO), pd_pool(9, mark), {"decode": {"desired": 3}})
    assert line.look() == 3
    assert line.events == []


def test_the_status_of_pdpools_counts_all_that_run() -> None:
    of = cluster(**FIXED)
    seen = observe([*running(rendered(of)), pd_pool(3, "3")])
    [(item, status)] = [
        one
        for one in replicas.pool_statuses(of, seen)
        if one[0]["metadata"]["name"] == "chat-decode"
    ]
    assert status["replicas"] == 3
    assert status["selector"] == "pdcluster.dev/cluster=chat,pdcluster.dev/role=decode"
    assert status["observedGeneration"] == 7
    item["status"] = status
    again = observe([*running(rendered(of)), item])
    assert [one[0] for one in replicas.pool_statuses(of, again) if one[0] is item] == []
