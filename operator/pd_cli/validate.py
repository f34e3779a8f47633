"""`pdcluster validate`: everything that is wrong with a PDCluster file, at once."""

import sys
from pathlib import Path

import click

_BAD_FILE = 2


@click.command(name="validate")
@click.option(
    "-f", "--file", required=True, type=click.Path(path_type=Path), help="PDCluster file."
)
def command(file: Path) -> None:
    """Check a PDCluster file. Exit code 2 when something is wrong with it.

    What is right for Kubernetes is right here; that this machine can't run it is a note, as is
    what may not be meant.
    """
    from pd_cli import document, session
    from pd_operator import api

    try:
        cluster = api.parse(document.load(file))
    except document.BadFile as error:
        click.echo(str(error), err=True)
        sys.exit(_BAD_FILE)
    except api.InvalidCluster as error:
        for one in error.errors:
            click.echo(f"{file}: {one}", err=True)
        sys.exit(_BAD_FILE)
    click.echo(f"{file}: PDCluster {cluster.name} is valid")
    for one in api.doubts(cluster):
        click.echo(f"{file}: note: {one}", err=True)
    try:
        session.check_here(cluster)
    except api.InvalidCluster as error:
        for one in error.errors:
            click.echo(f"{file}: this machine can't run it: {one}", err=True)
