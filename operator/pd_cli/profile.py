"""`pdcluster profile`: how fast a running PDCluster's workers are, as a file for simulations."""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pd_cli import output as outputs

if TYPE_CHECKING:
    from pd_cli.profiling import Target

_API_PORT = 8000


@click.command(name="profile")
@click.argument("name", required=False)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False),
              help="The file to write; json prints it instead.")  # fmt: skip
@click.option("--url", help="Of the API, where it runs elsewhere: http://localhost:8000.")
@click.option("--admin", help="With --url: a router's admin port, http://localhost:9090.")
@click.option("--api-key", envvar="PDCLUSTER_API_KEY", default="", help="Where keys are wanted.")
@click.option("--quick", is_flag=True, help="Fewer lengths and batches, each once.")
def command(
    name: str | None, output: Path, url: str | None, admin: str | None, api_key: str, quick: bool
) -> None:
    """Measure a running PDCluster of one prefill and one decode worker, or of one worker that
    does both, for `pdcluster simulate` (spec.profile of its Simulation).

    It takes some minutes, in which nobody else should ask. Decode steps are measured with the
    guesses that the workers make (engine.speculation). NAME may be left out when only one runs
    on this machine.
    """
    from pd_cli import chat, profiling, top
    from pd_sim import profile

    to_stdout = str(output) == outputs.JSON
    tell = partial(click.echo, err=to_stdout)
    plan = profiling.Plan()
    if quick:
        plan = profiling.Plan(
            prompts=(64, 256, 512), repeats=1, batches=(1, 2, 4), long_batches=(1,)
        )
    try:
        target = _target(name, url, admin, api_key)
        found = asyncio.run(profiling.measure(target, plan, tell))
        perf = profile.perf(profile.read(found.document()))
    except (
        top.NothingToSee, profiling.NotProfiled, chat.ChatFailed, profile.BadProfile,
        TimeoutError,
    ) as error:  # fmt: skip
        click.echo(str(error) or "an answer took too long", err=True)
        sys.exit(1)
    if to_stdout:
        outputs.document(found.document())
        return
    output.write_text(json.dumps(found.document(), indent=1) + "\n")
    longest = found.prompts[-1].tokens
    click.echo(
        f"{output}: {longest / perf.prompt_s(longest):,.0f} prompt tokens a second, "
        f"{perf.step_s(1, 0) * 1000:,.1f} ms a step"
    )


def _target(name: str | None, url: str | None, admin: str | None, key: str) -> "Target":
    from pd_cli import top
    from pd_cli.profiling import NotProfiled, Target

    if (url is None) != (admin is None):
        raise NotProfiled("--url and --admin belong together")
    if url is not None and admin is not None:
        return Target(top.place(url, _API_PORT), [top.place(admin)], key)
    state = top.running_state(name)
    return Target(top.place(state["url"], _API_PORT), top.admins(state), key)
