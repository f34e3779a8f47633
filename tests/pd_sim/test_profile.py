"""Covers pd_sim.profile: what is read back is what was written, a fit finds what it was made
of, and a Simulation takes it in the place of data sheets."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_engine.settings import parse
from pd_operator import api
from pd_sim import profile as profiles
from pd_sim import scenario
from pd_sim.profile import BadProfile, Profile, Prompt, Step
from tests.pd_engine.test_settings import BASE

HOST_S, TOKEN_S, PAIR_S = 0.004, 0.0012, 2e-7
KV_TOKEN_S = 1e-6
STEP_S = {1: 0.020, 2: 0.022, 4: 0.027, 8: 0.040}


def prompt_s(tokens: int) -> float:
    return HOST_S + TOKEN_S * tokens + PAIR_S * tokens**2 / 2


def step(batch: int, context: int) -> Step:
    kv = float(batch * context)
    return Step(batch, kv, STEP_S[batch] + KV_TOKEN_S * kv)


PROFILE = Profile(
    model="m",
    made="2026-11-30",
    kv_layers=30,
    kv_token_bytes=30 * 2 * 3 * 64 * 2,
    kv_tokens=16384,
    overhead_s=0.003,
    prompts=tuple(Prompt(n, prompt_s(n), 0.001) for n in (64, 128, 512, 2048)),
    steps=(*(step(batch, 64) for batch in STEP_S), step(1, 1024), step(4, 1024)),
)
CLUSTER: dict[str, Any] = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"name": "measured"},
    "spec": {
        "model": {"name": "m", "source": {"builtin": "smollm2-135m-instruct"}},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    },
}


def test_a_document_is_read_back() -> None:
    assert profiles.read(json.loads(json.dumps(PROFILE.document()))) == PROFILE


def test_the_fit_finds_what_was_there() -> None:
    perf = profiles.perf(PROFILE)
    for tokens in (64, 300, 1024, 2048):
        assert perf.prompt_s(tokens) == pytest.approx(prompt_s(tokens), rel=1e-3)
    for batch, seconds in STEP_S.items():
        kv = batch * 500.0
        assert perf.step_s(batch, kv) == pytest.approx(seconds + KV_TOKEN_S * kv, rel=1e-3)
    # Between what was measured, and beyond it along the last slope.
    assert perf.step_s(3, 0) == pytest.approx(0.0245, rel=1e-3)
    assert perf.step_s(16, 0) == pytest.approx(0.066, rel=1e-3)
    assert perf.kv.token_bytes == PROFILE.kv_token_bytes
    assert perf.kv_tokens == 16384


@given(
    st.lists(st.tuples(st.integers(1, 8000), st.floats(1e-4, 100)), min_size=2, max_size=9).filter(
        lambda found: len({tokens for tokens, _ in found}) > 1
    )
)
def test_whatever_was_measured_no_prompt_takes_less_than_a_shorter_one(
    found: list[tuple[int, float]],
) -> None:
    prompts = tuple(Prompt(tokens, seconds) for tokens, seconds in found)
    perf = profiles.perf(replace(PROFILE, prompts=prompts))
    assert perf.token_s > 0
    assert 0 < perf.prompt_s(1) < perf.prompt_s(100) < perf.prompt_s(10_000)


def test_prompts_that_all_take_the_same_take_that() -> None:
    same = tuple(Prompt(tokens, 9.0) for tokens in (64, 128, 2048))
    assert profiles.perf(replace(PROFILE, prompts=same)).prompt_s(500) == pytest.approx(9.0)


def test_what_a_hand_over_shows_is_shown() -> None:
    link = profiles.link(PROFILE)
    assert link.round_trip_s == 0.001
    one = profiles.link(replace(PROFILE, prompts=tuple(Prompt(n, 1.0) for n in (1, 2))))
    assert one.round_trip_s == 0.0


def test_a_simulation_takes_it() -> None:
    known = {"here.json": PROFILE}
    plan = scenario.plan(api.parse(CLUSTER), {"profile": "here.json"}, known=known)
    assert [pool.perf.kv_tokens for pool in plan.pools] == [16384, 16384]
    assert plan.router.overhead_s == 0.003
    assert plan.router.link.name == "measured"


def test_a_pool_may_have_its_own() -> None:
    slow = replace(PROFILE, prompts=tuple(replace(p, seconds=9.0) for p in PROFILE.prompts))
    spec = {"profile": "a", "prefill": {"profile": "b"}}
    assert scenario.profile_names(spec) == ["a", "b"]
    plan = scenario.plan(api.parse(CLUSTER), spec, known={"a": PROFILE, "b": slow})
    prefill, decode = (pool.perf.prompt_s(64) for pool in plan.pools)
    assert prefill > 8 > decode


def test_prompts_are_cut_as_workers_cut_them() -> None:
    assert parse(BASE).max_step_s == scenario.MAX_STEP_S
    together = copy.deepcopy(CLUSTER)
    del together["spec"]["prefill"], together["spec"]["decode"]
    together["spec"]["colocated"] = {"replicas": 1}
    (pool,) = scenario.plan(api.parse(together), {"profile": "a"}, known={"a": PROFILE}).pools
    assert pool.chunk_tokens == pytest.approx(scenario.MAX_STEP_S / TOKEN_S, rel=0.01)
    fast = tuple(replace(p, seconds=p.seconds / 100) for p in PROFILE.prompts)
    known = {"a": replace(PROFILE, prompts=fast)}
    (pool,) = scenario.plan(api.parse(together), {"profile": "a"}, known=known).pools
    assert pool.chunk_tokens == 512


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "no"}, "kind"),
        ({"prompts": None}, "no whole profile"),
        ({"prompts": [{"tokens": 5, "seconds": 1}]}, "two lengths"),
        ({"prompts": [{"tokens": 5, "seconds": 0}, {"tokens": 6, "seconds": 1}]}, "above 0"),
        ({"steps": [{"batch": 1, "kv_tokens": 1, "seconds": 1}]}, "two batches"),
        ({"steps": [{"batch": 1}]}, "no whole profile"),
        ({"kv_layers": "many"}, "no whole profile"),
        ({"more": 1}, "no whole profile"),
    ],
)
def test_other_documents_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadProfile, match=says):
        profiles.read(json.loads(json.dumps(PROFILE.document() | change)))


def test_no_document_at_all_is_refused() -> None:
    with pytest.raises(BadProfile, match="kind"):
        profiles.read([])
