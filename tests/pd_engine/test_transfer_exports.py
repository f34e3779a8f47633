"""Exports, one call at a time: which frames are sent in which order, what ends an export and
with which outcome, deadlines."""

from dataclasses import replace

import pytest

from pd_core.failures import Failure, FailureKind
from pd_core.kv import KvLayout
from pd_engine.exports import (
    Cut,
    Engage,
    ExportDone,
    ExportFailed,
    Exports,
    ExportSealed,
    ExportStats,
    PushJob,
    SealJob,
    StopJob,
    Target,
    Wake,
)
from pd_engine.transfer import ExportLimits, KvRange
from tests.pd_engine.transfer_rig import FIRST, GRANT, ID, KEY, LAYOUT, SLICE, Digest, push, seal

TARGET = Target("127.0.0.1:1", "epoch", GRANT)


def exports(
    tokens: int = 10, prefix_tokens: int = 0, frame_slices: int = 12, layout: KvLayout = LAYOUT
) -> Exports:
    limits = ExportLimits(send_s=10, verdict_s=20, frame_bytes=frame_slices * SLICE)
    made = Exports(layout, Digest, limits)
    target = replace(TARGET, prefix_tokens=prefix_tokens)
    blocks = tuple(range(200, 200 + layout.blocks_for(tokens)))
    actions = made.open(KEY, ID, target, block_ids=blocks, token_count=tokens, lease_s=30, now=0.0)
    assert actions == [Engage(KEY, ID, target)]
    return made


def send_all(made: Exports, now: float = 0.0) -> list[KvRange]:
    """All pushes that are possible now, as a sender would take them."""
    ranges = []
    while isinstance(job := made.next_job(KEY, now), PushJob):
        assert job.payload_bytes == job.range.slices * SLICE
        first = 200 + job.range.block_start
        assert job.block_ids == tuple(range(first, first + job.range.block_count))
        made.pushed(KEY, 5, now)
        ranges.append(job.range)
    return ranges


def test_only_whole_blocks_travel_until_the_prompt_is_computed() -> None:
    made = exports()
    assert send_all(made) == []
    assert made.progress(KEY, 3, 0, 6, 1.0) == [Wake(KEY)]
    assert send_all(made) == []
    made.progress(KEY, 9, 0, 6, 1.0)
    assert send_all(made) == [KvRange(0, 6, 0, 2)]
    made.progress(KEY, 10, 0, 6, 1.0)
    assert send_all(made) == [KvRange(0, 6, 2, 1)]


def test_layers_travel_when_they_are_final() -> None:
    made = exports(frame_slices=2)
    made.progress(KEY, 4, 0, 2, 1.0)
    assert send_all(made) == [KvRange(0, 2, 0, 1)]
    made.progress(KEY, 4, 2, 6, 1.0)
    assert send_all(made) == [KvRange(2, 2, 0, 1), KvRange(4, 2, 0, 1)]
    made.progress(KEY, 8, 0, 2, 1.0)
    made.progress(KEY, 4, 0, 6, 1.0)  # an old word changes nothing
    assert send_all(made) == [KvRange(0, 2, 1, 1)]


def test_a_piece_that_will_grow_waits_until_it_fills_a_frame() -> None:
    made = exports(frame_slices=8)
    made.progress(KEY, 8, 0, 3, 1.0)
    assert send_all(made) == []  # 6 slices
    made.progress(KEY, 8, 3, 4, 1.0)
    assert send_all(made) == [KvRange(0, 4, 0, 2)]
    made.progress(KEY, 8, 4, 5, 1.0)
    assert send_all(made) == []
    made.progress(KEY, 8, 5, 6, 1.0)
    assert send_all(made) == [KvRange(4, 2, 0, 2)]  # the last layer: it won't grow


def test_earlier_blocks_go_before_later_layers() -> None:
    made = exports(frame_slices=6)
    made.progress(KEY, 10, 0, 3, 1.0)
    made.progress(KEY, 4, 3, 6, 1.0)
    assert send_all(made) == [KvRange(0, 6, 0, 1), KvRange(0, 3, 1, 2)]


