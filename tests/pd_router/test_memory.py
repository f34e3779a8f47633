"""A whole router's memory over distinct prompts and sessions, from HTTP to the workers' streams:
once its rings and caches are full, not a few bytes a request stay behind in any layer.
PD_MEMORY_REQUESTS=1000000 is the long way; `make soak` takes it.
"""

import asyncio
import gc
import json
import os
import tracemalloc
from collections.abc import Iterator

import pytest

from pd_router import journal
from pd_router.prefixes import PrefixIndex
from tests import client
from tests.pd_router.fake_worker import MODEL
from tests.pd_router.http_rig import go
from tests.pd_router.whole_rig import Whole, whole

REQUESTS = int(os.environ.get("PD_MEMORY_REQUESTS", "3000"))
CONNECTIONS = 8
A_SESSION = 10  # requests
LEFT_BYTES = 4.0  # by a request: less than a place in a list
STEADY_BYTES = 8_000  # tables that grow now and then, whatever the number of requests
BATCH = 500


class Traffic:
    """Requests that are all different, over a few kept connections."""

    def __init__(self, r: Whole) -> None:
        self._r = r
        self._number = 0

    def _body(self) -> bytes:
        self._number += 1
        number = self._number
        digits = [number // 500**place % 500 + 5 for place in range(3)]
        fields = {
            "model": MODEL, "prompt": [*digits, *range(5, 35)], "max_tokens": 2,
            "session_id": f"session-{number // A_SESSION}", "user": f"user-{number}",
            "stream": number % 2 == 0,
        }  # fmt: skip
        return json.dumps(fields).encode()

    async def run(self, requests: int) -> None:
        """A batch at a time; what the fake workers note for assertions is thrown away."""
        place = (self._r.http.host, self._r.http.port)
        connections = [await asyncio.open_connection(*place) for _ in range(CONNECTIONS)]
        left = requests
        while left > 0:
            turns = iter(range(min(left, BATCH)))
            await asyncio.gather(*(self._user(*one, turns) for one in connections))
            left -= BATCH
            for fake in self._r.fakes:
                fake.seen.generates.clear()
                fake.seen.prefills.clear()
        for _, writer in connections:
            writer.close()
            await writer.wait_closed()

    async def _user(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turns: Iterator[int]
    ) -> None:
        for turn in turns:
            body = self._body()
            head = (
                f"POST /v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n"
                f"x-request-id: r-{self._number}-{turn}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            response = await client.read_head(reader, writer)
            assert response.status == 200, await response.body()
            await response.body()


def kept(r: Whole) -> int:
    """Bytes of all that the router's own lines have made and that is still there."""
    gc.collect()
    traces = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, "*/runtime/pd_router/*")]
    )
    assert r.sessions.counts().running == r.sessions.counts().queued == r.app.running == 0
    assert all(entry["requests"] == 0 for entry in r.workers.snapshot())
    return sum(one.size for one in traces.statistics("filename"))


async def growth(requests: int) -> float:
    """Bytes that so many requests leave behind, once every bound is reached."""
    async with whole() as r:
        r.workers.prefixes = PrefixIndex(limit=100)
        for role, name in (("prefill", "p-0"), ("decode", "d-0"), ("decode", "d-1")):
            await r.add(role, name, step_s=0.0)
        traffic = Traffic(r)
        await traffic.run(journal.RING_REQUESTS + BATCH)
        series = len(r.metrics.expose().splitlines())
        before = kept(r)
        await traffic.run(requests)
        after = kept(r)
        assert len(r.metrics.expose().splitlines()) == series
        return after - before


@pytest.mark.slow
@pytest.mark.timeout(120 + REQUESTS // 20)
def test_distinct_prompts_and_sessions_leave_nothing_behind() -> None:
    tracemalloc.start()
    try:
        grown = go(growth(REQUESTS), 100 + REQUESTS / 20)
    finally:
        tracemalloc.stop()
    assert grown < STEADY_BYTES + LEFT_BYTES * REQUESTS, f"{grown / REQUESTS:.1f} B a request"
    print(f"{REQUESTS} requests left {grown} bytes behind")
