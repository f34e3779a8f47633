"""Requests leave nothing behind: an engine's memory stays flat."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# The long run: PD_MEMORY_REQUESTS=100000.
REQUESTS = int(os.environ.get("PD_MEMORY_REQUESTS", "10000"))


@pytest.mark.timeout(60 + REQUESTS // 20)
def test_memory_is_flat_after_the_first_tenth() -> None:
    command = [sys.executable, "-m", "tests.pd_engine.one_worker", str(REQUESTS)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=50 + REQUESTS // 20
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["requests"] == REQUESTS
    assert found["late_bytes"] <= 1.02 * found["early_bytes"], found
