"""Imports, one call at a time: what is taken, what is refused and why, deadlines, quarantine."""

from dataclasses import replace
from typing import Any

import pytest

from pd_core.failures import FailureKind
from pd_engine.imports import (
    Accept,
    Answer,
    Committed,
    ImportAction,
    ImportFailed,
    Imports,
    ImportStats,
    Quarantined,
    Reject,
    Released,
)
from pd_engine.transfer import AbortHead, ImportLimits, KvRange, PushHead, TransferId
from pd_engine.types import TokenOut
from tests.pd_engine.transfer_rig import FIRST, GRANT, ID, KEY, LAYOUT, SLICE, Digest, push, seal

CONN = 7
WHOLE = push(KvRange(0, 6, 0, 3))


def imports(prefix: int = 0, tokens: int = 10, choices: tuple[int, ...] = (0,)) -> Imports:
    limits = ImportLimits(lease_s=30, first_frame_s=20, next_frame_s=10, payload_s=8, seal_s=5)
    made = Imports(LAYOUT, Digest, limits)
    blocks = tuple(range(100, 100 + LAYOUT.blocks_for(tokens)))
    grant(made, block_ids=blocks, prefix_blocks=prefix, choices=choices, token_count=tokens)
    return made


def grant(made: Imports, key: tuple[int, int] = KEY, secret: bytes = GRANT, **args: Any) -> None:
    one = {"block_ids": (1,), "prefix_blocks": 0, "choices": (0,), "token_count": 1}
    made.open(key, secret, ID, now=0.0, **{**one, **args})


def receive(made: Imports, head: PushHead, now: float = 1.0) -> None:
    assert isinstance(made.push_begin(CONN, head, now), Accept)
    assert made.push_end(CONN, head.checksum, now) == []


def failure_in(actions: list[ImportAction] | tuple[ImportAction, ...]) -> str:
    """The message of a transfer that failed closed: told, answered, released, in this order."""
    failed = [a for a in actions if isinstance(a, ImportFailed)]
    assert [f.failure.kind for f in failed] == [FailureKind.TRANSFER_FAILED]
    assert [a for a in actions if isinstance(a, Released)] == [Released(KEY)]
    assert all(not a.verdict.committed and a.close for a in actions if isinstance(a, Answer))
    assert any(isinstance(a, Answer) for a in actions)
    return failed[0].failure.message


def test_commits_when_all_is_here() -> None:
    made = imports()
    a, b = push(KvRange(0, 6, 0, 2), 1), push(KvRange(0, 6, 2, 1), 2)
    begun = made.push_begin(CONN, a, 1.0)
    assert begun == Accept(KEY, (100, 101), 0, 6, tokens=8)
    assert made.push_end(CONN, 1, 1.5) == []
    receive(made, b, 2.0)
    committed, answer = made.seal(CONN, seal(a, b), 3.5)
    assert committed == Committed(KEY, FIRST, ImportStats(18 * SLICE, 2.5, 3), CONN)
    assert isinstance(answer, Answer)
    assert answer.verdict.committed
    assert not answer.close
    assert made.open_keys == ()
    assert made.connection_closed(CONN) == []
    assert made.tick(1e9) == []
    assert made.cancel(KEY) == []


def test_rectangles_may_come_in_any_order() -> None:
    made = imports()
    pieces = [push(KvRange(layer, 2, block, 1), 9) for block in (2, 0, 1) for layer in (4, 0, 2)]
    for piece in pieces:
        receive(made, piece)
    assert isinstance(made.seal(CONN, seal(*pieces), 2.0)[0], Committed)


def test_full_prefix_needs_only_the_seal() -> None:
    made = imports(prefix=2, tokens=8)
    committed = made.seal(CONN, seal(tokens=8), 4.0)[0]
    assert committed == Committed(KEY, FIRST, ImportStats(0, 0.0, 3), CONN)


