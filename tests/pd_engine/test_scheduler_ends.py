"""The scheduler case by case: deadlines, cancelling, failing steps, preemption, load.

Tokens are checked by the world's clients; these tests check what happens when, and why.
"""

import math

import pytest

from pd_core.failures import Failure, FailureKind
from pd_engine.blocks import BlockPool
from pd_engine.scheduler import Scheduler
from pd_engine.types import Mode, StepOutput
from tests.pd_engine.scheduler_cases import (
    add,
    begin,
    config,
    prompt,
    rows,
    step_rows,
    world,
)

# ---- deadlines, cancelling, failing steps ------------------------------------------


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("stage", ["waiting", "started", "in flight"])
def test_a_deadline_ends_a_request_at_any_stage(mode: Mode, stage: str) -> None:
    w = world()
    client = add(w, prompt(40), mode=mode, deadline=w.now + 10)
    if stage != "waiting":
        w.step()
    if stage == "in flight" and mode is not Mode.IMPORT:
        begin(w)
    w.now += 10
    w.poll()
    assert client.failure is not None
    assert client.failure.kind is FailureKind.DEADLINE
    if mode is Mode.IMPORT and stage != "waiting":
        assert w.pool.counts().quarantined == 11  # its KV may be coming in
    w.finish()


def test_blocks_of_a_step_in_flight_get_no_new_owner() -> None:
    w = world(blocks=4)
    client = add(w, prompt(8), max_tokens=5)
    begin(w)
    w.cancel(client)
    other = add(w, prompt(16, 2), mode=Mode.IMPORT, max_tokens=1)
    w.poll()
    assert other.grant is None
    assert w.pool.counts().active == 2
    assert w.scheduler.busy
    w.end_step()
    w.poll()
    assert other.grant is not None
    w.finish()


def test_a_cancelled_row_is_dropped_silently() -> None:
    w = world()
    gone, stays = add(w, prompt(4)), add(w, prompt(4, 2))
    begin(w)
    w.cancel(gone)
    w.cancel(gone)
    w.end_step()
    assert gone.first is None
    assert stays.first is not None
    w.finish()


def test_a_failed_step_fails_its_requests_only() -> None:
    w = world(max_running=2)
    inside = [add(w, prompt(4), choices=(0, 1)), add(w, prompt(4, 2))]
    outside = add(w, prompt(4, 3))
    step_rows(w)
    begin(w)
    w.fail_step()
    assert inside[0].failure == Failure(FailureKind.STEP_FAILED, "injected")
    w.finish()
    assert inside[1].failure is None
    assert outside.failure is None


def test_a_step_that_draws_too_little_fails_closed() -> None:
    w = world()
    client, other = add(w, prompt(4), choices=(0, 1)), add(w, prompt(4, 2))
    batch = begin(w)
    output = w._compute(batch)
    short = {**output.samples, batch.rows[0].seq_id: output.samples[batch.rows[0].seq_id][:1]}
    w.batch = None
    w.see(w.scheduler.absorb(batch, StepOutput(short), w.now))
    assert client.failure is not None
    assert client.failure.kind is FailureKind.INTERNAL
    w.finish()
    assert other.failure is None


def test_one_batch_at_a_time() -> None:
    w = world()
    add(w, prompt(4))
    batch = begin(w)
    with pytest.raises(AssertionError, match="in flight"):
        w.scheduler.schedule(w.now)
    w.end_step()
    with pytest.raises(AssertionError, match="isn't the one in flight"):
        w.scheduler.absorb(batch, StepOutput({}), w.now)
    w.finish()


# ---- preemption --------------------------------------------------------------------


def test_two_that_each_need_one_block_more_than_there_is() -> None:
    w = world(blocks=5)
    clients = [add(w, prompt(8, i), max_tokens=9) for i in (1, 2)]
    w.finish()
    assert [client.failure for client in clients] == [None, None]
    assert [client.indices[0] for client in clients] == [8, 8]


def test_the_last_in_rank_is_preempted_and_comes_back_first() -> None:
    w = world(blocks=6)
    add(w, prompt(4), max_tokens=12, priority=1)
    add(w, prompt(4, 2), max_tokens=12)
    low = add(w, prompt(4, 3), max_tokens=12)
    found = step_rows(w)
    while w.scheduler.load().queued == 0:
        found = step_rows(w)
    assert [number for number, _, _ in found] == [0, 1]
    late = add(w, prompt(4, 4), max_tokens=12)
    before = low.indices[0]
    while low.indices[0] == before:
        assert late.first is None
        assert w.step()
    w.finish()
    assert late.failure is None


def test_too_long_to_compute_again_goes_back_to_the_router() -> None:
    w = world(blocks=5, recompute_max_tokens=8)
    first, second = (add(w, prompt(8, i), max_tokens=9) for i in (1, 2))
    w.finish()
    assert first.failure is None
    assert second.failure is not None
    assert second.failure.kind is FailureKind.PREEMPTED
    assert "9 tokens are too many" in second.failure.message


