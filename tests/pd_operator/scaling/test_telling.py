"""Covers scaling.telling, spec and scaler: what a PDCluster says becomes a spec, decisions come
into the status once, the condition ScalingActive, events; memory by object."""

from dataclasses import replace
from typing import Any

import pytest

from pd_operator.api import Role
from pd_operator.measured import Counters, RouterReading, Samples, WorkerReading
from pd_operator.replicas import Standing
from pd_operator.scaler import Scaler
from pd_operator.scaling import telling
from pd_operator.scaling.spec import is_scaled, longest_window_s, spec_of
from pd_operator.scaling.types import Decision, Hold, Ratio, Scale, Target
from tests.pd_operator.objects import cluster

P, D = Role.PREFILL, Role.DECODE
SCALED: dict[str, Any] = {
    "spec.slo": {"ttft": {"target": "1s"}, "tpot": {"percentile": 90, "target": "50ms"}},
    "spec.prefill.replicas": ...,
    "spec.prefill.scaling": {"maxReplicas": 6, "window": "2m"},
    "spec.decode.replicas": ...,
    "spec.decode.scaling": {"minReplicas": 2, "maxReplicas": 8, "panicWindow": "5s"},
    "spec.decode.accelerator": {"resource": "nvidia.com/gpu"},
    "spec.budget": {"gpus": 8, "ratio": {"min": 0.5, "max": 2}},
}
PRESENT = {P: 1, D: 2}


def standings(**wanted: int | None) -> dict[Role, Standing]:
    return {role: Standing(role, size, wanted=wanted.get(role)) for role, size in PRESENT.items()}


def test_what_the_object_says() -> None:
    spec = spec_of(cluster(**SCALED), PRESENT)
    prefill, decode = spec.pools
    assert (prefill.minimum, prefill.maximum, prefill.replicas) == (1, 6, 1)
    assert (prefill.ttft, prefill.tpot) == (Target(99, 1.0), None)
    assert (decode.ttft, decode.tpot) == (Target(99, 1.0), Target(90, 0.05))
    assert (prefill.window_s, decode.panic_window_s, decode.stabilization_s) == (120, 5, 300)
    assert (prefill.gpus_each, decode.gpus_each) == (0, 1)
    assert (spec.gpus, spec.ratio) == (8, Ratio(0.5, 2))
    assert longest_window_s(spec) == 120
    assert not prefill.fixed


def test_other_modes_are_fixed_for_scaling() -> None:
    external = {"maxReplicas": 6, "mode": "External"}
    made = cluster(**{"spec.decode.replicas": ..., "spec.decode.scaling": external})
    spec = spec_of(made, {P: 1, D: 4})
    assert [(p.fixed, p.minimum, p.maximum) for p in spec.pools] == [(True, 1, 1), (True, 4, 4)]
    assert not is_scaled(made)
    assert is_scaled(cluster(**SCALED))


def status(decisions: dict[Role, Decision], previous: dict[str, Any] | None = None) -> Any:
    base = {
        "prefill": {"desired": 1},
        "decode": {"desired": 2},
        "conditions": [
            {"type": "Ready", "status": "True"},
            {"type": "ScalingActive", "status": "False", "reason": "FixedReplicas"},
        ],
    }
    return telling.with_scaling(
        base, cluster(**SCALED), standings(), decisions, previous or {}, "2026-01-01T00:00:00Z"
    )


