"""`pdcluster explain`: why pools have the sizes that they have."""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from pd_cli import output as outputs

if TYPE_CHECKING:
    from pd_operator.scaling.explaining import Told
    from pd_operator.scaling.recording import Replayed


@click.command(name="explain")
@click.argument("name", required=False)
@click.option(
    "-f", "--file", type=click.File(encoding="utf-8", errors="replace"),
    help="An operator's log (- is stdin), instead of what `pdcluster up` keeps.",
)  # fmt: skip
@click.option(
    "--replay", type=click.File(encoding="utf-8"),
    help="What the operator's --record-scaling wrote: decides it all again.",
)  # fmt: skip
@click.option("--last", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="So many decisions of each pool.")  # fmt: skip
@outputs.option
def command(
    name: str | None, file: TextIO | None, replay: TextIO | None, last: int, output: str
) -> None:
    """Say why the pools of the PDCluster NAME have the sizes that they have.

    For a cluster on Kubernetes:
    kubectl logs -n pdcluster-system deployment/pdcluster | pdcluster explain NAME -f -
    """
    if replay is not None:
        _replay(replay, name, output)
        return
    if name is None:
        raise click.UsageError("a NAME is needed")
    say(list(file) if file is not None else _kept(name), name, last, output)


def say(said: Iterable[str], name: str, last: int, output: str) -> None:
    """Prints the last decisions about NAME that these lines hold; ends with 1 without any."""
    found = _of(said, name)
    if not found:
        why = "only pools with scaling.mode SLO have any, from their first look at the load on"
        click.echo(f"no decision about {name}: {why}", err=True)
        sys.exit(1)
    _print(found, last, output)


def _kept(name: str) -> list[str]:
    from pd_operator import journal
    from pd_operator.local.state import DECISIONS, state_root

    return journal.lines(state_root() / name / "logs" / DECISIONS)


def _of(said: Iterable[str], name: str) -> "list[Told]":
    """NAME may say its namespace: `team/chat`."""
    from pd_operator.scaling import explaining

    told = (explaining.read(text) for text in said)
    return [one for one in told if one and name in (one.cluster, one.cluster.rpartition("/")[2])]


def _print(found: "list[Told]", last: int, output: str) -> None:
    from pd_operator.scaling import explaining

    pools = dict.fromkeys(one.pool for one in found)
    newest = {pool: [one for one in found if one.pool == pool][-last:] for pool in pools}
    if output == "json":
        for one in found:
            if one in newest[one.pool]:
                click.echo(explaining.line(one))
        return
    for number, (pool, some) in enumerate(newest.items()):
        click.echo(("\n" if number else "") + f"{some[-1].cluster}: {pool}, {some[-1].after}")
        for one in some:
            for sentence in explaining.sentences(one):
                click.echo(sentence)


def _replay(file: TextIO, name: str | None, output: str) -> None:
    """Every change of a size, and whether all looks gave what was recorded."""
    from pd_operator.scaling import recording

    count = different = 0
    changes: list[dict[str, Any]] = []
    try:
        lines = (json.loads(text) for text in file if text.strip())
        for one in recording.replay(lines):
            if name is not None and name not in one.look.cluster.split("/"):
                continue
            count += 1
            different += not one.same
            for change in _changes(one):
                changes.append(change)
                if output != outputs.JSON:
                    click.echo(_CHANGE.format(**change))
    except (ValueError, recording.BadRecording) as error:
        click.echo(f"{file.name}: {error}", err=True)
        sys.exit(outputs.BAD_INPUT)
    if output == outputs.JSON:
        outputs.document({"looks": count, "different": different, "changes": changes})
    else:
        click.echo(f"{count} looks, {different} of them decided otherwise than recorded")
    sys.exit(outputs.FAILED if different or not count else outputs.OK)


_CHANGE = "{at_s:.0f} s  {pool} from {before} to {after}: {reason}: {message}"


def _changes(one: "Replayed") -> Iterator[dict[str, Any]]:
    from pd_operator.scaling.types import Scale

    for role, decision in one.decisions.items():
        if isinstance(decision, Scale):
            pool = one.look.spec.pool(role)
            yield {
                "cluster": one.look.cluster,
                "at_s": one.look.now,
                "pool": role,
                "before": pool.replicas if pool else 0,
                "after": decision.replicas,
                "reason": decision.reason,
                "message": decision.message,
            }
