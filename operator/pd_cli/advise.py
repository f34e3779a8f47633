"""`pdcluster advise`: whether to take prefill and decode apart, with the evidence."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pd_cli import output as outputs

if TYPE_CHECKING:
    from pd_sim.advice import Advice, Bursts, Way
    from pd_sim.trace import Trace

_BAD_INPUT = 2
_ANSWERS = {
    "yes": "Yes: take prefill and decode apart.",
    "chunks": "No: keep them together, with prompts in chunks.",
    "no": "No: keep them together; whole prompts do.",
}


@click.command(name="advise")
@click.option(
    "--trace", "trace_path", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Azure's CSV or Mooncake's JSON lines; its first requests count (--requests).",
)  # fmt: skip
@click.option("--prompt-tokens", default="500-2000", show_default=True, help="Without a trace.")
@click.option("--output-tokens", default="200", show_default=True, help="Without a trace.")
@click.option("--bursts", help="Without a trace: 10x16000-32000/60 are 10 such prompts at once, "
              "every 60 s, beside the others.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=4.0, show_default=True,
              help="Requests a second, without a trace.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=10), default=1000, show_default=True)
@click.option("--times", type=click.IntRange(1, 200), default=1, help="The trace's load, so often.")
@click.option("--model", required=True, help="A well-known name, as in `pdcluster estimate`.")
@click.option("--gpu", default="h100", show_default=True)
@click.option("--gpus", type=click.IntRange(min=1), required=True, help="All that there are.")
@click.option("--gpus-per-worker", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--link", default="rdma-400g", show_default=True, help="A name or a rate.")
@click.option("--ttft", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True,
              help="Seconds.")  # fmt: skip
@click.option("--tpot", type=click.FloatRange(0, min_open=True), default=0.05, show_default=True,
              help="Seconds.")  # fmt: skip
@click.option("--small-team", is_flag=True, help="Nobody has time for two pools.")
@outputs.option
def command(
    trace_path: Path | None,
    prompt_tokens: str,
    output_tokens: str,
    bursts: str | None,
    rate: float,
    requests: int,
    times: int,
    model: str,
    gpu: str,
    gpus: int,
    gpus_per_worker: int,
    link: str,
    ttft: float,
    tpot: float,
    small_team: bool,
    output: str,
) -> None:
    """Should these requests be served by prefill and decode workers apart?

    Simulates three ways to use the same GPUs, each at its best setting. Engines are models
    from data sheets (docs/simulation.md).
    """
    from pd_core import estimate
    from pd_sim import advice, scalers, scenario, trace

    try:
        if trace_path is not None:
            with trace_path.open(encoding="utf-8") as lines:
                found = trace.faster(trace.read(lines), times).head(requests)
        else:
            spans = _span(prompt_tokens), _span(output_tokens)
            found = advice.made_up(*spans, rate, requests, _bursts(bursts))
        said = {"model": model, "gpu": gpu, "gpusPerWorker": gpus_per_worker}
        asked = advice.Question(
            found,
            scenario.engine_perf(said, ()),
            estimate.link(link),
            gpus // gpus_per_worker,
            scalers.Goal(ttft, tpot),
            small_team,
        )
    except (OSError, ValueError) as error:
        click.echo(str(error), err=True)
        sys.exit(_BAD_INPUT)
    if asked.workers < 1:
        click.echo(f"{gpus} GPUs make no worker of {gpus_per_worker}", err=True)
        sys.exit(_BAD_INPUT)
    made = advice.advise(asked)
    if output == "json":
        click.echo(json.dumps(_document(made)))
        return
    for line in _text(made, found, gpus_per_worker):
        click.echo(line)


def _bursts(text: str | None) -> "Bursts | None":
    from pd_sim.advice import Bursts

    if text is None:
        return None
    match = re.fullmatch(r"(\d+)x([\d-]+)/(\d+)", text)
    if not match or not (int(match[1]) and int(match[3])):
        raise ValueError(f"{text!r}: like 10x16000-32000/60")
    return Bursts(int(match[1]), _span(match[2]), float(match[3]))


def _span(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"{text!r}: a number of tokens, or two like 100-200")
    return low, high


def _text(made: "Advice", trace: "Trace", gpus_each: int) -> list[str]:
    lines = [_ANSWERS[made.answer], *(f"  - {reason}" for reason in made.reasons), ""]
    lines.append(f"{'':8} {'in time':>8} {'GPUs for 99%':>13} {'TPOT p99':>9} {'ITL p99':>9}  at")
    for way in made.ways:
        needs = str(way.needs * gpus_each) if way.needs else "more"
        tpot, gap = (values.get("p99", 0.0) for values in (way.result.tpot_s, way.result.itl_s))
        lines.append(
            f"{way.name:8} {way.attainment:>8.1%} {needs:>13} {tpot * 1000:>6.0f} ms "
            f"{gap * 1000:>6.0f} ms  {way.setting}"
        )
    lines.append(f"{len(trace.requests):,} requests over {trace.seconds:,.0f} s")
    return lines


def _document(made: "Advice") -> dict[str, object]:
    return {
        "answer": made.answer,
        "reasons": list(made.reasons),
        "exposed_s": made.exposed_s,
        "one_dies": dict(zip(("apart", "together"), made.failure_attainment, strict=True)),
        "ways": {way.name: _way(way) for way in made.ways},
    }


def _way(way: "Way") -> dict[str, object]:
    return {"workers_for_99": way.needs, "setting": way.setting, "in_time": way.attainment}