def test_a_change_of_size_is_kept_until_the_next() -> None:
    made = status({P: Hold(1, "AtTarget"), D: Scale(4, "MoreDemand", "why")})
    assert made["decode"]["decision"] == {
        "replicas": 4,
        "reason": "MoreDemand",
        "message": "why",
        "time": "2026-01-01T00:00:00Z",
    }
    assert "decision" not in made["prefill"]
    later = status({P: Hold(1, "AtTarget"), D: Hold(4, "AtTarget")}, made)
    assert later["decode"] == made["decode"]


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        (Hold(1, "AtTarget"), ("True", "FollowsSLO")),
        (Hold(1, "NoData", "nothing yet"), ("False", "NoData")),
        (Hold(1, "StaleData", ""), ("False", "StaleData")),
        (Hold(1, "AtMaximum", ""), ("True", "AtMaximum")),
        (Scale(3, "Budget", ""), ("True", "Budget")),
        (Hold(1, "AtTarget", "", {"infeasible": 1.0}), ("True", "SLOInfeasible")),
        (Scale(2, "MoreDemand", ""), ("True", "FollowsSLO")),
    ],
)
def test_the_condition(decision: Decision, expected: tuple[str, str]) -> None:
    made = status({P: decision, D: Hold(2, "AtTarget")})
    ready, scaling = made["conditions"]
    assert ready == {"type": "Ready", "status": "True"}
    assert (scaling["status"], scaling["reason"]) == expected
    again = status({P: decision, D: Hold(2, "AtTarget")}, made)
    assert again["conditions"] == made["conditions"]


def test_out_of_bounds_from_outside_is_said() -> None:
    external = {"maxReplicas": 2, "mode": "External"}
    made = telling.with_scaling(
        {"conditions": [{"type": "ScalingActive"}]},
        cluster(**{"spec.decode.replicas": ..., "spec.decode.scaling": external}),
        standings(decode=9),
        {P: Hold(1, "FixedReplicas"), D: Hold(2, "FixedReplicas")},
        {},
        "now",
    )
    [condition] = made["conditions"]
    assert (condition["reason"], condition["status"]) == ("OutOfBounds", "True")
    assert "9" in condition["message"]


def test_events_only_for_changes() -> None:
    found = telling.notices({P: Hold(1, "x"), D: Scale(4, "Burst", "why")}, standings(), "now")
    [notice] = found
    assert (notice.reason, notice.warning) == ("ScaledUp", False)
    assert notice.text == "decode from 2 to 4 workers: Burst: why"
    [down] = telling.notices({D: Scale(1, "LessDemand", "")}, standings(), "now")
    assert down.reason == "ScaledDown"


# ---- memory -------------------------------------------------------------------------------


def told(at: float, requests: float) -> Samples:
    counters = Counters(
        arrived_requests=requests, arrived_sequences=requests, arrived_tokens=1000 * requests
    )
    worker = WorkerReading(
        "chat-p-0", "e", "prefill", at, heartbeats=3, usable=True, prefill_tokens_per_s=10_000
    )
    router = RouterReading("a", at, 1000.0 + at, counters)
    return Samples(routers=(router,), workers=(worker,))


def test_the_line_from_readings_to_a_decision() -> None:
    now = 0.0
    scaler: Scaler[str] = Scaler(lambda: now)
    made = replace(cluster(**SCALED), gpus=None, ratio=None)
    for number in range(5):
        now = 5.0 * number
        found = scaler.look("chat", made, standings(), told(now, 40 * now))
    assert found[P].replicas > 3
    assert found[P].reason == "Burst"  # all that is known is recent
    assert (type(found[D]), found[D].reason) == (Hold, "NoCapacityYet")


def test_another_object_of_the_same_name_begins_anew() -> None:
    now = 0.0
    scaler: Scaler[str] = Scaler(lambda: now)
    made = cluster(**SCALED)
    scaler.look("chat", made, standings(), told(0, 0))
    now = 5.0
    found = scaler.look("chat", replace(made, uid="another"), standings(), told(5, 100))
    assert found[P].reason == "NoData"


def test_fixed_pools_are_forgotten_and_say_so() -> None:
    scaler: Scaler[str] = Scaler(lambda: 0.0)
    found = scaler.look("chat", cluster(), standings(), told(0, 0))
    assert {one.reason for one in found.values()} == {"FixedReplicas"}
    scaler.forget("chat")
