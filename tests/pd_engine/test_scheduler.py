"""The scheduler case by case: order, budget, prefix hits, choices, hand-over, preemption, ends.

Tokens are checked by the world's clients; these tests check what happens when, and why.
"""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from pd_core.failures import Failure, FailureKind
from pd_engine.blocks import BlockPool
from pd_engine.scheduler import Scheduler, SchedulerConfig
from pd_engine.types import Batch, Finish, Mode, Prefilled, SampleSpec, StepOutput, TokenOut
from tests.pd_engine.scheduler_world import Client, World


def config(**changes: Any) -> SchedulerConfig:
    base: dict[str, Any] = {
        "max_batch_tokens": 64,
        "chunk_tokens": 16,
        "max_running": 8,
        "max_queued": 100,
        "max_model_tokens": 1000,
        "recompute_max_tokens": 1000,
        "decode_reserve_tokens": 8,
    }
    return SchedulerConfig(**{**base, **changes})


def world(blocks: int = 100, block_tokens: int = 4, **changes: Any) -> World:
    return World(config(**changes), blocks, block_tokens)


def prompt(length: int, first: int = 1) -> list[int]:
    """A prompt that shares no block with those of another `first`."""
    return [first, *([1] * (length - 1))]


def add(w: World, tokens: Sequence[int], **what: Any) -> Client:
    client = w.add(tokens, **what)
    assert isinstance(client, Client)
    return client


def refused(w: World, tokens: Sequence[int], **what: Any) -> Failure:
    failure = w.add(tokens, **what)
    assert isinstance(failure, Failure)
    return failure


def begin(w: World) -> Batch:
    assert w.begin_step()
    assert w.batch is not None
    return w.batch


def rows(w: World, batch: Batch) -> list[tuple[int, int, int]]:
    """(number of the request, first position, tokens) of each row, in order."""
    found = []
    for row in batch.rows:
        key = w.scheduler.key_of(row.seq_id)
        assert key is not None
        found.append((key[1], row.start, len(row.token_ids)))
    return found


def step_rows(w: World) -> list[tuple[int, int, int]]:
    found = rows(w, begin(w))
    w.end_step()
    w.check()
    return found


# ---- what is refused ---------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    failure = refused(world(max_model_tokens=10), prompt(10))
    assert failure.kind is FailureKind.CONTEXT_TOO_LONG
    assert "10 tokens" in failure.message


def test_a_prompt_beyond_the_pool_is_refused_with_the_numbers() -> None:
    failure = refused(world(blocks=3), prompt(13))
    assert failure.kind is FailureKind.POOL_TOO_SMALL
    assert "13 tokens need 4 KV blocks, but this worker has 3 of 4 tokens" in failure.message


@pytest.mark.parametrize(
    "what",
    [
        {"tokens": []},
        {"tokens": [1], "max_tokens": 0},
        {"tokens": [1], "max_tokens": 2, "resumed": 2},
        {"tokens": [1], "choices": ()},
        {"tokens": [1], "choices": (0, 0)},
    ],
)
def test_nothing_to_do_is_refused(what: dict[str, Any]) -> None:
    choices = what.pop("choices", (0,))
    if choices:
        assert refused(world(), choices=choices, **what).kind is FailureKind.INVALID_REQUEST
        return
    with pytest.raises(IndexError):  # the world itself needs one
        world().add(choices=choices, **what)


def test_a_key_in_use_is_refused() -> None:
    w = world()
    client = add(w, [1, 2])
    w.clients.clear()  # the next one gets the same number
    assert refused(w, [3]).kind is FailureKind.INVALID_REQUEST
    w.clients[client.req.key] = client
    w.finish()


