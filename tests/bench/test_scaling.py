"""Covers bench.scaling and what it keeps: figures of cells, runs that aren't made again, runs
that are given up."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench import scaling, scaling_kept
from bench.days import day
from bench.scaling_kept import Kept, code_hash, is_kept, once
from pd_sim.scalers import Fixed
from pd_sim.simulation import run
from tests.pd_sim.rig import evenly, pair

GOOD = Kept(0.995, 0.997, 0.998, 50.0, 4)
MODULE = "bench.rivals.windows"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scaling_kept, "FOLDER", tmp_path / "kept")
    return tmp_path / "kept"


def test_the_worst_cell_counts_and_only_those_who_reach_the_attainment() -> None:
    cells: dict[str, dict[str, Kept | None]] = {
        "a": {
            "ours": GOOD,
            "keda": replace(GOOD, gpu_hours=80.0),
            "hpa_queue": replace(GOOD, gpu_hours=10.0, attainment=0.98),
            "kpa": replace(GOOD, gpu_hours=10.0, whole=False),
            "best_fixed": replace(GOOD, gpu_hours=40.0),
            "clairvoyant": replace(GOOD, gpu_hours=5.0),
        },
        "b": {"ours": replace(GOOD, attainment=0.991), "best_fixed": None},
    }
    found = scaling.figures({"a": (cells["a"], 40.0), "b": (cells["b"], 25.0)})
    assert found["gpu_hours_vs_best_rival"] == found["gpu_hours_vs_best_rival_a"] == 50 / 40
    assert found["gpu_hours_vs_best_autoscaler_a"] == 50 / 80
    assert found["gpu_hours_vs_best_rival_b"] is None
    assert found["gpu_hours_vs_optimum"] == 2.0
    assert found["attainment"] == 0.991
    assert found["runs_missing"] == 10 - 6 + 10 - 2


def test_a_run_is_made_once() -> None:
    sized = replace(GOOD, fill=0.5, sizes=((0.0, 1, 2), (5.0, 2, 2)))
    made: list[str] = []

    def make() -> Kept:
        made.append("run")
        return sized

    assert once("a", "kpa", MODULE, make) == sized
    assert once("a", "kpa", MODULE, make) == sized
    assert made == ["run"]
    assert is_kept("a", "kpa", MODULE)
    assert not is_kept("a", "keda", MODULE)


def test_it_is_made_again_after_a_change_and_where_what_is_kept_is_torn(folder: Path) -> None:
    assert once("a", "kpa", MODULE, lambda: GOOD) == GOOD
    other = replace(GOOD, gpu_hours=1.0)
    file = folder / "a-kpa.json"
    file.write_text(file.read_text().replace(code_hash(MODULE), "before"))
    assert once("a", "kpa", MODULE, lambda: other) == other
    file.write_text('{"code":')
    assert once("a", "kpa", MODULE, lambda: None) is None
    assert once("a", "kpa", MODULE, lambda: GOOD) is None


def test_a_hash_is_of_what_a_policy_uses() -> None:
    assert code_hash(MODULE) == code_hash(MODULE)
    assert (
        len({code_hash(MODULE), code_hash("bench.rivals.hpa"), code_hash("pd_operator.scaling")})
        == 3
    )


def test_words_about_code_are_not_code() -> None:
    plain = "def one():\n    return 1\n"
    told = '"""Of a module."""\n\ndef one():\n    """Says."""  # and more\n    return 1\n'
    assert scaling_kept._code(plain) == scaling_kept._code(told)
    assert scaling_kept._code(plain) != scaling_kept._code(plain.replace("1", "2"))
    ours = "class Slo:\n    pass\n"
    assert scaling_kept._code(ours + plain, ("Slo",)) == scaling_kept._code(plain)


def test_a_run_that_cannot_reach_its_goal_is_given_up() -> None:
    """A prompt takes a tenth of a second, and thirty come in one: one worker never keeps up."""
    trace = evenly(30, 200)
    whole = run(pair(), trace, Fixed())
    given_up = run(pair(), trace, Fixed(), most_late=100)
    assert whole.whole
    assert not given_up.whole
    assert given_up.requests < whole.requests
    assert run(pair(), evenly(4, 200), Fixed(), most_late=10).whole


def test_a_day_is_the_hour_thinned() -> None:
    made = day(evenly(1, 3600))
    night = sum(3 * 3600 <= one.at_s < 5 * 3600 for one in made.requests)
    afternoon = sum(15 * 3600 <= one.at_s < 17 * 3600 for one in made.requests)
    assert 0.2 < night / 7200 < 0.4
    assert 0.95 < afternoon / 7200 <= 1.0
    assert made == day(evenly(1, 3600))
