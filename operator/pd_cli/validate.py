"""`pdcluster validate`: everything that is wrong with a PDCluster file, at once."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pd_cli import output as outputs

if TYPE_CHECKING:
    from pd_operator.fields import FieldError


@click.command(name="validate")
@click.option(
    "-f", "--file", required=True, type=click.Path(path_type=Path), help="PDCluster file."
)
@outputs.option
def command(file: Path, output: str) -> None:
    """Check a PDCluster file. Exit code 2 when something is wrong with it.

    What is right for Kubernetes is right here; that this machine can't run it is a note, as is
    what may not be meant.
    """
    from pd_cli import document, session
    from pd_operator import api
    from pd_operator.local import support

    found: dict[str, Any] = {"file": str(file), "name": None, "valid": False}
    try:
        cluster = api.parse(document.load(file))
    except document.BadFile as error:
        _refuse(output, found, [{"path": "", "problem": str(error), "remedy": ""}], [str(error)])
    except api.InvalidCluster as error:
        lines = [f"{file}: {one}" for one in error.errors]
        _refuse(output, found, _plain(error.errors), lines)
    doubts = api.doubts(cluster)
    idle = support.notes(cluster)
    lines = [f"{file}: note: {one}" for one in (*doubts, *idle)]
    lacking: Sequence[FieldError] = ()
    try:
        session.check_here(cluster)
    except api.InvalidCluster as error:
        lacking = error.errors
        lines += [f"{file}: this machine can't run it: {one}" for one in lacking]
    if output == outputs.JSON:
        found |= {"name": cluster.name, "valid": True, "errors": []}
        outputs.document(
            {**found, "notes": _plain([*doubts, *idle]), "lackingHere": _plain(lacking)}
        )
        return
    click.echo(f"{file}: PDCluster {cluster.name} is valid")
    for line in lines:
        click.echo(line, err=True)


def _plain(errors: "Sequence[FieldError]") -> list[dict[str, str]]:
    return [{"path": one.path, "problem": one.problem, "remedy": one.remedy} for one in errors]


def _refuse(
    output: str, found: dict[str, Any], errors: list[dict[str, str]], lines: list[str]
) -> NoReturn:
    if output == outputs.JSON:
        outputs.document({**found, "errors": errors, "notes": [], "lackingHere": []})
    else:
        for line in lines:
            click.echo(line, err=True)
    sys.exit(outputs.BAD_INPUT)
