"""Prometheus and promtool as Debian has them. `make watch-test` brings them."""

import subprocess
from pathlib import Path

import pytest

from tests.prometheus import PROMTOOL, need_programs

_DEADLINE_S = 120


@pytest.fixture(scope="session", autouse=True)
def programs() -> None:
    need_programs()


def promtool(*arguments: str, folder: Path) -> str:
    """What it prints; fails with that where it isn't content."""
    done = subprocess.run(
        [PROMTOOL, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
