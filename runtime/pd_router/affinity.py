"""Which worker a key belongs to, without anybody keeping a table. Pure.

Rendezvous hashing: every router finds the same worker for a key, and a worker that comes
or goes moves only its own keys.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeVar

from pd_router.fleet import WorkerView

_T = TypeVar("_T")


def owner(key: bytes, workers: Iterable[WorkerView]) -> WorkerView | None:
    """The worker with the key's highest draw. Names count, not processes: a worker that
    restarted has lost its cache, and gets its own sessions back all the same."""
    return max(workers, key=lambda w: _draw(key, w), default=None)


def _draw(key: bytes, worker: WorkerView) -> bytes:
    return blake2b(worker.id.name.encode(), key=key[:64], digest_size=8).digest()


def two_of(items: Sequence[_T], lot: int) -> list[_T]:
    """Two different ones, drawn by a number; all of them when there are no more."""
    count = len(items)
    if count <= 2:
        return list(items)
    first = lot % count
    second = (lot // count) % (count - 1)
    return [items[first], items[second if second < first else second + 1]]
