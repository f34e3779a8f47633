"""Covers bench.all: which figures are kept, and what RESULTS.md says of them."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench import all as benches
from bench.common import Goal


def result(bench: str, **metrics: float | None) -> dict[str, Any]:
    context = {"cpu": "X", "cores": 2, "commit": "abc", "quick": False}
    return {"bench": bench, "metrics": metrics, "context": context, "day": "2026-01-02"}


@pytest.mark.parametrize("name", benches.BENCHES)
def test_each_bench_has_goals_and_runs(name: str) -> None:
    module = importlib.import_module(f"bench.{name}")
    assert all(isinstance(goal, Goal) for goal in module.GOALS.values())
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"bench.{name}.__main__")
    assert callable(module.main)


def test_a_new_run_replaces_the_old_one_alone() -> None:
    old = [result("kv", a=1.0), result("startup", ready_s=9.0)]
    found = benches.merged(old, [result("startup", ready_s=8.0), result("engine", b=2.0)])
    assert [one["bench"] for one in found] == ["engine", "kv", "startup"]
    assert found[2]["metrics"] == {"ready_s": 8.0}


def test_goals_are_held_against_figures() -> None:
    goals = {"kv": {"fast": Goal(">=", 0.6), "slow": Goal("<=", 5), "peer": Goal(">=", 1)}}
    text = benches.markdown([result("kv", fast=0.5, slow=4.0, peer=None, more=1234.5)], goals)
    assert "| `fast` | 0.5 | >= 0.6 | **missed** |" in text
    assert "| `slow` | 4 | <= 5 | met |" in text
    assert "| `peer` | not run | >= 1 |  |" in text
    assert "| `more` | 1,234.5 |  |  |" in text
    assert "2026-01-02, commit abc, 2 cores, X." in text


def test_a_log_ends_with_figures(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"a table\n{json.dumps(result('kv', a=1.0))}\n")
    assert benches.logged(log)["metrics"] == {"a": 1.0}


@pytest.mark.parametrize("last", ["", "Traceback", '{"bench": "no", "metrics": {}}', "[]"])
def test_other_logs_are_refused(tmp_path: Path, last: str) -> None:
    log = tmp_path / "log"
    log.write_text(last)
    with pytest.raises(ValueError, match="no bench's"):
        benches.logged(log)


def test_a_quick_run_is_not_kept(tmp_path: Path) -> None:
    quick = result("kv", a=1.0)
    quick["context"]["quick"] = True
    log = tmp_path / "log"
    log.write_text(json.dumps(quick))
    with pytest.raises(ValueError, match="no whole run"):
        benches.logged(log)