def test_several_choices_in_one_seal() -> None:
    made = imports(choices=(0, 2, 1))
    receive(made, WHOLE)
    first = tuple(TokenOut(c, 0, 5) for c in (2, 1, 0))
    committed = made.seal(CONN, seal(WHOLE, first=first), 2.0)[0]
    assert isinstance(committed, Committed)
    assert committed.first == first


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (push(KvRange(0, 6, 2, 2)), "outside of 6 layers x 3 blocks"),
        (push(KvRange(3, 4, 1, 1)), "outside of 6 layers x 3 blocks"),
        (push(KvRange(0, 6, 0, 2)), "within the prefix of 1 blocks"),
        (push(KvRange(0, 0, 1, 1)), "an empty range"),
        (push(KvRange(0, 6, 1, 0)), "an empty range"),
        (replace(push(KvRange(0, 6, 1, 1)), payload_bytes=6 * SLICE - 1), "bytes announced"),
        (replace(push(KvRange(0, 6, 1, 1)), payload_bytes=1 << 60), "bytes announced"),
        (push(KvRange(0, 6, 1, 1), id=TransferId("request", 1)), "grant is for request#2"),
        (push(KvRange(0, 6, 1, 1), id=TransferId("other", 2)), "frame for other#2"),
    ],
)
def test_misfits_are_refused_before_a_byte_is_taken(head: PushHead, says: str) -> None:
    made = imports(prefix=1)
    begun = made.push_begin(CONN, head, 1.0)
    assert isinstance(begun, Reject)
    assert says in failure_in(begun.actions)
    assert made.open_keys == ()


# ---- a sender with other blocks ------------------------------------------------------------

WIDE = replace(LAYOUT, block_tokens=8)
"""Twice the tokens in a block, so that each slice is twice as large."""


def wide_push(r: KvRange, checksum: int = 5) -> PushHead:
    return PushHead(GRANT, ID, r, r.slices * WIDE.layer_bytes, checksum)


def test_a_sender_counts_its_own_blocks() -> None:
    """10 tokens, of which 4 are here: tokens 4-9 are in both of the sender's blocks."""
    made = imports(prefix=1)
    first, last = wide_push(KvRange(0, 6, 0, 1)), wide_push(KvRange(0, 6, 1, 1))
    begun = made.push_begin(CONN, first, 1.0, WIDE)
    assert begun == Accept(KEY, (101,), 0, 6, tokens=4, skip_tokens=4)
    assert made.push_end(CONN, 5, 1.0) == []
    begun = made.push_begin(CONN, last, 1.0, WIDE)
    assert begun == Accept(KEY, (102,), 0, 6, tokens=2)
    assert made.push_end(CONN, 5, 1.0) == []
    assert isinstance(made.seal(CONN, seal(first, last), 2.0)[0], Committed)


def test_a_part_of_our_block_comes_from_each_of_two() -> None:
    small = replace(LAYOUT, block_tokens=3)
    made = imports()
    head = PushHead(GRANT, ID, KvRange(2, 1, 1, 2), 2 * small.layer_bytes, 5)
    begun = made.push_begin(CONN, head, 1.0, small)
    assert begun == Accept(KEY, (100, 101, 102), 2, 1, tokens=6, offset_tokens=3)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (wide_push(KvRange(0, 6, 1, 2)), "outside of 6 layers x 2 blocks"),
        (wide_push(KvRange(0, 6, 0, 1)), "within the prefix of 1 blocks"),
        (push(KvRange(0, 6, 1, 1)), "bytes announced"),
    ],
)
def test_misfits_among_the_senders_blocks(head: PushHead, says: str) -> None:
    made = imports(prefix=2)
    begun = made.push_begin(CONN, head, 1.0, WIDE)
    assert isinstance(begun, Reject)
    assert says in failure_in(begun.actions)


def test_one_of_the_senders_blocks_is_missing() -> None:
    made = imports()
    head = wide_push(KvRange(0, 6, 0, 1))
    assert isinstance(made.push_begin(CONN, head, 1.0, WIDE), Accept)
    assert made.push_end(CONN, 5, 1.0) == []
    assert "6 of 12 slices missing" in failure_in(made.seal(CONN, seal(head), 2.0))


def test_a_value_that_does_not_fit_fails_closed_and_says_who_does_not_fit() -> None:
    made = imports()
    assert isinstance(made.push_begin(CONN, WHOLE, 1.0), Accept)
    failed, answer, released = made.push_end(CONN, 5, 1.0, "too large")
    assert isinstance(failed, ImportFailed)
    assert failed.failure.kind is FailureKind.LAYOUT_MISMATCH
    assert "too large" in failed.failure.message
    assert isinstance(answer, Answer)
    assert not answer.verdict.committed
    assert released == Released(KEY)


def test_a_range_sent_twice_is_refused() -> None:
    made = imports()
    receive(made, push(KvRange(0, 6, 0, 2)))
    begun = made.push_begin(CONN, push(KvRange(5, 1, 1, 1)), 1.0)
    assert isinstance(begun, Reject)
    assert "sent twice" in failure_in(begun.actions)


def test_unknown_grants_fail_nothing_but_their_connection() -> None:
    made = imports()
    begun = made.push_begin(CONN, push(KvRange(0, 6, 0, 1), grant=b"x" * 16), 1.0)
    assert isinstance(begun, Reject)
    (answer,) = begun.actions
    assert isinstance(answer, Answer)
    assert answer.close
    assert "no such grant" in answer.verdict.reason
    (answer,) = made.seal(CONN, replace(seal(), grant=b"x" * 16), 1.0)
    assert isinstance(answer, Answer)
    assert answer.close
    assert made.open_keys == (KEY,)


def test_a_wrong_checksum_fails_closed() -> None:
    made = imports()
    assert isinstance(made.push_begin(CONN, WHOLE, 1.0), Accept)
    assert "checksum of layers 0-5 of blocks 0-2" in failure_in(made.push_end(CONN, 6, 1.0))


def test_a_cut_receive_fails_closed() -> None:
    made = imports()
    assert isinstance(made.push_begin(CONN, WHOLE, 1.0), Accept)
    assert "within a frame" in failure_in(made.push_end(CONN, None, 1.0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_count": 9}, "sealed 9 tokens, 10 were granted"),
        ({"payload_bytes": 1}, "sealed 1 bytes"),
        ({"coverage": 1}, "coverage digest"),
        ({"first": ()}, "first tokens for choices"),
        ({"first": FIRST * 2}, "first tokens for choices"),
        ({"first": (TokenOut(1, 0, 5),)}, "first tokens for choices (1,)"),
        ({"cached_tokens": 11}, "11 cached tokens of 10"),
        ({"id": TransferId("request", 3)}, "grant is for request#2"),
    ],
)
def test_seals_that_do_not_match_fail_closed(change: dict[str, Any], says: str) -> None:
    made = imports()
    receive(made, WHOLE)
    head = replace(seal(WHOLE), **change)
    assert says in failure_in(made.seal(CONN, head, 2.0))


def test_a_seal_without_full_coverage_fails_closed() -> None:
    made = imports()
    most = push(KvRange(0, 5, 0, 3))
    receive(made, most)
    assert "3 of 18 slices missing" in failure_in(made.seal(CONN, seal(most), 2.0))


def test_two_connections_for_one_grant_fail_closed() -> None:
    made = imports()
    assert isinstance(made.push_begin(CONN, push(KvRange(0, 6, 0, 1)), 1.0), Accept)
    begun = made.push_begin(8, push(KvRange(0, 6, 1, 1)), 1.0)
    assert isinstance(begun, Reject)
    quarantined, failed, own, other = begun.actions
    assert quarantined == Quarantined(KEY)
    assert isinstance(failed, ImportFailed)
    assert "two connections" in failed.failure.message
    assert isinstance(own, Answer)
    assert isinstance(other, Answer)
    assert {own.conn, other.conn} == {CONN, 8}
    assert made.quarantined_count == 1
    assert made.push_end(CONN, 5, 1.0) == [Released(KEY)]
    assert made.quarantined_count == 0


def test_cancel_releases_at_once_when_nothing_is_received() -> None:
    made = imports()
    assert made.cancel(KEY) == [Released(KEY)]
    assert made.cancel(KEY) == []


