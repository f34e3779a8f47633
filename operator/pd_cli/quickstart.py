"""`pdcluster quickstart`: up, one streamed answer, and what happened to it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pd_operator.local.cluster import LocalCluster

_QUESTION = "What is the capital of France, and what is it known for?"
_MAX_TOKENS = 96
_TOKEN_TIMEOUT_S = 120.0
_JOURNAL_TIMEOUT_S = 5.0
_FILE_COLUMNS = 110


@click.command(name="quickstart")
@click.option(
    "-f", "--file", required=True, type=click.Path(path_type=Path), help="PDCluster file."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535),
              help="Port of the API on 127.0.0.1; 0 picks a free one.")  # fmt: skip
@click.option("--question", default=_QUESTION, show_default=True)
def command(file: Path, port: int, question: str) -> None:
    """Bring a PDCluster up, stream one answer and show what happened to it.

    On a terminal it goes on serving until Ctrl-C; otherwise it ends everything.
    """
    from pd_cli import session
    from pd_operator.local.cluster import Options

    async def when_ready(local: "LocalCluster") -> bool:
        await _show_one_answer(local, question)
        if not sys.stdout.isatty():
            click.echo("\nThis is no terminal: everything is taken down again.")
            return False
        _invite(local)
        return True

    options = Options(port=port, file=str(file.resolve()))
    sys.exit(session.run(file, options, when_ready))


async def _show_one_answer(local: "LocalCluster", question: str) -> None:
    from rich.console import Console

    from pd_cli import chat, session, timeline

    body = _request(local, question)
    click.echo(f"\n> {question}\n")
    reply_id = ""
    try:
        async for piece in chat.stream("127.0.0.1", local.port, body, timeout_s=_TOKEN_TIMEOUT_S):
            reply_id = piece.reply_id
            click.echo(piece.text, nl=False)
            sys.stdout.flush()
    except chat.ChatFailed as error:
        raise session.Failed(f"no answer: {error}; the logs are in {local.logs}") from error
    click.echo("\n")
    entry = await _journal_entry(local, reply_id)
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    console.print(timeline.table(entry, console.width))


def _request(local: "LocalCluster", question: str) -> dict[str, Any]:
    return {
        "model": local.document()["spec"]["model"]["name"],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }


async def _journal_entry(local: "LocalCluster", reply_id: str) -> dict[str, Any]:
    """What the router wrote down; it does so when the request has ended on its side too."""
    from pd_cli import session
    from pd_operator import httpget

    path = f"/debug/requests?id={reply_id}"
    deadline = asyncio.get_running_loop().time() + _JOURNAL_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline:
        for host, port in local.router_admins():
            response = await httpget.get(host, port, path, timeout_s=_JOURNAL_TIMEOUT_S)
            found = json.loads(response.body).get("requests", [])
            if found:
                return dict(found[0])
        await asyncio.sleep(0.05)
    raise session.Failed(f"the router knows nothing of {reply_id}; the logs are in {local.logs}")


def _invite(local: "LocalCluster") -> None:
    body = json.dumps(_request(local, "Hello!"))
    click.echo("\nIt goes on serving until Ctrl-C. From another terminal:\n")
    click.echo(
        f"  curl {local.url}/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )
