"""The scheduler case by case: prompts that are exported, and those that are imported.

Tokens are checked by the world's clients; these tests check what happens when, and why.
"""

import pytest

from pd_core.failures import FailureKind
from pd_engine.types import Mode, TokenOut
from tests.pd_engine.scheduler_cases import add, begin, prompt, step_rows, world
from tests.pd_engine.scheduler_world import Client

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
