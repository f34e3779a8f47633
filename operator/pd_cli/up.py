"""`pdcluster up`: run a PDCluster on this machine until Ctrl-C."""

import sys
from pathlib import Path

import click


@click.command(name="up")
@click.option(
    "-f", "--file", required=True, type=click.Path(path_type=Path), help="PDCluster file."
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535),
              help="Port of the API on 127.0.0.1; 0 picks a free one.")  # fmt: skip
def command(file: Path, port: int) -> None:
    """Run a PDCluster on this machine, in the foreground.

    Prints "ready: URL" as soon as a request would succeed. Edits of the file take effect
    while it runs. Ctrl-C ends everything; a second one ends it at once.
    """
    from pd_cli import session
    from pd_operator.local.cluster import Options

    sys.exit(session.run(file, Options(port=port, file=str(file.resolve()))))
