"""`pdcluster down`: end what `up` started, from another terminal."""

import os
import signal
import sys
import time
from contextlib import suppress

import click

_WAIT_S = 30.0
_POLL_S = 0.1


@click.command(name="down")
@click.argument("name", required=False)
def command(name: str | None) -> None:
    """End a PDCluster that runs on this machine, and wait until it is gone.

    NAME may be left out when only one runs.
    """
    from pd_operator.local.state import ProcessId, running, state_root

    states = [item for item in running(state_root()) if name in (None, item["name"])]
    if not states:
        click.echo(f"no PDCluster {name} is running" if name else "no PDCluster is running")
        sys.exit(1 if name else 0)
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
    click.echo(f"{state['name']} is down")
