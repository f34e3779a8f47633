"""Runs all benches one after the other and writes bench/RESULTS.md from their last lines.

With --quick only the screen shows the figures: they are not worth keeping.
"""

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.common import ROOT, Goals, arguments

BENCHES = ("engine", "identity", "interference", "operator", "policies", "startup")
RESULTS = ROOT / "bench" / "RESULTS.md"


def run(name: str, quick: bool) -> dict[str, Any] | None:
    """Runs a bench, shows what it prints, returns its last line; None when it failed."""
    command = [sys.executable, "-m", f"bench.{name}", *(["--quick"] if quick else [])]
    last = ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    if process.returncode != 0:
        return None
    result: dict[str, Any] = json.loads(last)
    return result


def markdown(results: Sequence[dict[str, Any]], seconds: dict[str, float], day: str) -> str:
    """RESULTS.md: a table of figures and goals, and what they were measured on."""
    about = results[0]["context"]
    lines = [
        "# Results",
        "",
        "Written by `make bench`. Figures without a unit in their name are ratios against a "
        "peer or a limit measured in the same run.",
        "",
        f"{day}, commit {about['commit']}, {about['cores']} cores, {about['cpu']}.",
        "",
        "| bench | figure | value | goal | |",
        "|---|---|---:|---:|---|",
    ]
    for result in results:
        goals: Goals = importlib.import_module(f"bench.{result['bench']}").GOALS
        for key, value in result["metrics"].items():
            goal = goals.get(key)
            met = goal.met(value) if goal else None
            verdict = {True: "met", False: "**missed**", None: ""}[met]
            shown = "not run" if value is None else f"{value:,g}"
            lines.append(f"| {result['bench']} | `{key}` | {shown} | {goal or ''} | {verdict} |")
    took = ", ".join(f"{name} {duration:.0f} s" for name, duration in seconds.items())
    return "\n".join([*lines, "", f"The runs took: {took}.", ""])


def main(quick: bool) -> int:
    results, seconds, failed = [], {}, []
    for name in BENCHES:
        print(f"\n== {name}", flush=True)
        started = time.monotonic()
        result = run(name, quick)
        seconds[name] = time.monotonic() - started
        if result is None:
            failed.append(name)
        else:
            results.append(result)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    if not quick:
        RESULTS.write_text(markdown(results, seconds, time.strftime("%Y-%m-%d")))
        print(f"written: {RESULTS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(arguments(__doc__)))
