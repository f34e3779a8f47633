"""The scheduler case by case: refusals, order, budget, prefix hits, choices.

Tokens are checked by the world's clients; these tests check what happens when, and why.
"""

from dataclasses import replace
from typing import Any

import pytest

from pd_core.failures import Failure, FailureKind
from pd_engine.limits import due
from pd_engine.types import Finish, Mode, Prefilled, Request, SampleSpec, Sampling
from tests.pd_engine.scheduler_cases import add, begin, config, prompt, refused, step_rows, world
from tests.pd_engine.scheduler_world import Client

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


def test_a_steps_own_limit_cuts_prompts_but_not_decoding() -> None:
    w = world(max_batch_tokens=64)
    add(w, prompt(4), max_tokens=50)
    step_rows(w)
    add(w, prompt(40, 2))
    batch = w.scheduler.schedule(w.now, prompt_tokens=10)
    assert batch is not None
    assert [len(row.token_ids) for row in batch.rows] == [1, 10]
    w.scheduler.fail_batch(batch, Failure(FailureKind.STEP_FAILED, "x"), w.now)


def test_who_decodes_says_how_far_apart_its_tokens_may_be() -> None:
    w = world()
    assert w.scheduler.decoding() == (False, None)
    add(w, prompt(40), max_tokens=5, tpot_s=0.01)
    step_rows(w)
    assert w.scheduler.decoding() == (False, None)  # it prefills
    add(w, prompt(3, 2), max_tokens=5)
    add(w, prompt(3, 3), max_tokens=3, tpot_s=0.05)
    step_rows(w)
    assert w.scheduler.decoding() == (True, 0.05)
    step_rows(w)
    assert w.scheduler.decoding() == (True, 0.01)
    w.finish()


# ---- short ones and long ones ------------------------------------------------------


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one() -> None:
    w = world(max_batch_tokens=16, patience_s_per_token=0.1)
    add(w, prompt(60), max_tokens=1)
    assert step_rows(w) == [(0, 0, 16)]
    add(w, prompt(10, 2), max_tokens=1)
    assert step_rows(w) == [(1, 0, 10), (0, 16, 6)]
    assert step_rows(w) == [(0, 22, 16)]
    w.finish()


def test_a_long_prompt_is_passed_until_it_is_due() -> None:
    """Short ones come all the time, and more than there is room for."""
    w = world(max_batch_tokens=16, patience_s_per_token=0.5)
    began = w.now
    long = add(w, prompt(32), max_tokens=1)
    number, passed = 2, 0
    while not long.over:
        for _ in range(2):
            add(w, prompt(10, number), max_tokens=1)
            number += 1
        w.now += 1
        first = step_rows(w)[0][0]
        passed += first > 0
        assert first == 0 or w.now <= began + 32 * 0.5 + 2, "it was due"
    assert passed > 3
    assert w.now <= began + 32 * 0.5 + 5
    w.finish()


def test_of_equal_prompts_the_first_one_goes_first() -> None:
    w = world(max_batch_tokens=16, patience_s_per_token=0.1)
    for first in (1, 2, 3):
        add(w, prompt(16, first), max_tokens=1)
    assert [step_rows(w)[0][0] for _ in range(3)] == [0, 1, 2]


def test_priority_goes_before_length() -> None:
    w = world(max_batch_tokens=16, patience_s_per_token=0.1)
    add(w, prompt(3), max_tokens=1)
    add(w, prompt(40, 2), max_tokens=1, priority=1)
    assert step_rows(w) == [(1, 0, 16)]
    w.finish()


def test_what_only_waits_for_kv_is_due_at_once() -> None:
    request = Request((1, 1), "r", 0, (1,) * 50, 50, (0,), Sampling(1), Mode.IMPORT, 9.0, 9.0)
    patient = config(patience_s_per_token=0.1)
    assert due(request, patient, 2.0) == 2.0
    assert due(replace(request, mode=Mode.EXPORT), patient, 2.0) == pytest.approx(7.0)
    with pytest.raises(ValueError, match="patience_s_per_token = -1"):
        config(patience_s_per_token=-1)


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
