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
@click.option("--live-page/--no-live-page", default=True, show_default=True,
              help="A page to watch and try it, on the router's admin port.")  # fmt: skip
def command(file: Path, port: int, live_page: bool) -> None:
    """Run a PDCluster on this machine, in the foreground.

    Prints "ready: URL" as soon as a request would succeed, and where the live page is.
    Edits of the file take effect while it runs. Ctrl-C ends everything; a second one ends
    it at once.
    """
    from pd_cli import session
    from pd_operator.local.cluster import Options
    from pd_operator.podparts import Settings

    settings = Settings(live_page=live_page)
    options = Options(port=port, file=str(file.resolve()), settings=settings)
    sys.exit(session.run(file, options))
