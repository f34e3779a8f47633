"""`pdcluster requests`: what happened to the last requests, or to one, step by step."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

import click

from pd_cli import output as outputs
from pd_cli import top

_TIMEOUT_S = 5.0
_MOST_BYTES = 16 << 20
_FILE_COLUMNS = 110


@click.command(name="requests")
@click.argument("name", required=False)
@click.option("--id", "request_id", help="Of an answer (`id`), or as x-request-id has it.")
@click.option("--last", type=click.IntRange(1, 100), default=1, show_default=True,
              help="So many requests, the latest first.")  # fmt: skip
@click.option("--url", help="A router's admin port, such as a forwarded http://localhost:9090.")
@outputs.option
def command(
    name: str | None, request_id: str | None, last: int, url: str | None, output: str
) -> None:
    """Show what happened to requests: each step, where, how long; what carried the KV.

    NAME may be left out when only one PDCluster runs on this machine. For one on Kubernetes:
    kubectl pd requests NAME.
    """
    try:
        show([top.place(url)] if url else top.find(name), request_id, last, output)
    except top.NothingToSee as error:
        click.echo(str(error), err=True)
        sys.exit(1)


def show(places: Sequence[top.Place], request_id: str | None, last: int, output: str) -> None:
    """Prints what the routers at these places know; ends with 1 where they know nothing."""
    entries = asyncio.run(_entries(places, request_id, last))[:last]
    if output == outputs.JSON:
        outputs.document({"requests": entries})
    if not entries:
        of = f"of {request_id}" if request_id else "of any request yet"
        click.echo(f"the router knows nothing {of}; it keeps the last ones only", err=True)
        sys.exit(1)
    if output != outputs.JSON:
        _print(entries)


async def _entries(
    places: Sequence[top.Place], request_id: str | None, last: int
) -> list[dict[str, Any]]:
    """The latest first, of all routers that answer."""
    from pd_operator import httpget

    wanted = {"last": str(last)} | ({"id": request_id} if request_id else {})
    path = f"/debug/requests?{urlencode(wanted, errors='replace')}"
    found: list[dict[str, Any]] = []
    reasons = []
    for host, port in places:
        try:
            answer = await httpget.get(
                host, port, path, timeout_s=_TIMEOUT_S, max_bytes=_MOST_BYTES
            )
            found += json.loads(answer.body)["requests"]
        except httpget.GetFailed as error:
            reasons.append(f"{host}:{port} ({error})")
        except (ValueError, KeyError, TypeError):
            reasons.append(f"{host}:{port} (what answers is no router's admin port)")
    if len(reasons) == len(places):
        where = ", ".join(reasons)
        raise top.NothingToSee(f"no router answers at {where or 'any address yet'}")
    return sorted(found, key=lambda entry: -float(entry["ended_at"]))


def _print(entries: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from pd_cli import timeline

    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    for entry in entries:
        if entry["timelines"]:
            console.print(timeline.table(entry, console.width))
            line = entry["timelines"][0]
            if line["reason"]:
                console.print(f"why there: {line['reason']}", highlight=False)
        failure = entry["failure"]
        if failure:
            words = f"{entry['request_id']}: {entry['status']}, {failure['kind']}"
            console.print(f"{words}: {failure['message']}", highlight=False, markup=False)