def test_frames_are_bounded_and_even() -> None:
    made = exports(frame_slices=4)  # a block's 6 layers go in 2 frames of 3
    made.progress(KEY, 10, 0, 6, 1.0)
    halves = [KvRange(layer, 3, block, 1) for block in range(3) for layer in (0, 3)]
    assert send_all(made) == halves
    made = exports(frame_slices=0)  # a slice is the least
    made.progress(KEY, 4, 0, 6, 1.0)
    assert send_all(made) == [KvRange(layer, 1, 0, 1) for layer in range(6)]


def test_the_targets_prefix_is_not_sent() -> None:
    made = exports(prefix_tokens=4)
    made.progress(KEY, 10, 0, 6, 1.0)
    assert send_all(made) == [KvRange(0, 6, 1, 2)]


def test_the_seal_comes_last_and_says_all() -> None:
    made = exports()
    made.seal(KEY, FIRST, 3, 1.0)
    ranges = []
    while isinstance(job := made.next_job(KEY, 2.0), PushJob):
        made.pushed(KEY, 5, 2.0)
        ranges.append(push(job.range))
    assert job == SealJob(seal(*ranges))
    assert made.sealed(KEY, 3.5) == [ExportSealed(KEY, ExportStats(18 * SLICE, 1.5))]
    assert made.next_job(KEY, 4.0) is None
    assert made.verdict(KEY, committed=True, reason="", now=4.0) == [Wake(KEY)]
    assert made.next_job(KEY, 4.0) == StopJob()
    assert made.abort_reason(KEY) == ""
    assert made.stopped(KEY) == [ExportDone(KEY, committed=True)]
    assert made.open_keys == ()


def sealed_export() -> Exports:
    made = exports(frame_slices=100)
    made.seal(KEY, FIRST, 3, 1.0)
    assert send_job(made, PushJob) is not None
    made.pushed(KEY, 5, 1.0)
    assert send_job(made, SealJob) is not None
    assert made.sealed(KEY, 1.0) == [ExportSealed(KEY, ExportStats(18 * SLICE, 0.0))]
    return made


def send_job(made: Exports, kind: type[PushJob] | type[SealJob], now: float = 1.0) -> object:
    job = made.next_job(KEY, now)
    assert isinstance(job, kind)
    return job


def ended(made: Exports) -> ExportDone | ExportFailed:
    """The one end that comes when the sender has stopped."""
    assert made.next_job(KEY, 1e9) == StopJob()
    (end,) = made.stopped(KEY)
    assert isinstance(end, ExportDone | ExportFailed)
    assert made.open_keys == ()
    assert made.verdict(KEY, committed=True, reason="", now=1e9) == []
    assert made.cancel(KEY) == []
    assert made.tick(1e9) == []
    return end


def failed(made: Exports) -> tuple[FailureKind, str]:
    end = ended(made)
    assert isinstance(end, ExportFailed)
    return end.failure.kind, end.failure.message


def test_a_verdict_may_be_faster_than_the_word_that_the_seal_is_out() -> None:
    made = exports(prefix_tokens=8, tokens=8)
    made.seal(KEY, FIRST, 3, 1.0)
    send_job(made, SealJob)
    actions = made.verdict(KEY, committed=True, reason="", now=2.0)
    assert actions == [ExportSealed(KEY, ExportStats(0, 1.0)), Wake(KEY)]
    assert made.sealed(KEY, 2.0) == []
    assert ended(made) == ExportDone(KEY, committed=True)


def test_a_refusal_before_the_seal_fails_the_export() -> None:
    made = exports()
    made.progress(KEY, 8, 0, 6, 1.0)
    send_job(made, PushJob)
    assert made.verdict(KEY, committed=False, reason="checksum", now=2.0) == [Cut(KEY)]
    assert made.progress(KEY, 10, 0, 6, 2.0) == []
    assert made.seal(KEY, FIRST, 0, 2.0) == []
    kind, message = failed(made)
    assert kind == FailureKind.TRANSFER_FAILED
    assert "refused by the decode worker: checksum" in message


def test_a_commit_before_the_seal_is_a_failure() -> None:
    made = exports()
    assert made.verdict(KEY, committed=True, reason="", now=2.0) == [Cut(KEY)]
    assert "before the seal" in failed(made)[1]


def test_after_the_seal_nothing_fails_the_export() -> None:
    made = sealed_export()
    assert made.verdict(KEY, committed=False, reason="coverage", now=2.0) == [Wake(KEY)]
    assert ended(made) == ExportDone(KEY, committed=False)
    made = sealed_export()
    made.broken(KEY, FAILURE)
    assert ended(made) == ExportDone(KEY, committed=False)


