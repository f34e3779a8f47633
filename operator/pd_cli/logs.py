"""`pdcluster logs`: what a pod's container has said."""

import glob
import sys
from pathlib import Path

import click

from pd_cli import output as outputs


@click.command(name="logs")
@click.argument("pod")
@outputs.option
def command(pod: str, output: str) -> None:
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
    texts = [(one, one.read_text(errors="replace") if one.exists() else "") for one in found]
    if output == outputs.JSON:
        logs = [{"pod": one.stem, "log": str(one), "text": text} for one, text in texts]
        outputs.document({"logs": logs})
        return
    for path, text in texts:
        if len(texts) > 1:
            click.echo(f"==> {path.stem} <==")
        click.echo(text, nl=False)
