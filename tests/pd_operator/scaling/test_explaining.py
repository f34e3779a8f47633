"""Covers scaling.explaining and recording: decisions as lines and for people; recorded looks
replay to the same decisions, and a changed look doesn't."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.api import Role
from pd_operator.measured import Counters, Length, RouterReading, Samples, WorkerReading
from pd_operator.scaling import explaining, recording
from pd_operator.scaling.explaining import Told
from pd_operator.scaling.types import Decision, Hold, Ratio, Scale, Spec
from pd_sim.look import Look
from pd_sim.scalers import Slo
from tests.pd_operator.scaling.world import Cluster, decode, observations, prefill
from tests.pd_sim.rig import evenly, joined, pair, simulate

P, D = Role.PREFILL, Role.DECODE
COUNTED = Counters(arrived_requests=5, lengths={6: Length(5, 3, 40)})
SAMPLES = Samples(
    ttft={3: 4},
    uncached={-7: 1},
    routers=(RouterReading("r", 2.0, 9.0, COUNTED),),
    workers=(WorkerReading("w", "e", "prefill", 1.5, kv_tokens=100),),
    silent=1,
)


def told(decision: Decision, pool: str = "prefill", before: int = 2) -> Told:
    return explaining.told("team/chat", pool, before, decision, "2026-01-01T00:00:00Z")


def test_a_line_comes_back_from_within_a_log() -> None:
    one = told(Scale(3, "MoreDemand", "why", {"needed": 3.0, "speed": 12345.678}))
    text = "2026-01-01 00:00:00,000 INFO pd_operator.reconcile " + explaining.line(one)
    back = explaining.read(text)
    assert back is not None
    assert (back.cluster, back.pool, back.before, back.after) == ("team/chat", "prefill", 2, 3)
    assert back.numbers == {"needed": 3.0, "speed": 12350.0}


@pytest.mark.parametrize(
    "text", ["", "listed objects=3", '{"scaling":', '{"scaling": {"time": 1}}', '{"scaling": []}']
)
def test_other_lines_tell_nothing(text: str) -> None:
    assert explaining.read(text) is None


@given(st.text())
def test_whatever_a_log_holds(text: str) -> None:
    assert explaining.read(text) is None or '{"scaling":' in text


def test_people_read_where_it_comes_from() -> None:
    cluster = Cluster()
    cluster.steady(10, 60)
    found = cluster.look(observations(0, 60, burst=10))
    said = "\n".join(explaining.sentences(told(found[P])))
    assert "prefill from 2 to" in said
    assert "more demand than its workers can meet" in said
    assert "demand: 6e+04 tokens/s now" in said
    assert "1e+04 tokens/s a worker" in said
    assert f"needed: {found[P].numbers['needed']:.0f} workers" in said
    assert "sequences at once" in "\n".join(explaining.sentences(told(found[D], "decode")))


def test_a_decision_without_numbers_says_what_it_has() -> None:
    said = explaining.sentences(told(Hold(2, "NoData", "routers tell nothing yet")))
    assert said == ["2026-01-01T00:00:00Z  prefill stays at 2: routers tell nothing",
                    "    routers tell nothing yet"]  # fmt: skip


# ---- recordings ---------------------------------------------------------------------------


class Recorded(Slo):
    """The operator's decisions over a simulated cluster, with what they were made from."""

    lines: list[dict[str, Any]]

    def sizes(self, seen: Look) -> dict[Role, int]:
        made = dict(super().sizes(seen))
        look = recording.Look("team/chat/1", seen.now, self.spec(seen), seen.samples)
        self.lines.append(json.loads(json.dumps(recording.to_json(look, self.decisions))))
        return made


def recorded() -> list[dict[str, Any]]:
    plan = pair(start_s=30.0, maximum=8)
    scaler = Recorded(plan.pools, plan.goal)
    scaler.lines = []
    simulate(plan, joined(evenly(4, 60), evenly(24, 120, start_s=60)), scaler)
    return scaler.lines


@pytest.mark.slow
def test_a_recording_gives_the_same_decisions() -> None:
    lines = recorded()
    found = list(recording.replay(lines))
    assert len(found) > 30
    assert all(one.same for one in found)
    assert any(isinstance(one.decisions[P], Scale) for one in found)
    lines[-1]["spec"]["pools"][0]["maximum"] = 1
    assert not list(recording.replay(lines))[-1].same


def test_a_look_comes_back_as_it_was() -> None:
    spec = Spec((prefill(2, fixed=True), decode(3)), 8, Ratio(0.5))
    look = recording.Look("a/b/c", 3.0, spec, SAMPLES)
    data = json.loads(json.dumps(recording.to_json(look, {}), allow_nan=False))
    assert recording.from_json(data) == look


@pytest.mark.parametrize("line", [{}, {"cluster": "a"}, {"spec": None}])
def test_what_is_no_recording_is_said(line: dict[str, Any]) -> None:
    with pytest.raises(recording.BadRecording, match="line 1"):
        list(recording.replay([line]))
