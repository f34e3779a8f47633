"""Fixtures for all tests, and how hard hypothesis tries.

The default keeps `make test` quick, and the same each time, so that a failure is the commit's.
HYPOTHESIS_PROFILE=long searches far longer, and elsewhere each time.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long", parent=settings.get_profile("default"), max_examples=5000, derandomize=False
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)
if PROFILE == "long":
    os.environ.setdefault("PYTEST_TIMEOUT", "0")  # a test takes a hundred times as long

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background. Programs that tests start and interrupt would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

RUN_DEADLINE_S = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: what is plainly broken is said within a minute."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine to its end in a loop of its own, with a deadline."""

    def runner(work: Coroutine[Any, Any, Any], deadline_s: float = RUN_DEADLINE_S) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(deadline_s):
                return await work

        return asyncio.run(bounded())

    return runner


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return Path(__file__).resolve().parent.parent
