"""Covers bench.router: the load generator's counting, and ratios with peers and without."""

import asyncio

import pytest

from bench.router.__main__ import Figures, summary
from bench.router.load import Counts, Shape, Stream, request

EVENT = b'data: {"id":"x","choices":[{"text":"%b","finish_reason":null}]}\n\n'


class Wire(asyncio.Transport):
    """Takes what is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.asked.append(bytes(data))

    def close(self) -> None:
        self.closed = True


def answer(tokens: int, together: int) -> bytes:
    events = [EVENT % (b" a" * together)] * (tokens // together) + [b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return b"HTTP/1.1 200 OK\r\nserver: a b c\r\n\r\n" + chunks + b"0\r\n\r\n"


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_tokens_are_counted_however_an_answer_is_cut(together: int, size: int) -> None:
    async def scenario() -> None:
        counts, wire = Counts(), Wire()
        stream = Stream(request("p", Shape(1, 6, 1), 80), 6, counts)
        stream.connection_made(wire)
        for last in (False, True):
            if last:
                stream.finish()
            text = answer(6, together)
            for at in range(0, len(text), size):
                stream.data_received(text[at : at + size])
        assert (counts.tokens, counts.requests, counts.wrong) == (12, 2, [])
        assert len(counts.ttft_s) == len(wire.asked) == 2
        assert stream.over.done()
        assert wire.closed

    asyncio.run(scenario())


@pytest.mark.parametrize("text", [answer(5, 1), b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno"])
def test_a_wrong_answer_is_told(text: bytes) -> None:
    async def scenario() -> None:
        counts = Counts()
        stream = Stream(b"", 6, counts)
        stream.connection_made(Wire())
        stream.data_received(text)
        assert len(counts.wrong) == 1
        assert stream.over.done()

    asyncio.run(scenario())


def figures(peers: dict[str, float]) -> Figures:
    found = Figures()
    for name, factor in {"ours": 1.0, **peers}.items():
        for live in (32, 128, 256):
            found.add(name, f"tokens_s_{live}", 100.0 * factor)
            found.add(name, f"wall_tokens_s_{live}", 90.0 * factor)
            found.add(name, f"us_per_token_{live}", 10.0 * factor)
        for kind in ("requests_s", "wall_requests_s", "us_per_request", "mb_at_2000"):
            found.add(name, kind, 50.0 * factor)
        for live in (1, 32):
            found.add(name, f"ttft_p99_{live}", 2.0 * factor)
        found.add(name, "killed_worker_errors", 0.0)
    return found


def test_ratios_are_against_the_best_peer() -> None:
    told = summary(figures({"slow": 0.5, "fast": 2.0}))
    assert told["tokens_s_vs_best"] == 0.5
    assert told["cpu_per_token_vs_best"] == 2.0
    assert told["requests_s_vs_best"] == 0.5
    assert told["ttft_p99_vs_best"] == 2.0
    assert told["us_per_token"] == 10.0


def test_without_peers_there_is_no_ratio() -> None:
    told = summary(figures({}))
    assert told["tokens_s_vs_best"] is None
    assert told["ttft_p99_vs_best"] is None
    assert told["us_per_token"] == 10.0
    assert told["killed_worker_errors"] == 0.0
