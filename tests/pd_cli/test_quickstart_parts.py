"""The quickstart's parts: reading a streamed answer whatever the server does, the timeline
of a request, and what a terminal shows of a model's preparation.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pd_cli import chat, timeline
from pd_cli.console import QuietWhenAlone, Terminal

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def event(**delta: Any) -> bytes:
    body = {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@asynccontextmanager
async def server(answer: bytes, hold: bool = False) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Sends the answer to whoever asks; `hold` keeps the connection open after it."""
    asked: list[bytes] = []
    ended = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        asked.append(await reader.readexactly(length))
        writer.write(answer)
        if hold:
            await reader.read()
        writer.close()
        ended.set()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listening:
        try:
            yield listening.sockets[0].getsockname()[1], asked
        finally:
            await ended.wait()


async def collect(port: int) -> list[chat.Piece]:
    pieces = chat.stream("127.0.0.1", port, {"model": "m"}, timeout_s=0.3)
    return [piece async for piece in pieces]


def test_an_answer_in_pieces(run) -> None:
    parts = [event(role="assistant"), event(content="Par"), event(content="is"), event()]
    usage = b'data: {"id": "chatcmpl-1", "choices": []}\n\n'

    async def scenario() -> tuple[list[chat.Piece], dict[str, Any]]:
        answer = _OK + b": hello\n\n" + b"".join(parts) + usage + b"data: [DONE]\n\n"
        async with server(answer) as (port, asked):
            return await collect(port), json.loads(asked[0])

    pieces, body = run(scenario())
    assert "".join(piece.text for piece in pieces) == "Paris"
    assert {piece.reply_id for piece in pieces} == {"chatcmpl-1"}
    assert body == {"model": "m", "stream": True}


@pytest.mark.parametrize(
    ("answer", "hold", "message"),
    [
        (_OK + event(content="x"), False, "the answer broke off"),
        (_OK + event(content="x"), True, "the answer stopped: no more of it came"),
        (b"HTTP/1.1 503 No\r\n\r\n{no workers}", False, "status 503: {no workers}"),
        (b"SSH-2.0\r\n\r\n", False, "the answer is not HTTP"),
        (_OK + b"data: {]\n\n", False, "not an event of the API: {]"),
        (_OK + b'data: {"id": 1}\n\n', False, "not an event of the API"),
        (_OK + b'data: {"error": {"message": "worker lost"}}\n\n', False, "worker lost"),
        (b"", False, "the answer broke off"),
    ],
)
def test_an_answer_that_fails(run, answer: bytes, hold: bool, message: str) -> None:
    async def scenario() -> None:
        async with server(answer, hold) as (port, _):
            await collect(port)

    with pytest.raises(chat.ChatFailed) as caught:
        run(scenario())
    assert message in str(caught.value)


def test_nobody_there(run) -> None:
    with pytest.raises(chat.ChatFailed, match="can't connect to"):
        run(collect(1))


def entry(**changes: Any) -> dict[str, Any]:
    line = {
        "prompt_tokens": 44, "cached_tokens": 12, "completion_tokens": 57, "queue_s": 0.001,
        "grant_wait_s": 0.002, "prefill_worker": "q-p-1-0", "prefill_queue_s": 0.003,
        "prefill_s": 0.4, "kv_bytes": 2_200_000, "transfer_s": 0.3, "transport": "tcp",
        "exposed_s": 0.002,
        "decode_worker": "q-d-1-0", "tokenize_s": 0.0005, "ttft_s": 0.45, "tpot_s": 0.03,
    }  # fmt: skip
    return {"id": "chatcmpl-1", "total_s": 2.0, "timelines": [line | changes]}


def test_the_steps_of_a_request() -> None:
    found = {step.name: step for step in timeline.steps(entry())}
    assert list(found) == [
        "tokenize", "queue", "reserve", "wait", "prefill", "transfer", "decode",
    ]  # fmt: skip
    assert found["prefill"].where == "q-p-1-0"
    assert found["prefill"].detail == "44 tokens, 32 computed"
    assert found["transfer"].detail == "2.1 MiB of KV, 2.0 ms exposed"
    assert found["transfer"].start_s > found["prefill"].start_s
    assert found["decode"].start_s == 0.45
    assert found["decode"].seconds == pytest.approx(1.55)


def test_a_copy_of_its_beginning_comes_before_the_prompt() -> None:
    copy = {
        "pulled_from": "q-d-1-0", "pulled_tokens": 32, "pulled_bytes": 1 << 20, "pull_s": 0.05,
    }  # fmt: skip
    found = {step.name: step for step in timeline.steps(entry(**copy))}
    assert found["pull"].where == "q-p-1-0"
    assert found["pull"].detail == "32 tokens, 1.0 MiB from q-d-1-0"
    assert found["pull"].start_s < found["wait"].start_s < found["prefill"].start_s
    late = {step.name: step for step in timeline.steps(entry(**copy | {"pulled_tokens": 0}))}
    assert late["pull"].detail == "came to nothing"