def test_after_cancelling_nothing_more_is_heard() -> None:
    w = world(blocks=5, recompute_max_tokens=8)
    _, second = (add(w, prompt(8, i), max_tokens=9) for i in (1, 2))
    begin(w)
    while w.scheduler.load().running == 2:
        w.end_step()
        begin(w)
    w.cancel(second)  # it was preempted for good, which isn't told yet
    w.end_step()
    assert second.failure is None
    w.finish()


def test_a_preempted_prompt_just_waits_again() -> None:
    w = world(blocks=6, max_batch_tokens=2, max_running=2, recompute_max_tokens=0)
    first = add(w, prompt(4), max_tokens=12)
    while first.first is None:
        w.step()
    second = add(w, prompt(12, 2), max_tokens=1)
    while w.scheduler.load().running < 2:
        w.step()
    while w.scheduler.load().running == 2:
        begin(w)
        w.end_step()
    assert len(second.computed) == 8
    w.finish()
    assert second.failure is None
    assert second.cached_tokens == 0  # what the cache kept, it had computed itself


def test_an_export_is_never_preempted() -> None:
    w = world(blocks=6, max_batch_tokens=2, max_running=2)
    first = add(w, prompt(4), max_tokens=12)
    while first.first is None:
        w.step()
    export = add(w, prompt(12, 2), mode=Mode.EXPORT)
    while rows(w, begin(w))[0][0] == 0:  # until it finds no block
        w.end_step()
    assert first.indices[0] == 8
    assert export.first is None
    w.end_step()
    while w.step():
        pass
    assert export.first is not None
    assert first.indices[0] == 8  # it waits where it is
    w.release_export(export)
    assert step_rows(w) == [(0, 12, 1)]
    w.finish()
    assert first.failure is None


def test_copies_of_a_request_that_fails_meanwhile_are_dropped() -> None:
    """The destination may have a new owner already when the step runs."""
    w = world(blocks=4, recompute_max_tokens=0)
    client = add(w, prompt(6), choices=(0, 1, 2, 3), max_tokens=9)
    step_rows(w)
    outside = add(w, prompt(4, 2), max_tokens=2)
    batch = begin(w)  # two choices found a block, the third took the fourth's
    assert client.failure is None
    w.see(w.scheduler.take_events())
    assert client.failure is not None
    assert batch.copies == ()
    assert rows(w, batch) == [(1, 0, 4)]
    w.end_step()
    w.finish()
    assert outside.failure is None


def test_what_runs_keeps_room_to_grow_by_one_block() -> None:
    w = world(blocks=5)
    add(w, prompt(4), max_tokens=12)
    step_rows(w)
    late = add(w, prompt(16, 2), max_tokens=1)
    assert step_rows(w) == [(0, 4, 1)]
    assert late.first is None
    w.finish()


def test_choices_preempt_each_other_in_an_exact_pool() -> None:
    for mode in (Mode.LOCAL, Mode.IMPORT):
        w = world(blocks=4)
        client = add(w, prompt(7), mode=mode, choices=(0, 1, 2), max_tokens=10)
        w.finish()
        assert client.failure is None
        assert client.indices == {0: 9, 1: 9, 2: 9}


def test_a_preempted_sequence_that_fails_takes_its_siblings_along() -> None:
    w = world(blocks=4, recompute_max_tokens=0)
    client = add(w, prompt(7), choices=(0, 1, 2), max_tokens=10)
    other = add(w, prompt(4, 2), max_tokens=1)
    w.finish()
    assert client.failure is not None
    assert client.failure.kind is FailureKind.PREEMPTED
    assert other.failure is None


# ---- load --------------------------------------------------------------------------


def test_load_counts_requests_tokens_and_blocks() -> None:
    w = world(blocks=20, max_batch_tokens=16, max_running=3)
    add(w, prompt(20))
    add(w, prompt(8, 2), mode=Mode.IMPORT, max_tokens=1)
    add(w, prompt(60, 3), mode=Mode.IMPORT, max_tokens=1)
    add(w, prompt(10, 4))
    step_rows(w)
    load = w.scheduler.load()
    assert (load.queued, load.running, load.waiting_grants) == (1, 1, 1)
    assert load.pending_tokens == 4 + 10
    assert load.pending_pairs == (4 * 16 + 4 * 4 / 2) + 10 * 10 / 2, "16 are computed of the first"
    assert (load.kv_blocks, load.kv_active, load.kv_granted) == (20, 5, 2)
    w.finish()
    assert w.scheduler.load().running == 0


def test_unknown_keys_are_no_error() -> None:
    scheduler = Scheduler(config(), BlockPool(4, 4))
    scheduler.cancel((1, 1), 0.0)
    scheduler.release_export((1, 1))
    scheduler.release_quarantine((1, 1))
    assert scheduler.key_of(7) is None
    assert not scheduler.busy
    assert scheduler.poll(math.inf) == []
