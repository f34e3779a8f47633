"""`pdcluster simulate`: a recorded day of requests through a cluster that nobody pays for."""

import csv
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pd_cli import output as outputs

if TYPE_CHECKING:
    from pd_sim.simulation import Plan, Result
    from pd_sim.trace import Trace

_BAD_INPUT = 2


@click.command(name="simulate")
@click.option(
    "--trace",
    "trace_path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Azure's CSV or Mooncake's JSON lines.",
)
@click.option(
    "--cluster",
    "cluster_path",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A PDCluster and a Simulation document (examples/simulate.yaml).",
)
@click.option(
    "--policy",
    type=click.Choice(("slo", "fixed")),
    default="slo",
    show_default=True,
    help="Who decides sizes: the operator's own decision, or nobody.",
)
@click.option("--times", type=click.IntRange(1, 200), default=1, help="The trace's load, so often.")
@click.option("--requests", type=click.IntRange(min=1), help="Only so many.")
@outputs.option
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="A picture's file.")
def command(
    trace_path: Path,
    cluster_path: Path,
    policy: str,
    times: int,
    requests: int | None,
    output: str,
    plot: Path | None,
) -> None:
    """Simulate a trace: what users would get, and what it would cost.

    The router's policy and admission and the operator's scaling decisions are the very code
    that serves; engines are models of their speed.
    """
    from pd_sim import scalers, simulation, trace

    plan = load_plan(cluster_path)
    try:
        with trace_path.open(encoding="utf-8") as lines:
            found = trace.read(lines)
    except (OSError, UnicodeDecodeError, trace.BadTrace) as error:
        _refuse(f"{trace_path}: {error}")
    found = trace.faster(found, times)
    if requests is not None:
        found = found.head(requests)
    scaler: scalers.Scaler = scalers.Fixed()
    if policy == "slo":
        scaler = scalers.Slo(plan.pools, plan.goal)
    began = time.monotonic()
    result = simulation.run(plan, found, scaler)
    took_s = time.monotonic() - began
    if output == "json":
        click.echo(json.dumps({**result.document(), "policy": policy}))
    else:
        for line in _text(plan, found, result, took_s):
            click.echo(line)
    if plot is not None:
        _plot(result, plan, plot)


def load_plan(path: Path) -> "Plan":
    """Both documents of a cluster file; ends the command with what is wrong."""
    import yaml

    from pd_operator import api
    from pd_sim import profile, scenario

    try:
        documents = [one for one in yaml.safe_load_all(path.read_text("utf-8")) if one is not None]
        cluster, spec = scenario.split(documents)
        known = {
            name: profile.read(json.loads((path.parent / name).read_text("utf-8")))
            for name in scenario.profile_names(spec)
        }
        return scenario.plan(api.parse(cluster), spec, _measured(path, spec), known)
    except (
        OSError, UnicodeDecodeError, yaml.YAMLError, json.JSONDecodeError,
        scenario.BadScenario, profile.BadProfile,
    ) as error:  # fmt: skip
        _refuse(f"{path}: {error}")
    except api.InvalidCluster as error:
        _refuse("\n".join(f"{path}: {one}" for one in error.errors))
    raise AssertionError("unreachable")


def _measured(path: Path, spec: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table that `measured` names, beside the cluster's file."""
    name = spec.get("measured")
    if name is None:
        return []
    with (path.parent / str(name)).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _text(plan: "Plan", trace: "Trace", result: "Result", took_s: float) -> list[str]:
    goal = plan.goal
    lines = [f"{pool.role}: {pool.perf.name} ({pool.perf.note})" for pool in plan.pools]
    lines += [
        f"{result.requests:,} requests over {trace.seconds / 60:,.0f} min, in {took_s:,.1f} s",
        f"within TTFT {goal.ttft_s:g} s and TPOT {goal.tpot_s * 1000:g} ms: "
        f"{result.attainment:.2%} (TTFT {result.ttft_attainment:.2%}, "
        f"TPOT {result.tpot_attainment:.2%})",
        f"{result.gpu_hours:,.2f} GPU-hours, {result.changes} changes of size",
    ]
    for name, values, unit in (("TTFT", result.ttft_s, 1.0), ("TPOT", result.tpot_s, 1000.0)):
        shown = ", ".join(f"{key} {value * unit:.3g}" for key, value in values.items())
        lines.append(f"{name} in {'s' if unit == 1 else 'ms'}: {shown}")
    return lines


def _plot(result: "Result", plan: "Plan", path: Path) -> None:
    try:
        from pd_cli import simulate_plot
    except ImportError:
        _refuse("--plot needs matplotlib: pip install matplotlib")
    simulate_plot.draw(result, plan.goal, path)


def _refuse(message: str) -> None:
    click.echo(message, err=True)
    sys.exit(_BAD_INPUT)
