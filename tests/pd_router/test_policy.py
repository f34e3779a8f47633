"""Choosing workers: least KV for decode, least tokens for prefill, ties, exclusions, pairs."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pd_core.kv import KvForm
from pd_router.fleet import LoadReport, Role, WorkerId, WorkerView
from pd_router.policy import (
    Exclusions,
    Need,
    Placement,
    Unplaced,
    compatible,
    pair_usable,
    place,
)

NEED = Need(tokens=40, output_tokens=8)
KV = KvForm("m", "float32", block_tokens=4, layers=2, kv_heads=1, head_dim=8)
OTHER_MODEL = replace(KV, model_hash="other")


def view(name: str, role: Role, used: int = 0, pending: int = 0, **options: object) -> WorkerView:
    made = WorkerView(
        id=WorkerId(name, "e"),
        role=role,
        kv=KV,
        kv_blocks=100,
        max_model_tokens=300,
        revision="r",
        load=LoadReport(kv_blocks=100, kv_free=100 - used, pending_tokens=pending),
        usable=True,
    )
    for key, value in options.items():
        setattr(made, key, value)
    return made


def p(number: int, pending: int = 0, **options: object) -> WorkerView:
    return view(f"p-{number}", Role.PREFILL, 0, pending, **options)


def d(number: int, used: int = 0, **options: object) -> WorkerView:
    return view(f"d-{number}", Role.DECODE, used, **options)


def both(number: int, used: int = 0, **options: object) -> WorkerView:
    return view(f"b-{number}", Role.BOTH, used, **options)


def choose(
    *workers: WorkerView,
    need: Need = NEED,
    cached: dict[str, int] | None = None,
    exclusions: Exclusions | None = None,
) -> tuple[str, str | None]:
    found = placed(*workers, need=need, cached=cached, exclusions=exclusions)
    return found.decode.name, found.prefill.name if found.prefill else None


def placed(
    *workers: WorkerView,
    need: Need = NEED,
    cached: dict[str, int] | None = None,
    exclusions: Exclusions | None = None,
) -> Placement:
    known = cached or {}
    found = place(need, workers, lambda w: known.get(w.id.name, 0), exclusions or Exclusions())
    assert isinstance(found, Placement), found
    return found


def unplaced(*workers: WorkerView, exclusions: Exclusions | None = None) -> Unplaced:
    found = place(NEED, workers, lambda _: 0, exclusions or Exclusions())
    assert isinstance(found, Unplaced)
    return found


def test_least_kv_decodes_and_least_pending_prefills() -> None:
    assert choose(p(0, 900), p(1, 100), d(0, 50), d(1, 20)) == ("d-1", "p-1")


def test_ties_go_to_the_low_ordinal() -> None:
    assert choose(p(10), p(2), d(10), d(9)) == ("d-9", "p-2")


def test_a_cached_prefix_counts_against_pending_tokens() -> None:
    workers = (p(0, 0), p(1, 20), d(0))
    assert choose(*workers, cached={"p-1": 36}) == ("d-0", "p-1")
    found = placed(*workers, cached={"p-1": 36})
    assert found.compute_tokens == 4
    assert choose(*workers, cached={"p-1": 16}) == ("d-0", "p-0")


def test_who_waits_for_room_is_full() -> None:
    waiting = d(0, 10)
    waiting.load = replace(waiting.load, waiting_grants=2)
    assert choose(waiting, d(1, 80), p(0)) == ("d-1", "p-0")


def test_a_burst_between_heartbeats_is_spread() -> None:
    workers = [p(0), p(1), d(0), d(1)]
    got = []
    for _ in range(4):
        found = placed(*workers)
        got.append((found.decode.name, found.prefill.name if found.prefill else None))
        by_id = {w.id: w for w in workers}
        by_id[found.decode].assign_decode(found.blocks, 1)
        if found.prefill:
            by_id[found.prefill].assign_prefill(found.compute_tokens)
    assert sorted(got) == [("d-0", "p-0")] * 2 + [("d-1", "p-1")] * 2


def test_a_hot_prefix_does_not_send_everything_to_one_worker() -> None:
    workers = [p(0), p(1), p(2), d(0, kv_blocks=100_000)]
    got = []
    for _ in range(90):
        found = placed(*workers, cached={"p-1": 36})
        assert found.prefill is not None
        got.append(found.prefill.name)
        next(w for w in workers if w.id == found.prefill).assign_prefill(found.compute_tokens)
    assert got[0] == "p-1"
    assert all(got.count(f"p-{n}") >= 3 for n in range(3)), got  # by tokens: 4 against 40


def test_only_whose_kv_means_the_same_pair() -> None:
    other = p(0, kv=OTHER_MODEL)
    assert choose(other, p(1, 999), d(0)) == ("d-0", "p-1")
    assert choose(other, d(0)) == ("d-0", None)
    assert not compatible(d(0), other)


def test_precision_and_block_size_may_differ() -> None:
    other = p(0, kv=replace(KV, dtype="bfloat16", block_tokens=16))
    assert compatible(d(0), other)
    assert choose(other, d(0)) == ("d-0", "p-0")


def test_equal_revision_is_preferred() -> None:
    assert choose(p(0, 0, revision="old"), p(1, 500), d(0)) == ("d-0", "p-1")
    assert choose(p(0, 0, revision="old"), d(0)) == ("d-0", "p-0")


def test_decode_with_a_partner_comes_first() -> None:
    assert choose(p(0), d(0, 0, kv=OTHER_MODEL), d(1, 50)) == ("d-1", "p-0")
    assert choose(p(0), d(0, 0, kv=OTHER_MODEL)) == ("d-0", None)


def test_both_prefill_at_home() -> None:
    assert choose(p(0), both(0)) == ("b-0", None)
    assert choose(p(0), both(0, 50), d(0, 10)) == ("d-0", "p-0")
    assert choose(p(0), both(0, 10), d(0, 50)) == ("b-0", None)


def test_unusable_workers_get_nothing() -> None:
    assert choose(p(0, usable=False), p(1, 999), d(0, usable=False), d(1, 90)) == ("d-1", "p-1")
    assert unplaced(p(0), d(0, usable=False)).reason == "no decode worker is usable"
    assert not pair_usable([p(0), d(0, usable=False)])
    assert pair_usable([d(0)])


def test_too_small_workers_get_nothing() -> None:
    need = Need(tokens=40, output_tokens=1)
    assert choose(d(0, kv_blocks=9), d(1, 90), p(0), need=need) == ("d-1", "p-0")
    assert choose(d(0, max_model_tokens=40), d(1, 90), p(0), need=need) == ("d-1", "p-0")
    assert choose(d(0), p(0, kv_blocks=9), need=need) == ("d-0", None)
    assert "can hold 40 tokens" in unplaced(d(0, kv_blocks=9)).reason


def test_exclusions() -> None:
    workers = (p(0), p(1, 500), d(0), d(1, 50))
    ids = {w.id.name: w.id for w in workers}
    assert choose(*workers, exclusions=Exclusions(barred={ids["d-0"]})) == ("d-1", "p-0")
    assert choose(*workers, exclusions=Exclusions(disliked={ids["d-0"], ids["p-0"]})) == (
        "d-1",
        "p-1",
    )
    pairs = Exclusions(pairs={(ids["d-0"], ids["p-0"])})
    assert choose(*workers, exclusions=pairs) == ("d-1", "p-0")  # 500 tokens are worse
    assert choose(*workers[:3], exclusions=pairs) == ("d-0", "p-1")


def test_disliked_decode_is_used_when_alone_and_disliked_prefill_isnt() -> None:
    workers = (p(0), d(0))
    ids = {w.id for w in workers}
    assert choose(*workers, exclusions=Exclusions(disliked=ids)) == ("d-0", None)
    found = unplaced(*workers, exclusions=Exclusions(barred=ids))
    assert found.barred
    assert "d-0" in found.reason


def test_the_reason_names_the_candidates() -> None:
    reason = placed(p(0, 10), p(1, 500), d(0, 50), d(1, 25), cached={"p-0": 8}).reason
    assert reason == (
        "decode d-1: soonest of d-0 0.259 s at 50% KV, d-1 0.219 s at 25% KV; "
        "prefill p-0: first token soonest of p-0 0.047 s, p-1 0.545 s (8 cached)"
    )
    many = placed(*[d(n, 10 + n) for n in range(9)]).reason
    assert "5 more" in many
    assert "no prefill worker is usable" in many


def test_several_choices_reserve_their_own_tails() -> None:
    worker = d(0)
    assert Need(tokens=40, output_tokens=8).reserve_blocks(worker) == 12
    assert Need(tokens=40, output_tokens=8, choices=3).reserve_blocks(worker) == 16
    assert Need(tokens=40, output_tokens=9999).reserve_blocks(worker) == 10 + 64


@given(
    st.lists(st.tuples(st.integers(0, 100), st.booleans()), max_size=6),
    st.lists(st.tuples(st.integers(0, 10_000), st.booleans()), max_size=6),
    st.sets(st.integers(0, 11)),
    st.sets(st.integers(0, 11)),
)
def test_what_is_chosen_is_allowed_and_least(
    decodes: list[tuple[int, bool]],
    prefills: list[tuple[int, bool]],
    barred: set[int],
    disliked: set[int],
) -> None:
    workers = [d(i, used, usable=usable) for i, (used, usable) in enumerate(decodes)]
    workers += [p(i, pending, usable=usable) for i, (pending, usable) in enumerate(prefills)]

    def some(numbers: set[int]) -> set[WorkerId]:
        return {workers[n].id for n in numbers if n < len(workers)}

    exclusions = Exclusions(some(barred), some(disliked))
    found = place(NEED, workers, lambda _: 0, exclusions)
    allowed = [w for w in workers if w.usable and w.id not in exclusions.barred]
    decoders = [w for w in allowed if w.role is Role.DECODE]
    if isinstance(found, Unplaced):
        assert not decoders
        return
    by_id = {w.id: w for w in workers}
    decode = by_id[found.decode]
    assert decode in decoders
    liked = [w for w in decoders if w.id not in exclusions.disliked] or decoders
    assert decode.kv_used == min(w.kv_used for w in liked)
    partners = [w for w in allowed if w.role is Role.PREFILL and w.id not in exclusions.disliked]
    if found.prefill is None:
        assert not partners
    else:
        assert by_id[found.prefill] in partners
        assert by_id[found.prefill].pending_tokens == min(w.pending_tokens for w in partners)


def test_prefill_alone_can_be_chosen_anew() -> None:
    workers = (p(0), p(1), d(0), d(1, 90))
    found = place(NEED, workers, lambda _: 0, Exclusions(), WorkerId("d-1", "e"))
    assert isinstance(found, Placement)
    assert (found.decode.name, found.prefill) == ("d-1", WorkerId("p-0", "e"))
    gone = place(NEED, workers, lambda _: 0, Exclusions(), WorkerId("d-9", "e"))
    assert isinstance(gone, Unplaced)
