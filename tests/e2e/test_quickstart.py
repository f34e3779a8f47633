"""`make quickstart` as somebody without a terminal runs it: it brings examples/quickstart.yaml
up, streams an answer, prints what happened to it, takes everything down, exits 0.
"""

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster import pdcluster, port_taken
from tests.ports import free_port

DEADLINE_S = 180


@pytest.mark.timeout(240)
def test_quickstart(root: Path, tmp_path: Path):
    port = free_port()
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    example = root / "examples" / "quickstart.yaml"
    shm = set(os.listdir("/dev/shm"))
    command = ["quickstart", "-f", str(example), "--port", str(port)]
    done = pdcluster(*command, env=env, timeout_s=DEADLINE_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"ready: http://127.0.0.1:{port}/v1" in said
    for part in ("queue", "prefill", "transfer", "decode", "TTFT", "TPOT"):
        assert re.search(part, said, re.IGNORECASE), f"{part!r} is not in:\n{said}"
    assert re.search(r"[KM]i?B", said)

    assert not port_taken("127.0.0.1", port)
    assert set(os.listdir("/dev/shm")) <= shm
    assert [p.pid for p in processes_with(tmp_path / "state")] == []


def processes_with(state: Path) -> list[psutil.Process]:
    """Processes that were started with this state folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("XDG_STATE_HOME") == str(state):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def test_the_makefile_runs_it(root: Path):
    said = subprocess.run(
        ["make", "-n", "quickstart", f"PORT={free_port()}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout
    assert "quickstart.yaml" in said