def test_a_full_queue_and_a_draining_worker_refuse() -> None:
    w = world(max_queued=2, max_running=1)
    add(w, [1])
    add(w, [2])
    assert refused(w, [3]).kind is FailureKind.NO_CAPACITY
    w.scheduler.drain()
    assert refused(w, [3]).kind is FailureKind.DRAINING
    w.finish()  # what was accepted goes on
    assert all(client.failure is None for client in w.clients.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_batch_tokens": 0},
        {"max_running": 0},
        {"max_queued": 0},
        {"max_model_tokens": 0},
        {"chunk_tokens": -1},
        {"max_running": 65},
    ],
)
def test_limits_that_make_no_sense(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        config(**changes)


# ---- a request by itself -----------------------------------------------------------


def test_a_local_request_is_prefilled_in_chunks_and_decodes() -> None:
    w = world()
    client = add(w, prompt(40), max_tokens=3)
    assert [step_rows(w) for _ in range(5)] == [
        [(0, 0, 16)],
        [(0, 16, 16)],
        [(0, 32, 8)],
        [(0, 40, 1)],
        [(0, 41, 1)],
    ]
    assert client.over
    assert client.finish == {0: Finish.LENGTH}
    assert not w.step()
    w.finish()


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("mode", Mode)
def test_few_tokens(mode: Mode, max_tokens: int) -> None:
    w = world()
    client = add(w, prompt(5), mode=mode, max_tokens=max_tokens)
    w.finish()
    assert client.indices[0] == (0 if mode is Mode.EXPORT else max_tokens - 1)


@pytest.mark.parametrize("mode", Mode)
def test_the_first_token_may_end_the_request(mode: Mode) -> None:
    w = world()
    stop = Client(add(w, prompt(5)).req, 1000).expected(0, 0).token
    client = add(w, prompt(5), mode=mode, max_tokens=9, stop=(stop,))
    ignoring = add(w, prompt(5), mode=mode, max_tokens=3, stop=(stop,), ignore_eos=True)
    later = add(w, prompt(5), mode=mode, max_tokens=3, stop=(stop,), min_tokens=1)
    w.finish()
    assert client.finish == {0: Finish.STOP}
    assert client.indices[0] == 0
    for other in (ignoring, later):
        assert other.finish.get(0) is not Finish.STOP or other.indices[0] > 0


def test_output_ends_at_the_context_and_at_the_pool() -> None:
    w = world(max_model_tokens=10)
    client = add(w, prompt(7), max_tokens=100)
    w.finish()
    assert (client.indices[0], client.finish[0]) == (2, Finish.LENGTH)
    w = world(blocks=3)
    client = add(w, prompt(7), max_tokens=100)
    w.finish()  # 12 tokens have room, and the last one needs none
    assert (client.indices[0], client.finish[0]) == (5, Finish.LENGTH)


@pytest.mark.parametrize("mode", Mode)
def test_an_exact_pool_is_enough(mode: Mode) -> None:
    w = world(blocks=3, max_model_tokens=13)
    client = add(w, prompt(8), mode=mode, max_tokens=5)
    w.finish()
    assert client.failure is None
    if mode is not Mode.EXPORT:
        assert client.indices[0] == 4


def test_draws_are_named_by_choice_and_index() -> None:
    w = world()
    client = add(w, prompt(5), max_tokens=9, choices=(3,), resumed=2)
    batch = begin(w)
    assert batch.rows[0].samples == (SampleSpec(3, 2, client.req.sampling),)
    w.end_step()
    assert begin(w).rows[0].samples == (SampleSpec(3, 3, client.req.sampling),)
    w.end_step()
    w.finish()


def test_times_are_told() -> None:
    w = world(max_running=1)
    add(w, prompt(20))
    w.now += 2
    assert w.begin_step()
    w.now += 1
    w.end_step()
    begin(w)
    w.now += 3
    assert w.batch is not None
    events = w.scheduler.absorb(w.batch, w._compute(w.batch), w.now)
    (event,) = (event for event in events if isinstance(event, Prefilled))
    assert (event.queue_s, event.prefill_s) == (2.0, 4.0)
    assert w.scheduler.last_progress == w.now


# ---- budget and order --------------------------------------------------------------


def test_decoding_goes_first_and_prompts_share_what_is_left() -> None:
    w = world(max_batch_tokens=24)
    add(w, prompt(4), max_tokens=50)
    step_rows(w)
    add(w, prompt(30, 2))
    add(w, prompt(30, 3))
    assert step_rows(w) == [(0, 4, 1), (1, 0, 16), (2, 0, 7)]
    assert step_rows(w) == [(0, 5, 1), (1, 16, 14), (2, 7, 9)]
    w.finish()


def test_without_chunking_a_prompt_goes_whole() -> None:
    w = world(chunk_tokens=0, max_batch_tokens=24)
    add(w, prompt(100))
    add(w, prompt(10, 2))
    add(w, prompt(10, 3))
    add(w, prompt(10, 4))
    assert step_rows(w) == [(0, 0, 100)]
    assert step_rows(w) == [(0, 100, 1), (1, 0, 10), (2, 0, 10)]
    w.finish()


def test_first_come_first_served_and_priority_before_that() -> None:
    w = world(max_running=1)
    order = [add(w, prompt(3, i), max_tokens=1, priority=i // 2) for i in range(1, 5)]
    seen = [step_rows(w)[0][0] for _ in order]
    assert seen == [3, 1, 2, 0]
    assert not w.step()


def test_a_more_urgent_prompt_gets_the_budget_first() -> None:
    w = world(max_batch_tokens=16)
    add(w, prompt(40))
    step_rows(w)
    add(w, prompt(20, 2), priority=1)
    assert step_rows(w) == [(1, 0, 16)]
    assert step_rows(w) == [(1, 16, 4), (0, 16, 12)]
    w.finish()


def test_small_requests_dont_overtake_a_large_one() -> None:
    w = world(blocks=10)
    add(w, prompt(8), max_tokens=12)
    step_rows(w)
    large = add(w, prompt(36, 2), max_tokens=1)
    small = [add(w, prompt(2, 3 + i), max_tokens=1) for i in range(5)]
    while not large.computed:
        assert not any(client.computed for client in small)
        assert w.step()
    w.finish()


def test_a_large_import_isnt_overtaken_either() -> None:
    w = world(blocks=10)
    add(w, prompt(8), max_tokens=12)
    step_rows(w)
    large = add(w, prompt(33, 2), mode=Mode.IMPORT)
    small = [add(w, prompt(2, 3 + i), mode=mode) for i, mode in enumerate(Mode)]
    while large.grant is None:
        assert not any(client.over or client.grant for client in small)
        assert w.step()
    w.finish()


def test_an_import_may_go_ahead_when_it_takes_nothing_from_others() -> None:
    w = world(blocks=20, max_batch_tokens=16)
    for i in range(3):
        add(w, prompt(16, 1 + i))
    few = add(w, prompt(8, 5), mode=Mode.IMPORT, max_tokens=1)
    many = add(w, prompt(32, 6), mode=Mode.IMPORT, max_tokens=1)
    w.poll()  # the three need 12 blocks
    assert few.grant is not None
    assert many.grant is None
    w.finish()


def test_slots_bound_what_runs() -> None:
    w = world(max_running=3)
    add(w, prompt(4), max_tokens=9, choices=(0, 1))
    add(w, prompt(4, 2), max_tokens=9, mode=Mode.IMPORT)
    late = add(w, prompt(4, 3), max_tokens=9)
    w.poll()
    for _ in range(3):
        assert w.step()
        assert late.first is None
        assert w.scheduler.load().running <= 3
    w.finish()


def test_more_choices_than_slots_run_alone() -> None:
    w = world(max_running=2)
    client = add(w, prompt(4), choices=(0, 1, 2))
    other = add(w, prompt(4, 2))
    assert step_rows(w) == [(0, 0, 4)]
    while not client.over:
        assert other.first is None
        assert w.step()
    w.finish()


# ---- prefix cache ------------------------------------------------------------------


def test_a_known_prefix_isnt_computed_again() -> None:
    w = world()
    first = add(w, prompt(20), max_tokens=9)
    w.finish()
    tokens = [*prompt(20), *first.refs[0].tokens[20:26]]  # its answer was cached as well
    second = add(w, [*tokens, 7, 7])
    assert step_rows(w) == [(1, 24, 4)]
    assert second.first is not None
    w.finish()


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_of_a_wholly_known_prompt_one_token_is_computed(length: int) -> None:
    w = world()
    add(w, prompt(length))
    w.finish()
    cached = (length - 1) // 4 * 4
    add(w, prompt(length))
    assert step_rows(w) == [(1, cached, length - cached)]
    w.finish()


def test_cached_tokens_are_those_not_computed() -> None:
    w = world()
    add(w, prompt(20))
    w.finish()
    client = add(w, prompt(18))
    step_rows(w)
    assert client.cached_tokens == 16
    w.finish()


def test_salts_keep_tenants_apart() -> None:
    w = world()
    add(w, prompt(20), salt=b"a")
    w.finish()
    add(w, prompt(20), salt=b"b")
    assert step_rows(w) == [(1, 0, 16)]
    w.finish()


def test_a_prompt_behind_one_with_the_same_prefix_waits_for_the_hit() -> None:
    w = world(max_batch_tokens=16)
    add(w, [*prompt(16), 2])
    add(w, [*prompt(16), 3])
    assert step_rows(w) == [(0, 0, 16)]
    assert step_rows(w) == [(0, 16, 1), (1, 16, 1)]
    w.finish()


# ---- several choices ---------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 8, 9])
def test_choices_share_the_prompt_and_copy_its_last_block(length: int) -> None:
    w = world()
    client = add(w, prompt(length), choices=(0, 1, 2), max_tokens=9)
    assert step_rows(w) == [(0, 0, length)]
    batch = begin(w)
    assert len(batch.rows) == 3
    partly = length % 4 != 0
    assert len(batch.copies) == (3 if partly else 0)
    w.end_step()
    assert w.pool.counts().active == length // 4 + 3  # the original has been let go of
    w.finish()
    assert client.indices == {0: 8, 1: 8, 2: 8}


def test_one_choice_may_end_first() -> None:
    w = world()
    reference = Client(add(w, prompt(6)).req, 1000)
    stop = reference.expected(0, 0).token
    client = add(w, prompt(6), choices=(0, 1, 2, 3), stop=(stop,), max_tokens=20)
    w.finish()
    assert client.finish[0] is Finish.STOP
    assert client.indices[0] == 0


# ---- EXPORT ------------------------------------------------------------------------


def test_an_export_draws_all_choices_in_one_row_and_stays_pinned() -> None:
    w = world()
    client = add(w, prompt(18), mode=Mode.EXPORT, choices=(0, 1))
    step_rows(w)
    assert client.advanced == 16
    assert step_rows(w) == [(0, 16, 2)]
    assert client.advanced == 18
    assert client.first is not None
    assert len(client.first) == 2
    assert w.scheduler.load().running == 0
    assert w.scheduler.busy
    assert w.pool.counts().active == 5
    w.release_export(client)
    assert not w.scheduler.busy
    assert w.pool.counts().cached == 4


def test_an_export_uses_the_prefix_cache_and_pins_it() -> None:
    w = world(blocks=8)
    add(w, prompt(16))
    w.finish()
    client = add(w, [*prompt(16), 2], mode=Mode.EXPORT)
    assert step_rows(w) == [(1, 16, 1)]
    add(w, prompt(16, 3))  # the pool is full: nothing of the export may be evicted
    w.step()
    w.check()
    assert client.advanced == 17
    w.finish()


def test_an_export_can_be_released_while_it_computes() -> None:
    w = world()
    client = add(w, prompt(40), mode=Mode.EXPORT)
    begin(w)
    w.release_export(client)
    assert w.pool.counts().active == 10  # the step still writes them
    w.end_step()
    w.finish()


# ---- IMPORT ------------------------------------------------------------------------


def test_a_grant_covers_prompt_and_reserve() -> None:
    w = world()
    client = add(w, prompt(10), mode=Mode.IMPORT, max_tokens=100)
    w.now += 1
    w.poll()
    assert client.grant is not None
    assert len(client.grant.block_ids) == 3
    assert client.grant.wait_s == 1.0
    assert w.pool.counts().granted == 5  # 10 + 8 tokens
    w.attach(client)
    assert w.pool.counts().granted == 0
    w.finish()


def test_a_grant_takes_whole_cached_blocks_up_to_the_end() -> None:
    w = world()
    add(w, prompt(12))
    w.finish()
    client = add(w, prompt(12), mode=Mode.IMPORT)
    w.poll()
    assert client.grant is not None
    assert client.grant.prefix_blocks == len(client.grant.block_ids) == 3
    w.attach(client)
    w.finish()


def test_an_attached_prompt_is_a_prefix_for_others() -> None:
    w = world()
    client = add(w, prompt(12), mode=Mode.IMPORT)
    w.poll()
    w.receive(client, 2)
    assert w.scheduler.prefixes() == ()
    w.attach(client)
    assert len(w.scheduler.prefixes()) == 3
    w.finish()


@pytest.mark.parametrize("length", [7, 8])
def test_several_choices_are_one_grant(length: int) -> None:
    w = world()
    client = add(w, prompt(length), mode=Mode.IMPORT, choices=(0, 1, 2), max_tokens=6)
    w.poll()
    reserve = 3 * 2  # positions up to 12 (13), the last block copied where it isn't full
    assert w.pool.counts().granted == 2 + reserve
    w.attach(client)
    batch = begin(w)
    assert len(batch.copies) == (3 if length == 7 else 0)
    w.end_step()
    w.finish()
    assert client.indices == {0: 5, 1: 5, 2: 5}


def test_choices_that_have_ended_dont_run() -> None:
    w = world()
    reference = Client(add(w, prompt(6)).req, 1000)
    stop = reference.expected(0, 0).token
    client = add(w, prompt(6), mode=Mode.IMPORT, choices=(0,), stop=(stop,), max_tokens=20)
    w.poll()
    w.attach(client)
    assert client.over
    assert w.pool.counts().granted == 0
    w.finish()


def test_wrong_first_tokens_fail_closed() -> None:
    for first in (
        (),
        (TokenOut(1, 0, 5),),
        (TokenOut(0, 1, 5),),
        (TokenOut(0, 0, 5), TokenOut(0, 0, 5)),
    ):
        w = world()
        client = add(w, prompt(6), mode=Mode.IMPORT)
        w.poll()
        w.see(w.scheduler.attach(client.req.key, first, w.now))
        assert client.failure is not None
        assert client.failure.kind is FailureKind.TRANSFER_FAILED
        w.finish()


def test_a_sender_with_a_larger_context_fails_closed() -> None:
    w = world(max_model_tokens=7)
    client = add(w, prompt(6), mode=Mode.IMPORT, max_tokens=9)
    w.poll()
    w.see(w.scheduler.attach(client.req.key, (TokenOut(0, 0, 5),), w.now))
    assert client.failure is not None
    assert client.failure.kind is FailureKind.CONTEXT_TOO_LONG
    w.finish()


def test_attaching_what_has_ended_changes_nothing() -> None:
    w = world()
    client = add(w, prompt(6), mode=Mode.IMPORT)
    w.poll()
    w.cancel(client)
    assert w.scheduler.attach(client.req.key, (TokenOut(0, 0, 5),), w.now) == []
    w.finish()


def test_quarantined_blocks_belong_to_nobody_until_released() -> None:
    w = world(blocks=6)
    add(w, prompt(8))
    w.finish()
    client = add(w, prompt(16), mode=Mode.IMPORT, max_tokens=1)
    w.poll()
    w.cancel(client, quarantine=True)
    counts = w.pool.counts()
    assert (counts.quarantined, counts.cached, counts.granted) == (2, 2, 0)
    other = add(w, prompt(20, 2), max_tokens=1)
    assert not w.step()
    w.late_bytes()
    w.release_quarantine(client.req.key)
    w.scheduler.release_quarantine(client.req.key)  # once more is harmless
    w.finish()
    assert other.failure is None


def test_a_grant_that_doesnt_come_in_time_fails() -> None:
    w = world(blocks=4)
    add(w, prompt(8), max_tokens=9)
    step_rows(w)
    client = add(w, prompt(12, 2), mode=Mode.IMPORT, grant_deadline=w.now + 5)
    w.now += 4.9
    w.poll()
    assert client.failure is None
    w.now += 0.1
    w.poll()
    assert client.failure is not None
    assert client.failure.kind is FailureKind.NO_CAPACITY
    w.finish()


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
