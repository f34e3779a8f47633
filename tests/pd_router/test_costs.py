"""Covers costs, routing, affinity and what worker views learn: predictions in seconds, the
choice whether to disaggregate, sessions, several routers, and the policies by name."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_core.estimate import LINKS, Link
from pd_core.policies import POLICIES
from pd_router import affinity
from pd_router.costs import Costs, outlook, soonest
from pd_router.fleet import LoadReport, WorkerView, routers_seen
from pd_router.policy import Exclusions, Need, Placement, place
from pd_router.routing import Chance, Routing
from tests.pd_router.test_policy import d, p

NEED = Need(tokens=2000, output_tokens=100)
BIG = {"kv_blocks": 10_000, "max_model_tokens": 50_000}


def big_p(number: int, pending: int = 0, **options: object) -> WorkerView:
    return p(number, pending, **BIG, **options)


def big_d(number: int, used: int = 0, **options: object) -> WorkerView:
    made = d(number, 0, **BIG, **options)
    made.load = LoadReport(kv_blocks=10_000, kv_free=10_000 - used)
    return made


def put(
    *workers: WorkerView,
    need: Need = NEED,
    cached: dict[str, int] | None = None,
    routing: Routing | None = None,
    chance: Chance | None = None,
    blocks: tuple[bytes, ...] = (),
) -> Placement:
    known = cached or {}
    found = place(
        need,
        workers,
        lambda w: known.get(w.id.name, 0),
        Exclusions(),
        block_hash=lambda size, block: blocks[block] if size and block < len(blocks) else None,
        routing=routing or Routing(),
        chance=chance or Chance(),
    )
    assert isinstance(found, Placement)
    return found


def names(found: Placement) -> tuple[str, str | None]:
    return found.decode.name, found.prefill.name if found.prefill else None


# ---- seconds ------------------------------------------------------------------------------


def test_a_fast_worker_with_more_waiting_may_be_sooner() -> None:
    fast, slow = big_p(1, 4000, tokens_per_s=20_000), big_p(0, 0, tokens_per_s=4_000)
    assert names(put(fast, slow, big_d(0))) == ("d-0", "p-1")
    fast.load = replace(fast.load, pending_tokens=9000)
    assert names(put(fast, slow, big_d(0))) == ("d-0", "p-0")


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    workers = (big_p(0, 5000), big_p(1, 0), big_d(0))
    assert names(put(*workers, cached={"p-0": 1900})) == ("d-0", "p-1")
    workers[0].load = replace(workers[0].load, pending_tokens=500)
    assert names(put(*workers, cached={"p-0": 1900})) == ("d-0", "p-0")


def test_a_faster_decode_worker_may_be_fuller() -> None:
    fast = big_d(1, 5000, step_s=0.01, step_fill=0.5)
    slow = big_d(0, 3000, step_s=0.03, step_fill=0.3)
    assert names(put(big_p(0), fast, slow)) == ("d-1", "p-0")


# ---- whether to disaggregate -----------------------------------------------------------


def local(**options: object) -> WorkerView:
    return big_d(0, tokens_per_s=10_000, **options)


def test_a_cached_prompt_is_computed_where_it_is_decoded() -> None:
    found = put(big_p(0, tokens_per_s=10_000), local(), cached={"d-0": 1990})
    assert names(found) == ("d-0", None)
    assert found.compute_tokens == 10
    assert "first token sooner" in found.reason


def test_a_busy_prefill_pool_is_gone_round() -> None:
    assert names(put(big_p(0, 20_000, tokens_per_s=10_000), local())) == ("d-0", None)
    assert names(put(big_p(0, 0, tokens_per_s=10_000), local())) == ("d-0", "p-0")


def test_a_slow_link_is_gone_round() -> None:
    decode = local(kv_token_bytes=327_680.0, kv_layers=80)
    prefill = big_p(0, tokens_per_s=10_000, kv_token_bytes=327_680.0)
    routing = Routing(link=Link("slow", 1e8, 1e-3))
    assert names(put(prefill, decode, routing=routing)) == ("d-0", None)
    fast = Routing(link=LINKS["rdma-400g"])
    assert names(put(prefill, decode, routing=fast)) == ("d-0", "p-0")
    decode.carried(655_000_000, 0.01)  # what was seen counts, not what was assumed
    assert names(put(prefill, decode, routing=routing)) == ("d-0", "p-0")


def test_what_travels_is_what_the_sender_has() -> None:
    decode = local(kv_token_bytes=327_680.0, kv_layers=80)
    narrow = big_p(0, tokens_per_s=10_000, kv_token_bytes=327.68)
    routing = Routing(link=Link("slow", 1e8, 1e-3))
    assert names(put(narrow, decode, routing=routing)) == ("d-0", "p-0")


def test_many_streams_keep_a_prompt_away() -> None:
    """Those who run there would all wait for it."""
    busy = local()
    busy.load = replace(busy.load, running=50)
    assert names(put(big_p(0, 20_000, tokens_per_s=10_000), busy)) == ("d-0", "p-0")


def test_never_and_always() -> None:
    workers = (big_p(0, 90_000, tokens_per_s=10_000), local())
    assert names(put(*workers, routing=Routing(disaggregate="always"))) == ("d-0", "p-0")
    found = put(big_p(0), big_d(0), routing=Routing(disaggregate="never"))
    assert names(found) == ("d-0", None)
    assert "switched off" in found.reason


def test_speeds_that_nobody_measured_decide_nothing() -> None:
    assert names(put(big_p(0, 90_000), big_d(0))) == ("d-0", "p-0")


# ---- sessions ----------------------------------------------------------------------------


def session(number: int) -> Need:
    return replace(NEED, session=b"session-%d" % number)


def test_a_session_stays_and_sessions_spread() -> None:
    workers = [big_p(0), *[big_d(n) for n in range(4)]]
    homes = {n: put(*workers, need=session(n)).decode.name for n in range(200)}
    assert {n: put(*workers, need=session(n)).decode.name for n in range(200)} == homes
    counts = [list(homes.values()).count(f"d-{n}") for n in range(4)]
    assert min(counts) > 20, counts


def test_a_worker_that_goes_moves_only_its_own_sessions() -> None:
    workers = [big_d(n) for n in range(4)]
    before = {n: affinity.owner(b"%d" % n, workers) for n in range(100)}
    after = {n: affinity.owner(b"%d" % n, workers[:3]) for n in range(100)}
    moved = [n for n in before if before[n] is not after[n]]
    assert moved == [n for n in before if before[n] is workers[3]]


def test_a_full_worker_loses_its_sessions() -> None:
    workers = [big_p(0), *[big_d(n) for n in range(3)]]
    home = put(*workers, need=session(1)).decode
    view = next(w for w in workers if w.id == home)
    view.load = replace(view.load, kv_free=10_000 - 7_900)
    assert put(*workers, need=session(1)).decode == home
    view.load = replace(view.load, kv_free=10_000 - 8_100)
    assert put(*workers, need=session(1)).decode != home


# ---- several routers ---------------------------------------------------------------------


def test_routers_that_know_the_same_do_not_herd() -> None:
    """100 routers place one request each on what the same heartbeat told them."""
    workers = [*[big_p(n, 100 * n) for n in range(8)], *[big_d(n, 10 * n) for n in range(8)]]
    alone = [names(put(*workers, chance=Chance(lot=n * 7919))) for n in range(100)]
    assert set(alone) == {("d-0", "p-0")}
    many = [put(*workers, chance=Chance(n * 2654435761, n, 8.0)) for n in range(100)]
    for side in ("decode", "prefill"):
        chosen = [getattr(one, side).name for one in many]
        assert max(chosen.count(name) for name in chosen) <= 40
        assert "7" not in {name[-1] for name in chosen}, "never the worst of two"


def test_two_routers_draw_among_equals_and_one_takes_the_lowest() -> None:
    workers = [*[big_p(n) for n in range(4)], *[big_d(n) for n in range(4)]]
    rng = random.Random(1)
    many = [put(*workers, chance=Chance(rng.getrandbits(48), n, 2.0)) for n in range(200)]
    for side in ("decode", "prefill"):
        chosen = Counter(getattr(one, side).name for one in many)
        assert len(chosen) == 4
        assert max(chosen.values()) <= 80, chosen
    alone = {names(put(*workers, chance=Chance(rng.getrandbits(48), n))) for n in range(50)}
    assert alone == {("d-0", "p-0")}


def test_drawn_workers_do_not_hide_a_cached_prefix() -> None:
    workers = [*[big_p(n) for n in range(8)], big_d(0)]
    for lot in range(50):
        found = put(*workers, cached={"p-5": 1900}, chance=Chance(lot, lot, 8.0))
        assert names(found) == ("d-0", "p-5")


def homes(blocks: tuple[bytes, ...], *workers: WorkerView, **options: Any) -> set[str | None]:
    """Where 50 choices of 8 routers send prompts that begin so."""
    chances = [Chance(lot * 2654435761, lot, 8.0) for lot in range(50)]
    found = [put(*workers, blocks=blocks, chance=chance, **options) for chance in chances]
    return {names(one)[1] for one in found}


def test_a_new_prefix_goes_where_every_router_sends_it() -> None:
    workers = [*[big_p(n) for n in range(8)], big_d(0)]
    assert len(homes((), *workers)) > 3, "prompts without a whole block go anywhere"
    each = [homes((b"prefix-%d" % n,), *workers) for n in range(60)]
    assert all(len(one) == 1 for one in each)
    counts = Counter(name for one in each for name in one)
    assert len(counts) == 8, "prefixes spread"
    assert max(counts.values()) < 20
    alone = put(*workers, blocks=(b"prefix-0",))
    assert {names(alone)[1]} == each[0], "one that thinks itself alone sends it there too"
    assert "its new prefix belongs there" in alone.reason


def test_home_may_cost_a_little() -> None:
    workers = [*[big_p(n, tokens_per_s=1000.0) for n in range(8)], big_d(0)]
    [home] = homes((b"x",), *workers)
    view = next(w for w in workers if w.id.name == home)
    view.load = replace(view.load, pending_tokens=50)  # a fortieth of the prompt
    assert homes((b"x",), *workers) == {home}
    view.load = replace(view.load, pending_tokens=1500)
    assert home not in homes((b"x",), *workers)


def test_what_all_have_says_nothing_of_home() -> None:
    """A system prompt that every worker has: what comes behind it decides."""
    workers = [*[big_p(n) for n in range(8)], big_d(0)]
    system = {f"p-{n}": 4 for n in range(8)}
    each = [homes((b"system", b"talk-%d" % n), *workers, cached=system) for n in range(30)]
    assert all(len(one) == 1 for one in each)
    assert len({name for one in each for name in one}) > 4
    [one] = homes((b"system", b"talk-0"), *workers, cached={"p-6": 1900})
    assert one == "p-6", "who has it goes before"


def test_home_takes_nothing_from_who_has_a_part() -> None:
    has, home = big_p(0, tokens_per_s=1000.0), big_p(1, tokens_per_s=1000.0)
    workers = (has, home, big_d(0))
    new = next(key for key in (b"%d" % n for n in range(99)) if homes((key,), *workers) == {"p-1"})
    has.load = replace(has.load, pending_tokens=50)  # to go home would take hardly longer
    blocks = (*[b"a"] * 50, new)
    assert homes(blocks, *workers, cached={"p-0": 200}) == {"p-0"}
    assert homes(blocks, *workers, cached={"p-0": 200, "p-1": 200}) == {"p-1"}


def test_how_many_routers_there_are_shows_in_the_load() -> None:
    worker = big_d(0)
    worker.assign_decode(10, 10)
    worker.report(replace(worker.load, running=10))
    assert routers_seen([worker]) == 1.0
    worker.report(replace(worker.load, running=40))
    assert routers_seen([worker]) == 4.0


@given(st.integers(0, 1 << 64), st.integers(0, 9))
def test_two_are_drawn(lot: int, count: int) -> None:
    items = list(range(count))
    drawn = affinity.two_of(items, lot)
    assert len(drawn) == len(set(drawn)) == min(count, 2)
    assert set(drawn) <= set(items)


# ---- by name -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_places_and_says_so(policy: str) -> None:
    workers = [*[big_p(n, 10 * n) for n in range(4)], *[big_d(n, n) for n in range(4)]]
    got = [put(*workers, routing=Routing(policy), chance=Chance(n * 7919, n)) for n in range(64)]
    assert all(one.reason and one.considered for one in got)
    spread = {names(one) for one in got}
    assert (len(spread) > 3) == (policy in ("random", "round_robin")), spread


def test_prefix_alone_goes_where_the_prefix_is() -> None:
    workers = (big_p(0, 0), big_p(1, 90_000), big_d(0))
    found = put(*workers, cached={"p-1": 16}, routing=Routing("prefix"))
    assert names(found) == ("d-0", "p-1")


@pytest.mark.parametrize("policy", ["least_load", "prefix", "session"])
def test_load_is_counted_in_seconds(policy: str) -> None:
    """900 tokens are much for a slow worker, 1,000 nothing for a fast one."""
    slow = big_p(0, 900, tokens_per_s=1_000.0)
    fast = big_p(1, 1_000, tokens_per_s=100_000.0)
    assert names(put(slow, fast, big_d(0), routing=Routing(policy))) == ("d-0", "p-1")
    fast.load = replace(fast.load, pending_tokens=100_000)  # 1 s against 0.9 s
    assert names(put(slow, fast, big_d(0), routing=Routing(policy))) == ("d-0", "p-0")


def test_prompt_length_alone_sends_long_prompts_to_fast_workers() -> None:
    slow, fast = big_p(0, 0, tokens_per_s=1_000.0), big_p(1, 10_000, tokens_per_s=10_000.0)
    routing = Routing("prompt_length")

    def chosen(tokens: int) -> str | None:
        need = replace(NEED, tokens=tokens)
        return names(put(slow, fast, big_d(0), need=need, routing=routing))[1]

    assert chosen(500) == "p-0"  # 0.5 s against a second's wait
    assert chosen(2000) == "p-1"  # 2 s against 1.2 s
    found = put(slow, fast, big_d(0), cached={"p-0": 1900}, routing=routing)
    assert names(found)[1] == "p-1", "by length alone"


def test_least_outstanding_alone_counts_requests() -> None:
    full, many, few = big_d(0, 9000), big_d(1, 10), big_d(2, 5000)
    full.load = replace(full.load, running=3)
    many.load = replace(many.load, running=9)
    few.load = replace(few.load, running=1, waiting_grants=1)
    routing = Routing("least_outstanding")
    assert names(put(big_p(0), full, many, few, routing=routing)) == ("d-2", "p-0")
    few.assign_decode(10, 2)  # whose prompts are computed still
    assert names(put(big_p(0), full, many, few, routing=routing)) == ("d-0", "p-0")
    few.report(replace(few.load, running=0, waiting_grants=0))
    assert few.outstanding == 2, "the heartbeat knows nothing of them yet"


def test_least_load_alone_takes_least_kv() -> None:
    full, many = big_d(0, 9000), big_d(1, 10)
    many.load = replace(many.load, running=9)
    assert names(put(big_p(0), full, many, routing=Routing("least_load"))) == ("d-1", "p-0")


@pytest.mark.parametrize("limit", [0.5, 0.8])
def test_session_alone_stays_while_there_is_room(limit: float) -> None:
    workers = [*[big_p(n) for n in range(3)], *[big_d(n) for n in range(3)]]
    routing = Routing("session", session_kv_limit=limit)
    first = put(*workers, need=session(7), routing=routing)
    home = next(w for w in workers if w.id == first.decode)
    used = int(10_000 * limit)
    home.load = replace(home.load, kv_free=10_000 - used + 1)
    assert names(put(*workers, need=session(7), routing=routing)) == names(first)
    home.load = replace(home.load, kv_free=10_000 - used)
    moved = put(*workers, need=session(7), routing=routing)
    assert moved.decode != first.decode
    assert moved.prefill == first.prefill


def test_wrong_settings_are_told() -> None:
    with pytest.raises(ValueError, match="policy 'x'"):
        Routing("x")
    with pytest.raises(ValueError, match="disaggregate 'x'"):
        Routing(disaggregate="x")
    with pytest.raises(ValueError, match="session_kv_limit"):
        Routing(session_kv_limit=0)


# ---- what views learn --------------------------------------------------------------------


def test_speed_is_learned_from_steps_that_tell() -> None:
    view = p(0, tokens_per_s=1000.0)
    view.report(LoadReport(steps=10, busy_s=1.0, computed_tokens=100))
    assert view.tokens_per_s == 1000.0, "steps of ten tokens: overhead, not speed"
    for number in range(1, 60):
        view.report(
            LoadReport(steps=10 + number, busy_s=1.0 + number, computed_tokens=100 + 500 * number)
        )
    assert view.tokens_per_s == pytest.approx(500, rel=0.01)


def test_links_are_learned_from_their_fastest() -> None:
    view = d(0)
    view.carried(1000, 0.001)
    assert view.link_bytes_s == 0, "too small to tell"
    view.carried(1 << 30, 1.0)
    view.carried(1 << 30, 4.0)
    assert view.link_bytes_s == pytest.approx((1 << 30) * 0.99)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 9999), st.integers(0, 9999))
def test_more_work_never_costs_less(queue: int, more: int, used: int, extra: int) -> None:
    costs = Costs(NEED, (), LINKS["tcp-25g"])
    less, greater = big_p(0, queue), big_p(1, queue + more)
    assert costs.prefill(less, 0).ready_s <= costs.prefill(greater, 0).ready_s
    assert costs.prefill(less, 100).ready_s <= costs.prefill(less, 0).ready_s
    low, high = sorted((used, extra))
    assert costs.decode(big_d(0, low)) <= costs.decode(big_d(1, high))


def test_the_outlook() -> None:
    assert soonest([]) == (0.0, 0.0)
    workers = [p(0, 500, tokens_per_s=1000), p(1, 100, tokens_per_s=100), d(0)]
    assert soonest(workers) == (0.5, 1100.0)
    assert soonest([d(0, tokens_per_s=50)]) == (0.0, 50.0)


def test_the_outlook_where_decode_has_no_room() -> None:
    """100 blocks; `need` takes 10 of them, and a request keeps its room for 5 s."""
    need, prefill = Need(tokens=36, output_tokens=4), p(0, 500, tokens_per_s=1000)
    assert need.reserve_blocks(d(0)) == 10

    def ahead(*decodes: WorkerView) -> tuple[float, float, float]:
        return outlook([prefill, *decodes], need)

    assert ahead(d(0, 90, stay_s=5.0)) == (0.5, 1000.0, 0.0), "it fits"
    full = d(0, 100, stay_s=5.0)  # gives 20 blocks back a second: room for two requests
    assert ahead(full) == (pytest.approx(1.5 * 0.5), 1000.0, 2.0)
    full.load = replace(full.load, waiting_grants=5)
    assert ahead(full) == (pytest.approx(1.5 * 3.0), 1000.0, 2.0)
    assert ahead(full, d(1, 50)) == (0.5, 1000.0, 0.0), "another has room"
    assert ahead(replace(full, stay_s=0.0)) == (0.5, 1000.0, 0.0), "nobody knows: nobody is refused"
    full.load = replace(full.load, waiting_grants=0)
    full.assign_decode(50, 5)
    assert ahead(full) == (pytest.approx(1.5 * 3.0), 1000.0, 2.0), (
        "those that were sent since the heartbeat count"
    )
    assert outlook([prefill, full])[0] == pytest.approx(1.5 * 51 / 20), "whatever comes next"


def test_a_stay_is_the_mean_of_late() -> None:
    view = d(0)
    view.stayed(4.0)
    assert view.stay_s == 4.0
    for _ in range(200):
        view.stayed(2.0)
    assert view.stay_s == pytest.approx(2.0, abs=0.01)
