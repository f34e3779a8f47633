"""The repository itself: what the import of our packages may not break or drag in,
and that the checks of `make check` find what they are there to find.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_repo

HEAVY = ("torch", "transformers", "grpc", "tokenizers", "uvicorn", "kopf")


def in_fresh_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_folders_are_no_packages(root: Path):
    assert check_repo.shadowing_packages(root) == []


def test_the_standard_librarys_operator_stays_importable(root: Path):
    paths = [str(root), *(str(root / f) for f in ("operator", "proto", "runtime"))]
    where = in_fresh_python(
        f"import sys; sys.path[:0] = {paths!r}; import operator; print(operator.__file__)"
    )
    assert str(root) not in where


@pytest.mark.parametrize("arguments", [["--help"], ["up", "--help"], ["validate", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]):
    loaded = in_fresh_python(
        "import sys, json, contextlib, io\n"
        f"sys.argv = ['pdcluster', *{arguments!r}]\n"
        "from pd_cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main()\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    assert json.loads(loaded) == []


@pytest.mark.parametrize("package", ["pd_router.walk", "pd_engine.scheduler", "pd_engine.transfer"])
def test_pure_modules_load_nothing_heavy(package: str):
    loaded = in_fresh_python(
        f"import sys, json, {package}\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    assert json.loads(loaded) == []


def test_files_are_short_and_small_and_name_no_registry(root: Path):
    files = check_repo.tracked_files(root)
    assert check_repo.long_files(files) == []
    assert check_repo.large_files(files) == []
    assert check_repo.registry_hosts(files) == []


def test_what_the_checks_find(tmp_path: Path):
    long = tmp_path / "long.py"
    long.write_text("x = 1\n" * (check_repo.MAX_LINES + 1))
    large = tmp_path / "large.bin"
    large.write_bytes(b"\0" * (check_repo.MAX_FILE_BYTES + 1))
    leaky = tmp_path / "pip.conf"
    leaky.write_text("[global]\nindex" + "-url = https://mirror.example/simple\n")
    (tmp_path / "operator").mkdir()
    (tmp_path / "operator" / "__init__.py").touch()

    assert str(long) in check_repo.long_files([long, leaky])[0]
    assert str(large) in check_repo.large_files([large, long])[0]
    assert f"{leaky}:2" in check_repo.registry_hosts([leaky, large])[0]
    assert "operator" in check_repo.shadowing_packages(tmp_path)[0]


def test_a_lock_that_misses_or_contradicts_a_dependency_is_found(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "pdcluster"\ndependencies = ["Click>=8", "rich>=15"]\n'
        '[project.optional-dependencies]\nlocal = ["pdcluster[all]", "torch>=3"]\n'
        '[dependency-groups]\ntest = ["pytest>=9"]\n'
    )
    locks = tmp_path / "requirements"
    locks.mkdir()
    (locks / "model.in").write_text("# why\nsome-model\n")
    (locks / "model.lock").write_text("some_model==1.0 \\\n    --hash=sha256:0\n")
    (locks / "all.lock").write_text(
        "click==8.5.1 \\\n    --hash=sha256:0\ntorch==2.9.0\nrich==15.0\n"
    )

    found = check_repo.stale_lock(tmp_path)

    assert [f.split(": ")[1] for f in found] == [
        "torch>=3 is asked for, 2.9.0 is pinned; run",
        "pytest>=9 is asked for, nothing is pinned; run",
    ]


def test_an_images_lock_that_differs_from_the_lock_of_all_is_found(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "pdcluster"\n'
        '[project.optional-dependencies]\nrouter = ["click>=8"]\nlocal = []\n'
    )
    locks = tmp_path / "requirements"
    locks.mkdir()
    (locks / "all.lock").write_text("click==8.5.1\nrich==15.0\n")
    (locks / "router.lock").write_text("click==8.5.1\n")
    assert check_repo.stale_lock(tmp_path) == []

    (locks / "router.lock").write_text("rich==14.0\n")

    assert [f.split(": ")[1] for f in check_repo.stale_lock(tmp_path)] == [
        "click>=8 is asked for, nothing is pinned; run",
        "rich is 14.0, not as in all.lock; run",
    ]


def test_each_version_of_a_marked_pin_counts():
    lock = "numpy==2.4.6 ; python_version < '3.12' \\\nnumpy==2.5.5 ; python_version >= '3.12'"
    assert [str(v) for v in check_repo.pins(lock)["numpy"]] == ["2.4.6", "2.5.5"]


FAULTS = 37
"""That users of such systems have met."""


def test_the_table_of_faults_names_tests_that_exist(root: Path):
    table = (root / "tests" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \|$", table, re.MULTILINE)
    assert rows == [str(number) for number in range(1, FAULTS + 1)]
    with_test = re.findall(r"^\| (\d+) \|.*`[\w./]+\.py(?:::\w+)?`", table, re.MULTILINE)
    assert with_test == rows, "each fault has a test"
    named = re.findall(r"`([\w./]+\.py)::(\w+)`", table)
    assert len(named) > 30
    for file, name in named:
        assert f"def {name}(" in (root / "tests" / file).read_text(), f"{file}::{name}"