def test_a_missing_verdict_is_not_waited_for() -> None:
    """verdict_s 20, lease 30: the verdict's deadline holds however often it is renewed."""
    made = sealed_export()
    made.renew(KEY, 20.0)
    assert made.tick(20.9) == []
    assert made.tick(21.0) == [Cut(KEY)]
    assert ended(made) == ExportDone(KEY, committed=False)


FAILURE = Failure(FailureKind.LAYOUT_MISMATCH, "theirs and ours")


def test_a_broken_connection_fails_the_export() -> None:
    made = exports()
    assert made.broken(KEY, FAILURE) == [Cut(KEY)]
    assert made.broken(KEY, Failure(FailureKind.INTERNAL, "later")) == []
    assert failed(made) == (FAILURE.kind, FAILURE.message)


def test_cancel_tells_the_target_and_waits_for_the_sender() -> None:
    made = exports()
    made.progress(KEY, 8, 0, 6, 1.0)
    send_job(made, PushJob)
    assert made.cancel(KEY) == [Cut(KEY)]
    assert made.open_keys == (KEY,)
    assert made.abort_reason(KEY) == "cancelled at the prefill worker"
    assert ended(made) == ExportDone(KEY, committed=False)


def test_leases_end_without_renewal_or_progress() -> None:
    made = exports()
    made.renew(KEY, 10.0)
    assert made.tick(39.9) == []
    made.progress(KEY, 4, 0, 6, 39.9)
    send_job(made, PushJob, 39.9)
    made.pushed(KEY, 1, 45.0)
    assert made.tick(74.9) == []
    assert made.tick(75.0) == [Cut(KEY)]
    assert made.abort_reason(KEY) == "the lease of 30 s wasn't renewed"
    assert failed(made)[0] == FailureKind.LEASE_EXPIRED


def test_a_target_that_takes_nothing_fails_the_export() -> None:
    made = exports()
    made.progress(KEY, 4, 0, 6, 5.0)
    send_job(made, PushJob, 5.0)
    made.renew(KEY, 14.0)
    assert made.tick(14.9) == []
    assert made.tick(15.0) == [Cut(KEY)]
    kind, message = failed(made)
    assert kind == FailureKind.TRANSFER_FAILED
    assert "127.0.0.1:1 took no whole frame in 10 s" in message


def test_a_sender_that_stops_by_itself_is_a_failure() -> None:
    made = exports()
    (end,) = made.stopped(KEY)
    assert isinstance(end, ExportFailed)
    assert end.failure.kind == FailureKind.INTERNAL


@pytest.mark.parametrize(
    ("tokens", "blocks", "prefix"), [(0, 0, 0), (10, 2, 0), (10, 3, 12), (10, 3, -4)]
)
def test_exports_that_make_no_sense_are_errors(tokens: int, blocks: int, prefix: int) -> None:
    made = Exports(LAYOUT, Digest)
    with pytest.raises(ValueError, match="export"):
        made.open(
            KEY,
            ID,
            replace(TARGET, prefix_tokens=prefix),
            block_ids=tuple(range(blocks)),
            token_count=tokens,
            lease_s=30,
            now=0.0,
        )
    assert made.open_keys == ()


def test_misuse_of_an_export_is_an_error() -> None:
    made = exports()
    for layers in ((0, 7), (3, 3), (-1, 2)):
        with pytest.raises(ValueError, match="no layers"):
            made.progress(KEY, 4, *layers, now=1.0)
    with pytest.raises(ValueError, match="11 of 10 tokens"):
        made.progress(KEY, 11, 0, 6, 1.0)
    with pytest.raises(ValueError, match="no push"):
        made.pushed(KEY, 1, 1.0)
    with pytest.raises(ValueError, match="no seal"):
        made.sealed(KEY, 1.0)
    made.seal(KEY, FIRST, 0, 1.0)
    with pytest.raises(ValueError, match="sealed already"):
        made.seal(KEY, FIRST, 0, 1.0)
    send_job(made, PushJob)
    with pytest.raises(ValueError, match="a job within a job"):
        made.next_job(KEY, 1.0)
    with pytest.raises(ValueError, match="open already"):
        made.open(KEY, ID, TARGET, block_ids=(1,), token_count=1, lease_s=1, now=0.0)
