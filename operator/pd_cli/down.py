"""`pdcluster down`: end what `up` started, from another terminal."""

import os
import signal
import sys
import time
from contextlib import suppress

import click

from pd_cli import output as outputs

_WAIT_S = 30.0
_POLL_S = 0.1


@click.command(name="down")
@click.argument("name", required=False)
@outputs.option
def command(name: str | None, output: str) -> None:
    """End a PDCluster that runs on this machine, and wait until it is gone.

    NAME may be left out when only one runs.
    """
    from pd_operator.local.state import ProcessId, running, state_root

    as_json = output == outputs.JSON
    states = [item for item in running(state_root()) if name in (None, item["name"])]
    if not states:
        if as_json:
            outputs.document({"ended": []})
        if name or not as_json:
            named = f" {name}" if name else ""
            click.echo(f"no PDCluster{named} is running", err=as_json)
        sys.exit(outputs.FAILED if name else outputs.OK)
    if len(states) > 1:
        names = ", ".join(item["name"] for item in states)
        click.echo(f"several PDClusters are running: {names}; name one", err=True)
        sys.exit(1)
    state = states[0]
    owner = ProcessId(int(state["pid"]), str(state["pid_started"]))
    with suppress(ProcessLookupError):
        os.kill(owner.pid, signal.SIGTERM)
    deadline = time.monotonic() + _WAIT_S
    while owner.alive():
        if time.monotonic() > deadline:
            click.echo(f"{state['name']} (pid {owner.pid}) doesn't end", err=True)
            sys.exit(1)
        time.sleep(_POLL_S)
    if as_json:
        outputs.document({"ended": [state["name"]]})
    else:
        click.echo(f"{state['name']} is down")
