"""`pdcluster status`: the columns of `kubectl get pdc`, for what runs on this machine."""

import sys
from datetime import UTC, datetime
from typing import Any

import click

from pd_cli import output as outputs


@click.command(name="status")
@click.argument("name", required=False)
@outputs.option
def command(name: str | None, output: str) -> None:
    """Show the PDClusters that run on this machine, and with a NAME its pods."""
    from pd_operator.local.state import running, state_root

    states = [item for item in running(state_root()) if name in (None, item["name"])]
    as_json = output == outputs.JSON
    if as_json:
        outputs.document(_document(states))
    if not states:
        if name or not as_json:
            named = f" {name}" if name else ""
            click.echo(f"no PDCluster{named} is running", err=as_json)
        sys.exit(outputs.FAILED if name else outputs.OK)
    if as_json:
        return
    click.echo(_clusters(states))
    for line in () if name else _why_not_ready(states):
        click.echo(line)
    for state in states:
        if why := state.get("refused"):
            click.echo(f"{state['name']}: {state['file']} has changed and isn't applied: {why}")
    if name:
        if page := states[0].get("live_page"):
            click.echo(f"\nlive page: {page}")
        click.echo("\n" + _conditions(states[0]))
        click.echo("\n" + _pods(states[0]["pods"]))


def _document(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Clusters with their objects, and the pods of all of them."""
    return {
        "clusters": [{k: v for k, v in state.items() if k != "pods"} for state in states],
        "pods": [{"cluster": state["name"], **pod} for state in states for pod in state["pods"]],
    }


def _clusters(states: list[dict[str, Any]]) -> str:
    from pd_operator.status import COLUMNS, columns

    now = datetime.now(UTC)
    rows = [columns(state["document"], now) for state in states]
    return _table([list(COLUMNS), *([row[name] for name in COLUMNS] for row in rows)])


def _conditions(state: dict[str, Any]) -> str:
    conditions = state["document"].get("status", {}).get("conditions", [])
    rows = [[one["type"], one["status"], one["reason"], one["message"]] for one in conditions]
    return _table([["CONDITION", "STATUS", "REASON", "MESSAGE"], *rows])


def _why_not_ready(states: list[dict[str, Any]]) -> list[str]:
    """A line for each cluster that isn't as it should be: its trouble, else what it waits for."""
    lines = []
    for state in states:
        conditions = state["document"].get("status", {}).get("conditions", [])
        by_type = {one["type"]: one for one in conditions}
        for kind, wrong in (("Degraded", "True"), ("Ready", "False")):
            one = by_type.get(kind, {})
            if one.get("status") == wrong:
                lines.append(f"{state['name']}: {one['reason']}: {one['message']}")
                break
    return lines


def _pods(pods: list[dict[str, Any]]) -> str:
    rows = [
        [
            pod["name"],
            "yes" if pod["ready"] and not pod["terminating"] else "no",
            str(pod["restarts"]),
            str(pod["pid"] or "-"),
            pod["ip"],
            pod["log"],
        ]
        for pod in pods
    ]
    return _table([["POD", "READY", "RESTARTS", "PID", "IP", "LOG"], *rows])


def _table(rows: list[list[str]]) -> str:
    """Columns of one width each, three spaces apart, as kubectl prints them."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
             for row in rows]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)
