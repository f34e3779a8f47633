"""Runs benches one after the other and writes bench/RESULTS.md from their last lines.

    python -m bench.all [--quick] [NAME ...]
    python -m bench.all --log FILE ...

Without names all are run. What was measured before stays in bench/results.jsonl until its
bench is run again. With --quick only the screen shows the figures: they are not worth
keeping. `--log` takes the figures of whole runs whose output was kept.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.common import ROOT, Goals

BENCHES = (
    "engine", "identity", "interference", "kv", "kvquality", "operator", "peers", "policies",
    "router", "scaling", "simfit", "soak", "speculation", "startup", "transfer", "turns",
)  # fmt: skip
KEPT = ROOT / "bench" / "results.jsonl"
RESULTS = ROOT / "bench" / "RESULTS.md"

Result = dict[str, Any]


def run(name: str, quick: bool) -> Result | None:
    """Runs a bench, shows what it prints, returns its last line; None when it failed."""
    command = [sys.executable, "-m", f"bench.{name}", *(["--quick"] if quick else [])]
    last, started = "", time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line
    if process.returncode != 0:
        return None
    return dated(json.loads(last)) | {"seconds": round(time.monotonic() - started)}


def dated(result: Result) -> Result:
    return result | {"day": time.strftime("%Y-%m-%d")}


def logged(file: Path) -> Result:
    """The figures of a whole run by its output. ValueError when it has none."""
    lines = file.read_text().splitlines()
    try:
        result: Result = json.loads(lines[-1])
        if result["bench"] not in BENCHES or result["context"]["quick"] or not result["metrics"]:
            raise ValueError("no whole run of a bench")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: its last line is no bench's: {error}") from error
    return dated(result)


def merged(kept: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """The newest of each bench, by name."""
    by_name = {result["bench"]: result for result in (*kept, *new)}
    return [by_name[name] for name in sorted(by_name)]


def markdown(results: Iterable[Result], goals: Mapping[str, Goals]) -> str:
    """RESULTS.md: for each bench what it was measured on, its figures and goals."""
    lines = [
        "# Results",
        "",
        "Written by `make bench`, or by `python -m bench.all NAME` for one. Figures without a "
        "unit in their name are ratios against a peer or a limit measured in the same run; what "
        "a bench does stands at the top of its module.",
    ]
    for result in results:
        name, about = result["bench"], result["context"]
        took = f", {result['seconds']:,} s" if "seconds" in result else ""
        lines += [
            "",
            f"## {name}",
            "",
            f"`python -m bench.{name}`, {result['day']}, commit {about['commit']}, "
            f"{about['cores']} cores, {about['cpu']}{took}.",
            "",
            "| figure | value | goal | |",
            "|---|---:|---:|---|",
        ]
        for key, value in result["metrics"].items():
            goal = goals[name].get(key)
            met = goal.met(value) if goal else None
            verdict = {True: "met", False: "**missed**", None: ""}[met]
            shown = "not run" if value is None else f"{value:,g}"
            lines.append(f"| `{key}` | {shown} | {goal or ''} | {verdict} |")
        if notes := result.get("notes"):
            lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join([*lines, ""])


def keep(new: Iterable[Result]) -> None:
    old = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    results = merged(old, new)
    goals = {
        one["bench"]: importlib.import_module(f"bench.{one['bench']}").GOALS for one in results
    }
    KEPT.write_text("".join(json.dumps(one) + "\n" for one in results))
    RESULTS.write_text(markdown(results, goals))
    print(f"written: {RESULTS.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHES))
    parser.add_argument("--quick", action="store_true", help="shows only that the benches work")
    parser.add_argument("--log", nargs="+", type=Path, metavar="FILE", default=[])
    given = parser.parse_args()
    if unknown := set(given.names) - set(BENCHES):
        parser.error(f"no bench is called {', '.join(sorted(unknown))}")
    if given.log:
        keep([logged(file) for file in given.log])
        return 0
    results, failed = [], []
    for name in given.names or BENCHES:
        print(f"\n== {name}", flush=True)
        result = run(name, given.quick)
        if result is None:
            failed.append(name)
        else:
            results.append(result)
    if results and not given.quick:
        keep(results)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
