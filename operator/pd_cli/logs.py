"""`pdcluster logs`: what a pod's container has said."""

import glob
import sys
from pathlib import Path

import click


@click.command(name="logs")
@click.argument("pod")
def command(pod: str) -> None:
    """Print the log of a POD (its name, or the beginning of it)."""
    from pd_operator.local.state import running, state_root

    pods = [item for state in running(state_root()) for item in state["pods"]]
    found = [Path(item["log"]) for item in pods if item["name"].startswith(pod)]
    if not found:  # ended, maybe with its cluster: that's when a log is wanted most
        found = sorted(state_root().glob(f"*/logs/{glob.escape(pod)}*.log"))
    if not found:
        names = ", ".join(item["name"] for item in pods)
        hint = f"; there are {names}" if names else ""
        click.echo(f"no pod {pod} is running or has left a log{hint}", err=True)
        sys.exit(1)
    for path in found:
        if len(found) > 1:
            click.echo(f"==> {path.stem} <==")
        click.echo(path.read_text(errors="replace") if path.exists() else "", nl=False)
