"""What the scheduler's tests, case by case, share: small worlds and short questions."""

from collections.abc import Sequence
from typing import Any

from pd_core.failures import Failure
from pd_engine.scheduler import SchedulerConfig
from pd_engine.types import Batch
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
