"""Covers pd_router.speeds, what of it views learn and costs use, and pd_core.gpus: the speed of
prompts by length, from heartbeats, from workers of the same product, from data sheets."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.gpus import GPUS, of_product
from pd_core.known_models import KNOWN_MODELS
from pd_core.work import pairs
from pd_router.costs import soonest
from pd_router.fleet import LoadReport, WorkerView
from pd_router.routing import Routing
from pd_router.speeds import UNKNOWN_TOKENS_PER_S, Fit, PromptSpeed, Speeds
from pd_sim.perf import Perf, from_data_sheet
from tests.pd_router.test_costs import NEED, big_d, big_p, names, put

H100 = from_data_sheet(KNOWN_MODELS["llama-3-8b"], GPUS["h100"], 1)
LENGTHS = (1_000, 4_000, 16_000, 64_000, 120_000)


def prompt_of(chance: random.Random) -> tuple[int, int]:
    """Uncached and cached tokens, as in conversations over documents."""
    return int(10 ** chance.uniform(2.5, 5.0)), chance.choice((0, 0, 2_000, 20_000))


def worked(view: WorkerView, perf: Perf, prompts: list[tuple[int, int]]) -> WorkerView:
    """Heartbeats of a worker that computed these prompts, one by one."""
    for tokens, cached in prompts:
        load = view.load
        view.report(
            replace(
                load,
                steps=load.steps + 1,
                busy_s=load.busy_s + perf.prompt_s(tokens, cached),
                computed_tokens=load.computed_tokens + tokens,
                computed_pairs=load.computed_pairs + int(pairs(tokens, cached)),
            )
        )
    return view


def learned(perf: Perf = H100, number: int = 0, **options: object) -> WorkerView:
    chance = random.Random(7)
    options.setdefault("tokens_per_s", 128 / perf.prompt_s(128))
    return worked(big_p(number, **options), perf, [prompt_of(chance) for _ in range(60)])


def test_predictions_follow_the_length() -> None:
    """Against one speed for all lengths, the mean of late: many times nearer at each."""
    view = learned()
    speed = Speeds([view]).prompt(view)
    for tokens in LENGTHS:
        for cached in (0, 30_000):
            true_s = H100.prompt_s(tokens, cached)
            made = abs(speed.seconds(tokens, pairs(tokens, cached)) / true_s - 1)
            scalar = abs(tokens / view.tokens_per_s / true_s - 1)
            assert made < 0.15, (tokens, cached, made)
            assert made < max(scalar / 2, 0.03), (tokens, cached, made, scalar)


def test_one_speed_for_all_lengths_would_be_far_off() -> None:
    """That the test above can fail."""
    view = learned()
    errors = [abs(n / view.tokens_per_s / H100.prompt_s(n) - 1) for n in LENGTHS]
    assert max(errors) > 0.4


def test_long_prompts_that_wait_take_longer_than_as_many_short_ones() -> None:
    long, short = learned(), learned(number=1)
    long.load = replace(long.load, pending_tokens=40_000, pending_pairs=int(pairs(40_000)))
    short.load = replace(short.load, pending_tokens=40_500, pending_pairs=int(45 * pairs(900)))
    found = put(long, short, big_d(0), routing=Routing("least_load"))
    assert names(found) == ("d-0", "p-1")
    assert soonest([long])[0] == pytest.approx(H100.prompt_s(40_000), rel=0.1)


def test_what_this_router_sent_counts_by_its_length() -> None:
    long, short = learned(), learned(number=1)
    long.assign_prefill(40_000)
    for _ in range(45):
        short.assign_prefill(900)
    assert soonest([long])[0] > 1.5 * soonest([short])[0]
    long.end_prefill(40_000)
    assert soonest([long])[0] == 0.0


def test_prompts_of_one_length_tell_no_attention() -> None:
    view = worked(big_p(0, tokens_per_s=1e3), H100, [(4_000, 0)] * 40)
    speed = Speeds([view]).prompt(view)
    assert speed.pair_s == 0
    assert speed.seconds(4_000, pairs(4_000)) == pytest.approx(H100.prompt_s(4_000), rel=0.01)
    worked(view, H100, [(64_000, 0)] * 20)
    apart = view.fit.speed
    assert apart is not None
    assert apart.pair_s == pytest.approx(H100.pair_s, rel=0.2)
    worked(view, H100, [(4_000, 0)] * 400)  # only these again: the proportion is remembered
    kept = view.fit.speed
    assert kept is not None
    assert kept.pair_s / kept.token_s == pytest.approx(apart.pair_s / apart.token_s, rel=0.5)


def test_a_report_of_hours_does_not_outweigh_what_comes() -> None:
    fit = Fit()
    fit.add(3.6e6, 1.0, 36_000.0)  # when another model's prompts were slow: 100 tokens/s
    for _ in range(60):
        fit.add(10_000.0, 1.0, 1.0)
    assert fit.speed is not None
    assert fit.speed.token_s == pytest.approx(1e-4, rel=0.2)


@given(
    st.lists(
        st.tuples(st.floats(64, 1e6), st.floats(0, 1e6), st.floats(1e-4, 1e4)),
        min_size=1,
        max_size=30,
    )
)
def test_any_reports_leave_it_within_bounds(reports: list[tuple[float, float, float]]) -> None:
    fit = Fit()
    for tokens, cached, seconds in reports:
        fit.add(tokens, pairs(tokens, cached), seconds)
    speed = fit.speed
    assert speed is not None
    assert 0 < speed.token_s < 1e4
    assert 0 <= speed.pair_s <= 0.0101 * speed.token_s
    slowest = max(seconds / tokens for tokens, _, seconds in reports)
    assert speed.token_s <= slowest * 1.01


def test_nonsense_is_no_measurement() -> None:
    view = big_p(0, tokens_per_s=1000.0)
    for busy_s in (float("nan"), float("inf"), -1.0):
        load = LoadReport(steps=1, busy_s=busy_s, computed_tokens=9000, computed_pairs=9)
        assert load.computed_since(LoadReport()) is None
        view.report(load)
    assert view.fit.speed is None


# ---- priors ------------------------------------------------------------------------------


def test_until_it_is_measured_a_worker_is_as_its_product() -> None:
    """Its own start-up figure is of a short prompt alone."""
    known = learned(product="NVIDIA H100 80GB HBM3")
    slow = from_data_sheet(KNOWN_MODELS["llama-3-8b"], GPUS["l4"], 1)
    other = learned(slow, 1, product="NVIDIA L4")
    new = big_p(2, tokens_per_s=500.0, product="NVIDIA H100 80GB HBM3")
    speeds = Speeds([known, other, new])
    assert speeds.prompt(new) == known.fit.speed
    stranger = big_p(3, tokens_per_s=500.0, product="")
    assert speeds.prompt(stranger) == PromptSpeed(1 / 500.0)
    worked(new, slow, [(8_000, 0)] * 20)  # what it does counts, not what it's called
    assert Speeds([known, other, new]).prompt(new) == new.fit.speed
    assert new.fit.speed != known.fit.speed


def test_an_old_worker_that_tells_no_pairs_has_its_mean_speed() -> None:
    view = big_p(0, tokens_per_s=1000.0)
    for number in range(1, 90):
        view.report(LoadReport(steps=number, busy_s=number, computed_tokens=500 * number))
    assert view.fit.speed is None
    assert Speeds([view]).prompt(view).token_s == pytest.approx(1 / 500, rel=0.01)


def test_who_decodes_too_has_its_own_word_and_its_products_attention() -> None:
    known = learned(product="NVIDIA H100 PCIe")
    both = big_d(0, tokens_per_s=3_000.0, product="NVIDIA H100 PCIe")
    assert known.fit.speed is not None
    assert Speeds([known, both]).prompt(both) == PromptSpeed(1 / 3_000.0, known.fit.speed.pair_s)


def test_data_sheets_stand_in_for_what_nobody_measured() -> None:
    a100 = big_p(0, tokens_per_s=10_000.0, product="NVIDIA A100-SXM4-80GB")
    h100 = big_p(1, product="NVIDIA H100 80GB HBM3")
    strange = big_p(2, product="Some Card")
    speeds = Speeds([a100, h100, strange])
    ratio = GPUS["h100"].flops / GPUS["a100"].flops
    assert 1 / speeds.prompt(h100).token_s == pytest.approx(10_000 * ratio)
    assert 1 / speeds.prompt(strange).token_s == pytest.approx(10_000), "the others' median"
    assert 1 / Speeds([h100]).prompt(h100).token_s == UNKNOWN_TOKENS_PER_S
    assert names(put(a100, h100, big_d(0), need=NEED))[1] == "p-1"


def test_decode_steps_have_the_same_priors() -> None:
    l40s = big_d(0, step_s=0.04, product="NVIDIA L40S")
    h100, again = (big_d(n, product="NVIDIA H100 NVL") for n in (1, 2))
    bandwidth = GPUS["l40s"].bandwidth_bytes_s / GPUS["h100"].bandwidth_bytes_s
    assert Speeds([l40s, h100]).step_s(h100) == pytest.approx(0.04 * bandwidth)
    again.step_s = 0.02
    assert Speeds([l40s, h100, again]).step_s(h100) == 0.02


def test_a_bad_moment_is_forgotten_where_nothing_runs() -> None:
    """Measured slow it gets no work, and without work it would never be measured again."""
    slow, other = (big_d(n, step_s=0.01, product="NVIDIA L4") for n in (0, 1))
    idle = LoadReport(kv_blocks=100, kv_free=100, step_s=0.5)
    for _ in range(20):
        slow.report(replace(idle, running=3, kv_free=50))
    assert Speeds([slow, other]).step_s(slow) > 0.4
    for _ in range(5):
        slow.report(idle)
    assert Speeds([slow, other]).step_s(slow) > 0.4
    slow.report(replace(idle, running=1))
    for _ in range(10):
        slow.report(idle)
    assert Speeds([slow, other]).step_s(slow) == 0.01
    slow.report(replace(idle, running=1, step_s=0.02))
    assert Speeds([slow, other]).step_s(slow) == 0.02


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla L4", "l4"),
        ("2 x a100", "a100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu x8", None),
        ("", None),
    ],
)
def test_products_by_their_own_names(product: str, name: str | None) -> None:
    assert of_product(product) == (GPUS[name] if name else None)