def test_a_request_that_was_prefilled_where_it_decoded() -> None:
    steps = timeline.steps(entry(prefill_worker="", transport="", transfer_s=0.0, kv_bytes=0))
    assert "transfer" not in {step.name for step in steps}
    assert {step.where for step in steps if step.name in ("prefill", "wait")} == {"q-d-1-0"}


def test_a_request_without_tokens() -> None:
    steps = timeline.steps(entry(ttft_s=None, tpot_s=None) | {"total_s": 0.0})
    assert steps[-1].name == "transfer"


@pytest.mark.parametrize(("width", "details"), [(140, True), (100, True), (80, True), (64, False)])
def test_the_table_fits_and_names_everything(width: int, details: bool) -> None:
    file = StringIO()
    out = Console(file=file, width=width)
    out.print(timeline.table(entry(), width))
    text = file.getvalue()
    for part in ("queue", "prefill", "q-p-1-0", "400.0 ms", "q-d-1-0", "TTFT 450.0 ms", "█"):
        assert part in text
    assert ("2.1 MiB of KV, 2.0 ms exposed" in text) == details
    assert "TPOT 30.0 ms" in text
    assert "…" not in text


def progress(terminal: Terminal) -> None:
    for pod, stage, done in (("a", "weights", 0), ("b", "waiting", 0), ("a", "weights", 9)):
        terminal.output(pod, json.dumps({"stage": stage, "done": done, "total": 9}))
    for line in ("no JSON", "[]", '{"stage": "x"}', '{"stage": "x", "done": "y", "total": 1}'):
        terminal.output("a", line)


def test_a_pipe_gets_one_line_a_stage() -> None:
    file = StringIO()
    terminal = Terminal(Console(file=file))
    progress(terminal)
    terminal.end_progress()
    assert file.getvalue() == "model: weights\n"


def test_a_terminal_gets_a_bar_that_goes_again() -> None:
    file = StringIO()
    terminal = Terminal(Console(file=file, force_terminal=True, width=80, highlight=False))
    progress(terminal)
    terminal.line("between [the] lines")
    terminal.output("a", '{"stage": "ready", "done": 1, "total": 1}')
    assert "model: weights" in file.getvalue()
    assert file.getvalue().endswith("model: ready\n")
    assert "between [the] lines" in file.getvalue()


LOADING = ("libraries", "weights, 0 of 30", "weights, 15 of 30", "weights, 30 of 30", "warm-up")


def load(terminal: Terminal, *pods: str) -> None:
    for stage in LOADING:
        for pod in pods:
            terminal.output(pod, f"status 503, loading the model: {stage}")
    for pod in pods:
        terminal.output(pod, "")
        terminal.say(pod, "ready")


def test_a_pipe_hears_once_of_each_worker_that_loads() -> None:
    file = StringIO()
    load(Terminal(Console(file=file)), "p-0", "d-0")
    assert file.getvalue().splitlines() == [
        "p-0: loading the model", "d-0: loading the model", "p-0: ready", "d-0: ready",
    ]  # fmt: skip


def test_a_terminal_gets_a_bar_for_each_worker_that_loads() -> None:
    file = StringIO()
    terminal = Terminal(Console(file=file, force_terminal=True, width=100, highlight=False))
    load(terminal, "p-0", "d-0")
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    for pod in ("p-0", "d-0"):
        shown = re.findall(rf"{pod}: loading the model: ([a-z-]+) \S+ +(\d+%)", drawn)
        stages = list(dict.fromkeys(shown))
        assert stages[-4:] == [
            ("weights", "0%"), ("weights", "50%"), ("weights", "100%"), ("warm-up", "100%"),
        ]  # fmt: skip
    assert "p-0: ready\n" in drawn
    assert drawn.endswith("\rd-0: ready\n")


@pytest.mark.parametrize("line", ["not listening", "status 503, no router has taken it", ""])
def test_other_answers_of_a_worker_are_no_progress(line: str) -> None:
    file = StringIO()
    Terminal(Console(file=file, force_terminal=True)).output("p-0", line)
    assert file.getvalue() == ""


def test_a_reader_that_went_away_does_no_harm() -> None:
    class Gone(StringIO):
        def write(self, text: str) -> int:
            del text
            raise BrokenPipeError

    terminal = Terminal(QuietWhenAlone(file=Gone()))
    terminal.say("pod", "ready")
    progress(terminal)
