"""`pdcluster logs`: what a pod's container has said."""

import sys
from pathlib import Path

import click


@click.command(name="logs")
@click.argument("pod")
def command(pod: str) -> None:
    """Print the log of a POD (its name, or the beginning of it)."""
    from pd_operator.local.state import running, state_root

    pods = [item for state in running(state_root()) for item in state["pods"]]
    found = [item for item in pods if item["name"].startswith(pod)]
    if not found:
        names = ", ".join(item["name"] for item in pods)
        click.echo(f"no pod {pod} is running" + (f"; there are {names}" if names else ""), err=True)
        sys.exit(1)
    for item in found:
        if len(found) > 1:
            click.echo(f"==> {item['name']} <==")
        path = Path(item["log"])
        click.echo(path.read_text(errors="replace") if path.exists() else "", nl=False)
