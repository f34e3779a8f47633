"""`pdcluster top`: a PDCluster live in a terminal."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import click

from pd_cli import output as outputs

_TIMEOUT_S = 2.0
_ADMIN_PORT = 9090
Place = tuple[str, int]
Find = Callable[[], Sequence[Place]]


@click.command(name="top")
@click.argument("name", required=False)
@click.option("--url", help="A router's admin port, such as a forwarded http://localhost:9090.")
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print once and end; elsewhere than on a terminal too.")
@outputs.option
def command(name: str | None, url: str | None, every: float, once: bool, output: str) -> None:
    """Watch workers, latencies and recent requests until Ctrl-C.

    NAME may be left out when only one PDCluster runs on this machine. For one on Kubernetes:
    kubectl port-forward deployment/NAME-router 9090, then --url http://localhost:9090.
    """
    watch(lambda: [place(url)] if url else find(name), every, once, output)


def watch(places: Find, every: float, once: bool, output: str) -> None:
    """Shows what the routers at these places tell; ends with 1 where nobody answers."""
    once = once or output == "json" or not sys.stdout.isatty()
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_watch(places, every, once, output))
    except NothingToSee as error:
        click.echo(str(error), err=True)
        sys.exit(1)


class NothingToSee(Exception):
    """Nobody answers; the message says what to do."""


async def _watch(places: Find, every: float, once: bool, output: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from pd_cli.topview import Latency, screen

    state = await _look(places)
    if output == "json":
        outputs.document(state)
        return
    console = Console()
    latencies = {"ttft": Latency(once), "itl": Latency(once)}

    def drawn(found: dict[str, Any]) -> Any:
        for key, latency in latencies.items():
            latency.look(found["distributions"][key])
        return screen(found, latencies, console.width, console.height)

    if once:
        console.print(drawn(state))
        return
    with Live(drawn(state), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(every)
            live.update(drawn(await _look(places)), refresh=True)


async def _look(find: Find) -> dict[str, Any]:
    """What all routers that answer say, as one."""
    from pd_router import live

    places = find()
    answers = await asyncio.gather(*(_ask(place) for place in places))
    documents = [one for one in answers if one is not None]
    if not documents:
        where = ", ".join(f"{host}:{port}" for host, port in places)
        raise NothingToSee(f"no router answers at {where or 'any address yet'}")
    return live.merged(", ".join(one["router"] for one in documents), documents)


async def _ask(place: Place) -> dict[str, Any] | None:
    from pd_operator import httpget

    try:
        answer = await httpget.get(*place, "/debug/state", timeout_s=_TIMEOUT_S)
        found: dict[str, Any] = json.loads(answer.body)
        return found if answer.ok else None
    except (httpget.GetFailed, ValueError):
        return None


def place(url: str, port: int = _ADMIN_PORT) -> Place:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, given = parts.hostname, parts.port
    except ValueError as error:
        raise NothingToSee(f"{url!r}: {error}; write it like http://localhost:9090") from None
    if not host:
        raise NothingToSee(f"{url!r} names no host; write it like http://localhost:9090")
    return host, given or port


def find(name: str | None) -> Sequence[Place]:
    """The admin ports of a PDCluster on this machine; NothingToSee unless it is one."""
    return admins(running_state(name))


def admins(state: Mapping[str, Any]) -> Sequence[Place]:
    """The admin ports of its routers that are ready."""
    pods = [pod for pod in state["pods"] if pod.get("admin") and pod["ready"]]
    return [place(pod["admin"]) for pod in pods]


def running_state(name: str | None) -> Mapping[str, Any]:
    """What a PDCluster on this machine has written down; NothingToSee unless it is one."""
    from pd_operator.local.state import running, state_root

    states = [item for item in running(state_root()) if name in (None, item["name"])]
    if not states:
        here = "no PDCluster is running here; for one elsewhere give --url"
        raise NothingToSee(f"no PDCluster {name} is running" if name else here)
    if len(states) > 1:
        names = ", ".join(item["name"] for item in states)
        raise NothingToSee(f"several run here, name one: {names}")
    return states[0]