def test_cancel_within_a_receive_quarantines_until_it_returned() -> None:
    made = imports()
    assert isinstance(made.push_begin(CONN, WHOLE, 1.0), Accept)
    quarantined, answer = made.cancel(KEY)
    assert quarantined == Quarantined(KEY)
    assert isinstance(answer, Answer)
    assert answer.close
    assert made.tick(1e9) == []
    assert made.quarantined_count == 1
    # Even all bytes with the right checksum attach nothing any more.
    assert made.push_end(CONN, WHOLE.checksum, 2.0) == [Released(KEY)]
    assert made.connection_closed(CONN) == []
    assert made.quarantined_count == 0


def test_an_abort_needs_no_answer() -> None:
    made = imports()
    receive(made, push(KvRange(0, 6, 0, 1)))
    failed, released = made.abort(CONN, AbortHead(GRANT, ID, "cancelled"))
    assert isinstance(failed, ImportFailed)
    assert "gave up: cancelled" in failed.failure.message
    assert released == Released(KEY)
    assert made.abort(CONN, AbortHead(GRANT, ID, "again")) == []


def test_a_closed_connection_fails_its_own_transfers_only() -> None:
    made = imports()
    other = (1, 2)
    grant(made, other, b"h" * 16)
    receive(made, push(KvRange(0, 6, 0, 1)))
    failed, released = made.connection_closed(CONN)
    assert isinstance(failed, ImportFailed)
    assert released == Released(KEY)
    assert made.open_keys == (other,)


def kinds(actions: list[ImportAction]) -> list[FailureKind]:
    return [a.failure.kind for a in actions if isinstance(a, ImportFailed)]


def test_leases_end_without_renewal() -> None:
    made = Imports(LAYOUT, Digest, ImportLimits(lease_s=30, first_frame_s=1000))
    grant(made)
    assert made.tick(29.9) == []
    made.renew(KEY, 29.9)
    assert made.tick(59.8) == []
    actions = made.tick(59.9)
    assert kinds(actions) == [FailureKind.LEASE_EXPIRED]
    assert actions[-1] == Released(KEY)


def test_renewals_do_not_excuse_a_sender_that_stopped() -> None:
    """Limits: first frame 20 s, within a frame 8, next frame 10, seal 5."""

    def tick(made: Imports, now: float) -> str:
        made.renew(KEY, now)
        actions = made.tick(now)
        assert kinds(actions) in ([], [FailureKind.TRANSFER_FAILED])
        return next((a.failure.message for a in actions if isinstance(a, ImportFailed)), "")

    made = imports()
    assert tick(made, 19.9) == ""
    assert "first frame didn't come" in tick(made, 20.0)

    made = imports()
    made.push_begin(CONN, WHOLE, 1.0)
    made.push_progress(CONN, 5.0)
    assert tick(made, 12.9) == ""
    assert "payload didn't come" in tick(made, 13.0)
    assert made.push_end(CONN, None, 13.0) == [Released(KEY)]

    made = imports()
    receive(made, push(KvRange(0, 6, 0, 1)), 1.0)
    assert tick(made, 10.9) == ""
    assert "next frame didn't come" in tick(made, 11.0)

    made = imports()
    receive(made, WHOLE, 1.0)
    assert tick(made, 5.9) == ""
    assert "seal didn't come" in tick(made, 6.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_ids": (1, 2)},
        {"prefix_blocks": 4},
        {"token_count": 0, "block_ids": ()},
        {"choices": (1, 1)},
    ],
)
def test_grants_that_make_no_sense_are_errors(wrong: dict[str, Any]) -> None:
    good = {"block_ids": (1, 2, 3), "prefix_blocks": 0, "choices": (0,), "token_count": 10}
    made = Imports(LAYOUT, Digest)
    with pytest.raises(ValueError, match="import"):
        grant(made, **{**good, **wrong})
    assert made.open_keys == ()


def test_misuse_by_the_caller_is_an_error() -> None:
    made = imports()
    with pytest.raises(ValueError, match="open already"):
        grant(made, KEY, b"h" * 16)
    with pytest.raises(ValueError, match="never began"):
        made.push_end(CONN, 1, 0.0)
    made.push_begin(CONN, WHOLE, 0.0)
    with pytest.raises(ValueError, match="a push within a push"):
        made.push_begin(CONN, WHOLE, 0.0)
    with pytest.raises(ValueError, match="closed within a push"):
        made.connection_closed(CONN)
