"""Covers fuzzing itself: inputs that once went wrong stay right, seeds are taken, and each
target is fuzzed for a while.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.fuzz import targets
from tests.fuzz.__main__ import run
from tests.fuzz.aloop import joined, pieces
from tests.fuzz.corpus import CORPUS, files

_FILES = [(name, file) for name in targets.NAMES for file in files(name)]


@pytest.mark.parametrize(
    ("name", "file"), _FILES, ids=lambda value: str(getattr(value, "name", value))
)
def test_what_once_went_wrong_is_right(name: str, file: Path) -> None:
    targets.load(name).one(file.read_bytes())


@pytest.mark.parametrize("name", targets.NAMES)
def test_each_target_takes_its_seeds_and_nothing_at_all(name: str) -> None:
    target = targets.load(name)
    assert target.PACKAGES
    assert all(0 < len(word) < 64 for word in target.WORDS)
    for seed in [b"", b"\0", *target.seeds()]:
        target.one(seed)


def test_seeds_get_to_the_heart_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all inputs are turned away at the door, nothing is fuzzed."""
    from tests.fuzz.targets import engine, kvplane, workers
    from tests.pd_router.rig import Recorder

    for seed in kvplane.seeds()[:2]:  # from a sender like it, and from another kind
        kvplane.one(seed)
        assert kvplane._worker().told.names(kvplane._KEY) == ["committed"]

    runner = engine._engine("decode").runner
    before = runner.steps
    engine.one(engine.seeds()[0])
    assert runner.steps > before

    made: list[Recorder] = []
    monkeypatch.setattr(workers, "Recorder", lambda: made.append(Recorder()) or made[-1])
    workers.one(workers.seeds()[0])
    assert made[0].done


def test_the_corpus_is_that_of_targets() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} <= set(targets.NAMES)


def test_pieces_are_found_again() -> None:
    parts = [b"", b"a", bytes(300)]
    assert pieces(joined(*parts)) == parts
    assert pieces(joined(b"abc")[:-1]) == [b"ab"]
    assert pieces(b"\0") == []


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine"
)
@pytest.mark.timeout(600)
def test_nothing_is_found_in_a_while() -> None:
    outcomes = list(run(targets.NAMES, seconds=20, jobs=2))
    assert [one.tail for one in outcomes if one.code != 0] == []
    assert all(one.inputs > 0 for one in outcomes), outcomes
