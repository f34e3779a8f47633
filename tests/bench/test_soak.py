"""Covers bench.soak: what is right, wrong, failed; growth by process; figures that add up."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bench.soak import kept
from bench.soak.cases import Case, Failed, Wrong, bad, http
from bench.soak.client import Answer, Broken, Client
from bench.soak.load import Mix, Tally, User
from bench.soak.parts import PARTS
from bench.soak.watch import Series, Watch

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def whole(*choices: list[int]) -> bytes:
    return json.dumps(
        {"choices": [{"index": i, "token_ids": ids} for i, ids in enumerate(choices)]}
    ).encode()


def streamed(*events: bytes) -> bytes:
    return b"".join(b"data: " + event + b"\n\n" for event in events)


@pytest.mark.parametrize(
    ("case", "body"),
    [
        (Case(b"", (4, 5)), whole([4, 5])),
        (Case(b"", (4, 5), choices=2), whole([4, 5], [4, 5])),
        (Case(b"", (4, 5), streamed=True), streamed(whole([4]), whole([5]), b"[DONE]")),
    ],
)
def test_the_model_s_tokens_are_right(case: Case, body: bytes) -> None:
    case.judge(Answer(200, body))


@pytest.mark.parametrize(
    ("case", "body"),
    [
        (Case(b"", (4, 5)), whole([4, 6])),
        (Case(b"", (4, 5)), whole([4])),
        (Case(b"", (4, 5)), whole()),
        (Case(b"", (4, 5), choices=2), whole([4, 5])),
        (Case(b"", (4, 5), choices=2), whole([4, 5], [5, 5])),
        (Case(b"", (4, 5), streamed=True), streamed(whole([4]), b"[DONE]")),
    ],
)
def test_others_are_wrong(case: Case, body: bytes) -> None:
    with pytest.raises(Wrong):
        case.judge(Answer(200, body))


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        (Case(b"", (4,)), Answer(503, b"{}")),
        (Case(b"", (4,), streamed=True), Answer(200, streamed(whole([4])))),
        (Case(b"", (4,), streamed=True), Answer(200, streamed(b'{"error": {"code": "x"}}'))),
        (Case(b"", refused=400), Answer(200, b"{}")),
        (Case(b"", refused=400), Answer(500, b'{"error": {"message": "a bug"}}')),
        (Case(b"", refused=400), Answer(400, b"")),
    ],
)
def test_an_error_is_a_failure(case: Case, answer: Answer) -> None:
    with pytest.raises(Failed):
        case.judge(answer)


def test_a_refusal_says_why() -> None:
    Case(b"", refused=400).judge(Answer(400, b'{"error": {"message": "no prompt"}}'))
    assert all(case.refused for case in bad())


def test_growth_is_of_a_process_after_its_first_tenth() -> None:
    flat = Series("flat", [50] * 300 + [100] * 300, [9] * 600)
    assert flat.judged()
    assert flat.rss_growth() == 0
    assert flat.fd_growth() == 0
    assert flat.rss_curve_mib() == [round(n / 2**20, 1) for n in [50] * 5 + [100] * 5]
    leaking = Series("leaking", [100] * 400 + [110] * 200, [9, 30] * 200 + [11, 30] * 100)
    assert leaking.rss_growth() == pytest.approx(0.1)
    assert leaking.fd_growth() == 2


def test_the_worst_process_counts_and_a_short_life_does_not() -> None:
    watch = Watch()
    assert watch.rss_growth() is None
    for _ in range(420):
        watch.sample({os.getpid(): "this one"})
    [series] = watch.judged()
    assert series.rss_bytes[0] > 1_000_000
    assert series.fds[0] > 2
    watch.series[1, 0.0] = Series("short", [1, 9], [1, 9])
    watch.series[2, 0.0] = Series("grows", [100] * 400 + [200] * 200, [4] * 400 + [7] * 200)
    assert watch.rss_growth() == 1
    assert watch.fd_growth() == 3


def test_a_process_that_has_gone_is_no_sample() -> None:
    watch = Watch()
    watch.sample({2**22 + 1: "nobody"})
    assert not watch.series


def found(part: str, **changes: Any) -> kept.Found:
    return {
        "part": part,
        "seconds": 60.0,
        "requests": 100,
        "wrong_tokens": 0,
        "failed": 0,
        "leaked_blocks": 0,
        "rss_growth": None,
        "fd_growth": None,
        **changes,
    }


def test_figures_of_runs_add_up(tmp_path: Path) -> None:
    file = tmp_path / "out" / "soak.jsonl"
    assert kept.all_kept(file) == []
    kept.keep(found("plain", rss_growth=0.01, fd_growth=0), file)
    kept.keep(found("plain", requests=50, wrong_tokens=1, rss_growth=-0.02, fd_growth=2), file)
    kept.keep(found("faults", leaked_blocks=3), file)
    runs = kept.all_kept(file)
    figures = kept.total(runs)
    assert figures["requests"] == 250
    assert figures["wrong_tokens"] == 1
    assert figures["leaked_blocks"] == 3
    assert figures["rss_growth"] == 0.01
    assert figures["fd_growth"] == 2
    assert figures["requests_s"] == pytest.approx(250 / 180)
    assert [row[:3] for row in kept.rows(runs)] == [("plain", 2, 150), ("faults", 1, 100)]


def test_the_parts_take_the_whole_round() -> None:
    assert sum(part.share for part in PARTS) == pytest.approx(1)


class Played:
    """A server that plays one script a connection: what it answers to each request."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers
        self.port = 0
        self.asked = 0
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> "Played":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        for answer in self._answers:
            if not await reader.readline():
                break
            self.asked += 1
            while await reader.readline() != b"\r\n":
                pass
            writer.write(answer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def answer(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"


def test_a_connection_is_kept_and_made_again(run: Run) -> None:
    async def scenario() -> None:
        closing = answer(b"two").replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        async with Played(CHUNKED, closing) as played:
            client = Client("127.0.0.1", played.port)
            assert await client.ask(http(b"")) == Answer(200, b"abc")
            assert await client.ask(http(b"")) == Answer(200, b"two")
            assert await client.ask(http(b"")) == Answer(200, b"abc")
            client.hang_up()
            assert played.asked == 3

    run(scenario())


def test_half_an_answer_is_none(run: Run) -> None:
    async def scenario(sent: bytes) -> None:
        async with Played(sent) as played:
            with pytest.raises(Broken):
                await Client("127.0.0.1", played.port).ask(http(b""))

    run(scenario(CHUNKED[:-5]))
    run(scenario(b"no HTTP at all\r\n\r\n"))


def test_users_tally_what_they_get(run: Run) -> None:
    async def scenario() -> Tally:
        over, tally = asyncio.Event(), Tally()
        answers = answer(whole([4])), answer(whole([5])), answer(b"", "500 A Bug")
        cases = {"short": [Case(http(b""), (4,))]}

        async with Played(*answers) as played:
            user = User(0, played.port, Mix({"short": 1}), cases, tally)
            asking = asyncio.create_task(user.run(over))
            while tally.requests < 3:
                await asyncio.sleep(0)
            over.set()
            await asking
        return tally

    tally = run(scenario())
    assert (tally.right, tally.wrong, tally.failed) == (1, 1, 1)
    assert len(tally.notes) == 2
