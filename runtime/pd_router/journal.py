"""What is remembered of each request: one log line, the metrics, a bounded ring for debug.

Never its text.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Protocol

from pd_core.failures import Failure
from pd_router.answer import Run
from pd_router.exchange import Exchange
from pd_router.metrics import Metrics
from pd_router.openai import Ask
from pd_router.types import Timeline

access = logging.getLogger("pd_router.access")
log = logging.getLogger("pd_router.journal")

RING_REQUESTS = 1000
RING_TIMELINES = 16  # of one request with many prompts


@dataclass(slots=True, eq=False)
class Record:
    """One HTTP request as it goes along. `accepted` is on the monotonic clock."""

    path: str
    request_id: str  # the client's, or ours where it gave none
    accepted: float
    reply_id: str = ""
    sla: str = ""  # empty: it ended before its class was known
    ask: Ask | None = None
    run: Run | None = None
    tokenize_s: float = 0.0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that is over. Made into a document only when somebody looks."""

    request_id: str
    reply_id: str
    path: str
    status: int
    failure: Failure | None
    total_s: float
    ended_at: float  # seconds since 1970
    timelines: tuple[Timeline, ...]

    def document(self, *, considered: bool = True) -> dict[str, Any]:
        """`considered`: with the workers that were candidates."""
        failure = self.failure
        return {
            "request_id": self.request_id,
            "id": self.reply_id,
            "path": self.path,
            "status": self.status,
            "failure": failure and {"kind": failure.kind, "message": failure.message},
            "total_s": self.total_s,
            "ended_at": self.ended_at,
            "timelines": [_document(timeline, considered) for timeline in self.timelines],
        }


class Spans(Protocol):
    """Makes spans of what is over (`pd_router.tracing`)."""

    def record(self, record: Record, exchange: Exchange, entry: Entry) -> None: ...


class Journal:
    """Keeps the last requests' timelines, and tells the log, the metrics and the spans."""

    def __init__(self, metrics: Metrics, spans: Spans | None = None) -> None:
        self._metrics = metrics
        self._spans = spans
        self._recent: deque[Entry] = deque(maxlen=RING_REQUESTS)

    @contextmanager
    def keeping(self, record: Record, exchange: Exchange) -> Iterator[None]:
        """Writes the record down when the request is over, however it ends."""
        try:
            yield
        finally:
            entry = self._write(record, exchange.status)
            self._trace(record, exchange, entry)

    def _trace(self, record: Record, exchange: Exchange, entry: Entry) -> None:
        """Nobody's request fails for its spans."""
        if self._spans is None:
            return
        try:
            self._spans.record(record, exchange, entry)
        except Exception:
            log.exception("request=%s has no spans", record.request_id)

    def find(self, request_id: str | None, most: int = RING_REQUESTS) -> list[dict[str, Any]]:
        """The latest first, at most so many; with an id (the header's or the answer's) only
        those."""
        found = (
            entry
            for entry in reversed(self._recent)
            if request_id is None or request_id in (entry.request_id, entry.reply_id)
        )
        return [entry.document() for entry in islice(found, most)]

    def latest(self, most: int) -> list[dict[str, Any]]:
        """The last ones that ended, the latest first."""
        return [entry.document() for entry in islice(reversed(self._recent), most)]

    def _write(self, record: Record, status: int) -> Entry:
        total_s = time.monotonic() - record.accepted
        timelines = record.run.settle_timelines(record.tokenize_s) if record.run else []
        self._metrics.request_done(record.path, status, total_s, record.sla)
        if status == 200 and record.failure is None:
            self._metrics.answered(record.sla, timelines)
        if record.failure is not None:
            self._metrics.failed(record.failure.kind)
        for timeline in timelines:
            self._metrics.generation_done(timeline)
        kept = tuple(timelines[:RING_TIMELINES])
        entry = Entry(
            record.request_id, record.reply_id, record.path, status, record.failure,
            total_s, time.time(), kept,
        )  # fmt: skip
        self._recent.append(entry)
        if access.isEnabledFor(logging.INFO):
            access.info("%s", _line(record, status, total_s, timelines))
        return entry


def _document(timeline: Timeline, considered: bool) -> dict[str, Any]:
    found = asdict(replace(timeline, considered=()))
    return found | {
        "considered": [one.document() for one in timeline.considered if considered],
    }


def _line(record: Record, status: int, total_s: float, timelines: list[Timeline]) -> str:
    ask = record.ask
    words = {
        "request": record.request_id,
        "id": record.reply_id,
        "path": record.path,
        "status": status,
        "failure": record.failure.kind if record.failure else "",
        "class": record.sla,
        "stream": "" if ask is None else str(ask.stream).lower(),
        "prompt_tokens": sum(t.prompt_tokens for t in timelines),
        "cached_tokens": sum(t.cached_tokens for t in timelines),
        "completion_tokens": sum(t.completion_tokens for t in timelines),
        "total_ms": _ms(total_s),
    }
    if timelines:
        first = timelines[0]
        words |= {
            "ttft_ms": _ms(first.ttft_s),
            "tpot_ms": _ms(first.tpot_s),
            "prefill": first.prefill_worker,
            "decode": first.decode_worker,
            "attempts": max(t.attempts for t in timelines),
            "why": f'"{first.reason}"' if first.reason else "",
        }
    return " ".join(f"{key}={value}" for key, value in words.items() if value != "")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.1f}"
