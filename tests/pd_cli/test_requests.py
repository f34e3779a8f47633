"""`pdcluster requests`: the last one, one by its id, failed ones; nobody there, nothing known."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pd_cli import requests
from pd_operator import web
from tests.pd_cli import test_quickstart_parts as parts

Run = Callable[[Coroutine[Any, Any, None]], None]


def entry(name: str, ended_at: float, **changes: Any) -> dict[str, Any]:
    known = {"id": name, "request_id": f"r-{name}", "ended_at": ended_at, "status": 200}
    return parts.entry(transport="shm", reason="idle") | known | {"failure": None} | changes


async def ask(found: list[dict[str, Any]], *more: str) -> Result:
    body = json.dumps({"requests": found}).encode()
    page = {"/debug/requests": lambda: web.Page(body, content_type="application/json")}
    async with web.serving({("127.0.0.1", 0): page}) as [port]:
        command = ["--url", f"127.0.0.1:{port}", *more]
        return await asyncio.to_thread(CliRunner().invoke, requests.command, command)


def test_the_last_one_is_shown(run: Run) -> None:
    async def scenario() -> None:
        said = await ask([entry("old", 1.0), entry("new", 2.0)])
        assert said.exit_code == 0
        assert "What happened to new" in said.output
        assert "old" not in said.output
        assert "shm" in said.output
        assert "why there: idle" in said.output
        both = await ask([entry("old", 1.0), entry("new", 2.0)], "--last", "2")
        assert both.output.index("to new") < both.output.index("to old")

    run(scenario())


def test_a_failed_one_says_why(run: Run) -> None:
    async def scenario() -> None:
        failure = {"kind": "deadline", "message": "It took [too] long."}
        said = await ask([entry("bad", 1.0, timelines=[], failure=failure, status=504)])
        assert said.exit_code == 0
        assert "r-bad: 504, deadline: It took [too] long." in said.output

    run(scenario())


def test_for_programs(run: Run) -> None:
    async def scenario() -> None:
        said = await ask([entry("new", 2.0)], "-o", "json", "--id", "new")
        assert [one["id"] for one in json.loads(said.output)["requests"]] == ["new"]

    run(scenario())


@pytest.mark.parametrize(("more", "words"), [((), "of any request yet"), (("--id", "x"), "of x;")])
def test_nothing_is_known(run: Run, more: tuple[str, ...], words: str) -> None:
    async def scenario() -> None:
        said = await ask([], *more)
        assert said.exit_code == 1
        assert words in said.output

    run(scenario())


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("127.0.0.1:1", "no router answers at 127.0.0.1:1 (connection refused)"),
        ("http://[::1", "write it like http://localhost:9090"),
        ("http://127.0.0.1:99999", "write it like http://localhost:9090"),
    ],
)
def test_nobody_answers(url: str, words: str) -> None:
    said = CliRunner().invoke(requests.command, ["--url", url])
    assert said.exit_code == 1
    assert words in said.output


def test_somebody_else_answers(run: Run) -> None:
    async def scenario() -> None:
        page = {"/debug/requests": lambda: web.Page(b"null")}
        async with web.serving({("127.0.0.1", 0): page}) as [port]:
            command = ["--url", f"127.0.0.1:{port}", "--id", "\udcff"]
            said = await asyncio.to_thread(CliRunner().invoke, requests.command, command)
        assert said.exit_code == 1
        assert "is no router's admin port" in said.output

    run(scenario())
