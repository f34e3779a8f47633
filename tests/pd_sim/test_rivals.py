"""What others do on simple loads: each behaves as its documentation says."""

import pytest

from bench.rivals import hpa, planners, profile, windows
from bench.rivals.clairvoyant import Clairvoyant, bound_gpu_hours, demand
from pd_operator.api import Role
from pd_sim.scalers import Fixed, Scaler, Slo
from pd_sim.simulation import Result
from tests.pd_sim.rig import GOAL, PERF, evenly, joined, pair, simulate

pytestmark = pytest.mark.slow

KNOWN = profile(PERF, GOAL, 1000, 100)
SEATS = {Role.PREFILL: 3.0, Role.DECODE: float(KNOWN.batch)}
STEP = joined(evenly(4, 120), evenly(24, 240, start_s=120))


def made(name: str) -> Scaler:
    plan = pair()
    found: dict[str, Scaler] = {
        "ours": Slo(plan.pools, plan.goal),
        "hpa_queue": hpa.queue_length(KNOWN),
        "hpa_utilization": hpa.utilization(KNOWN),
        "keda": hpa.keda(KNOWN),
        "analyzer": planners.Analyzer(KNOWN),
        "planner": planners.ThroughputPlanner(KNOWN),
        "kpa": windows.Kpa(SEATS),
        "percentile": windows.PercentileWindow(SEATS),
    }
    return found[name]


NAMES = ["ours", "hpa_queue", "hpa_utilization", "keda", "analyzer", "planner", "kpa", "percentile"]


def most(result: Result, role: Role) -> int:
    return max(one.asked[role] for one in result.sizes)


@pytest.mark.parametrize("name", NAMES)
def test_six_times_the_load_makes_prefill_grow(name: str) -> None:
    """24 requests of 0.1 s a second need three prefill workers at the least."""
    result = simulate(pair(start_s=30.0, maximum=8), STEP, made(name))
    assert 3 <= most(result, Role.PREFILL) <= 8


@pytest.mark.parametrize("name", [n for n in NAMES if n != "hpa_utilization"])
def test_little_load_stays_at_one_pair(name: str) -> None:
    result = simulate(pair(), evenly(2, 400), made(name))
    assert most(result, Role.PREFILL) == 1
    assert most(result, Role.DECODE) == 1


def test_nobody_is_below_the_bound() -> None:
    found = demand(STEP, PERF, GOAL)
    bound = bound_gpu_hours(found, PERF, 30.0)
    for scaler in (made("ours"), made("planner"), Clairvoyant(found, 30.0)):
        result = simulate(pair(start_s=30.0, maximum=8), STEP, scaler)
        if result.attainment >= 0.99:
            assert result.gpu_hours >= bound


def test_a_fixed_size_of_the_peaks_need_is_above_the_bound() -> None:
    bound = bound_gpu_hours(demand(STEP, PERF, GOAL), PERF, 30.0)
    assert simulate(pair(4, 3), STEP, Fixed()).gpu_hours > bound
