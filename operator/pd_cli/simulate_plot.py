"""The picture of a simulation: arrivals, latencies and the pools' sizes over time."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from pd_sim.scalers import Goal
from pd_sim.simulation import Result

_SLOT_S = 60.0


def draw(result: Result, goal: Goal, path: Path) -> None:
    figure, (load, late, sizes) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 7))
    minutes: dict[int, list[float]] = {}
    for outcome in result.outcomes:
        waited = outcome.ttft_s if outcome.ttft_s is not None else float("nan")
        minutes.setdefault(int(outcome.at_s // _SLOT_S), []).append(waited)
    at = sorted(minutes)
    # A line through one minute is nothing that one could see.
    mark = "." if len(at) == 1 else ""
    load.plot(at, [len(minutes[one]) / _SLOT_S for one in at], marker=mark)
    load.set_ylabel("requests/s")
    slowest = [sorted(minutes[one])[int(len(minutes[one]) * 0.99)] for one in at]
    late.plot(at, slowest, marker=mark)
    late.axhline(goal.ttft_s, linestyle=":", color="black")
    late.set_ylabel("TTFT p99, s")
    when = [one.at_s / _SLOT_S for one in result.sizes]
    when.append(max([when[-1], *(minute + 1 for minute in at)]))
    steps = [*result.sizes, result.sizes[-1]]  # the last one holds until the end
    for role in steps[0].asked:
        sizes.step(when, [one.serving[role] for one in steps], where="post", label=str(role))
        asked = [one.asked[role] for one in steps]
        sizes.step(when, asked, where="post", linestyle=":", color="gray")
    sizes.set_ylabel("workers (dotted: asked)")
    sizes.set_xlabel("minutes")
    sizes.legend()
    figure.suptitle(f"{result.attainment:.2%} within both targets, {result.gpu_hours:,.1f} GPU-h")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
