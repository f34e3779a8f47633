"""Covers pd_cli.top and topview: what is drawn of one or several routers, within the terminal,
and what is said where nobody answers."""

import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from pd_cli import top, topview
from pd_operator import web


def worker(name: str, role: str, **changes: Any) -> dict[str, Any]:
    known = {
        "worker": name, "role": role, "state": "ready", "usable": True, "queued": 0,
        "running": 2, "waiting_grants": 0, "pending_tokens": 7, "kv_share": 0.5,
    }  # fmt: skip
    return known | changes


def request(number: int, **changes: Any) -> dict[str, Any]:
    stretches = [
        {"name": "prefill", "where": "p-0", "start_s": 0.0, "seconds": 1.0},
        {"name": "decode", "where": "d-0", "start_s": 1.0, "seconds": 3.0},
    ]
    known = {
        "id": f"r-{number}", "status": 200, "failure": "", "ended_at": 1e9 + number,
        "total_s": 4.0, "ttft_s": 1.0, "tpot_s": 0.02, "prompt_tokens": 44,
        "completion_tokens": 9, "decode": "d-0", "stretches": stretches,
    }  # fmt: skip
    return known | changes


def state(router: str = "r-0", **changes: Any) -> dict[str, Any]:
    none = {"bounds": [0.1, 1.0], "counts": [0, 0, 0]}
    known = {
        "model": "smollm2", "router": router, "ready": True, "queued": {"requests": 1},
        "workers": [worker("d-10", "decode"), worker("d-2", "decode"), worker("p-0", "prefill")],
        "requests": [request(1)],
        "distributions": {"ttft": none, "itl": none},
    }  # fmt: skip
    return known | changes


def drawn(document: dict[str, Any], width: int = 120, height: int = 40) -> str:
    file = StringIO()
    latencies = {"ttft": topview.Latency(), "itl": topview.Latency()}
    for name, one in latencies.items():
        one.look(document["distributions"][name])
    Console(file=file, width=width).print(topview.screen(document, latencies, width, height))
    return file.getvalue()


def test_workers_come_in_order_with_what_is_wrong() -> None:
    late = worker("d-3", "decode", state="breaker open: late", usable=False)
    text = drawn(state(workers=[*state()["workers"], late]))
    places = [text.index(name) for name in ("p-0 ", "d-2 ", "d-3 ", "d-10 ")]
    assert places == sorted(places)
    assert "breaker open: late" in text
    assert "█████░░░░░  50%" in text


def test_why_pools_have_their_sizes() -> None:
    now = {"time": "2026-01-01T00:00:09Z", "pool": "decode", "text": "decode stays at 2: it fits"}
    changes = [
        {"time": f"2026-01-01T00:00:0{n}Z", "pool": "decode", "text": f"decode to {n}: more"}
        for n in range(8)
    ]
    text = drawn(state(sizes={"standing": [now], "changes": changes}))
    shown = [line.split("  ", 1)[1].strip() for line in text.splitlines() if ": " in line]
    assert [line for line in shown if line.startswith("decode ")] == [
        "decode stays at 2: it fits", "decode to 0: more", "decode to 1: more", "decode to 2: more",
    ]  # fmt: skip
    assert "stays" not in drawn(state())


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 24), (200, 60)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    long = {"time": "2026-01-01T00:00:09Z", "pool": "decode", "text": "decode stays: " + "x " * 99}
    sizes = {"standing": [long] * 2, "changes": [long | {"text": f"{n}"} for n in range(9)]}
    text = drawn(state(requests=[request(n) for n in range(90)], sizes=sizes), width, height)
    lines = text.splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert "TTFT" in text


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ([0, 0, 0], [0, 0, 0], None),
        ([0, 0, 0], [10, 10, 10], 0.5),
        ([4, 4, 4], [4, 14, 14], 1.5),
        ([0, 0, 0], [0, 0, 3], 2.0),
        ([5, 5, 5], [0, 0, 1], None),
    ],
)
def test_quantiles_between_two_looks(
    before: list[float], after: list[float], found: float | None
) -> None:
    assert topview.quantile([1.0, 2.0], before, after, 0.5) == found


