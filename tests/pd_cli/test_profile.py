"""`pdcluster profile`: what it says where there is nothing to measure. tests/e2e measures."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from pd_cli.main import main


def profile(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["profile", *arguments], catch_exceptions=False)
    return found.exit_code, found.output


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no PDCluster is running here"),
        (("chat",), "no PDCluster chat is running"),
        (("--url", "http://localhost:8000"), "belong together"),
        (("--url", "http://127.0.0.1:9", "--admin", "http://127.0.0.1:9"), "127.0.0.1:9/debug"),
    ],
)
def test_nothing_to_measure(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    file = tmp_path / "profile.json"
    code, said = profile(*arguments, "-o", str(file))
    assert code == 1
    assert says in said
    assert not file.exists()