def test_a_latency_forgets() -> None:
    one = topview.Latency()
    for number in range(500):
        one.look({"bounds": [1.0], "counts": [min(number, 3), min(number, 3)]})
    assert len(one.points) == topview.HISTORY
    assert one.points[-1] == (None, None)


def test_who_looks_once_sees_all_there_was() -> None:
    one = topview.Latency(whole=True)
    one.look({"bounds": [1.0, 2.0], "counts": [0, 4, 4]})
    assert one.points[-1] == (pytest.approx(1.5), pytest.approx(1.99))
    assert "since the routers' start" in str(one.line("TTFT"))


def test_kv_is_said_on_narrow_terminals_too() -> None:
    assert "50%" in drawn(state(), width=80)


def test_sparks() -> None:
    assert topview.sparks([0.0, None, 7.0]) == "▁ █"
    assert topview.sparks([None, None]) == "  "


def test_once_from_a_forwarded_port(run) -> None:
    body = json.dumps(state()).encode()

    async def scenario() -> None:
        page = {"/debug/state": lambda: web.Page(body, content_type="application/json")}
        async with web.serving({("127.0.0.1", 0): page}) as [port]:
            ask = asyncio.to_thread(
                CliRunner().invoke, top.command, ["--url", f"http://127.0.0.1:{port}"]
            )
            said = await ask
            assert said.exit_code == 0
            assert "smollm2" in said.output
            assert "since the routers' start" in said.output
            again = [*("--url", f"127.0.0.1:{port}"), "-o", "json"]
            said = await asyncio.to_thread(CliRunner().invoke, top.command, again)
            assert json.loads(said.output)["requests"][0]["id"] == "r-1"

    run(scenario())


def on_a_terminal(port: int) -> tuple[int, str]:
    """What `top` draws on a terminal until it has drawn anew, and its status after Ctrl-C."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    command = [sys.executable, "-m", "pd_cli.main", "top", "--url", f"http://127.0.0.1:{port}"]
    process = subprocess.Popen(
        [*command, "--every", "0.2"], stdin=its, stdout=its, stderr=its,
        env={**os.environ, "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    seen, until, stopped = "", time.monotonic() + 60, False
    while time.monotonic() < until and select.select([ours], [], [], 30)[0]:
        try:
            seen += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # nobody has the other end any more
            break
        if seen.count("smollm2") >= 3 and not stopped:
            process.send_signal(signal.SIGINT)
            stopped = True
    os.close(ours)
    if not stopped:
        process.kill()
    return process.wait(30), seen


def test_live_on_a_terminal(run) -> None:
    asked = 0

    def body() -> web.Page:
        nonlocal asked
        asked += 1
        page = json.dumps(state(requests=[request(asked)])).encode()
        return web.Page(page, content_type="application/json")

    async def scenario() -> None:
        async with web.serving({("127.0.0.1", 0): {"/debug/state": body}}) as [port]:
            code, seen = await asyncio.to_thread(on_a_terminal, port)
        assert code == 0, seen
        screens = [one for one in seen.split("\x1b[H") if "smollm2" in one]
        assert "d-10" in screens[0]
        assert len(set(screens)) > 1
        assert seen.startswith("\x1b[?1049h")
        assert "\x1b[?1049l" in seen[-40:]
        assert asked >= 3

    run(scenario())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "no router answers at 127.0.0.1:1"),
        (["--url", "http://"], "names no host"),
        ([], "no PDCluster is running here"),
        (["chat"], "no PDCluster chat is running"),
    ],
)
def test_where_nothing_is_to_be_seen(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said = CliRunner().invoke(top.command, arguments)
    assert said.exit_code == 1
    assert says in said.output
