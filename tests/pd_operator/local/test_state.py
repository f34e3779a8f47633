"""State folders: one `up` a name, atomic state, stale state of a killed `up` is recognised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd_operator.local.state import AlreadyRunning, MemoryFolder, ProcessId, StateFolder, running


def test_one_cluster_of_a_name(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "chat")
    folder.write({"name": "chat", "pods": []})
    with pytest.raises(AlreadyRunning, match=rf'"chat" is running already \(pid {os.getpid()}\)'):
        StateFolder(tmp_path, "chat")
    other = StateFolder(tmp_path, "other")
    assert [state["name"] for state in running(tmp_path)] == ["chat"]
    other.close()
    folder.close()
    assert list(running(tmp_path)) == []
    StateFolder(tmp_path, "chat").close()


def test_only_logs_stay_and_only_until_the_next_start(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "chat")
    for name in ("logs", "pods"):
        (folder.path / name).mkdir()
        (folder.path / name / "file").touch()
    folder.write({"name": "chat"})
    folder.close()
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["lock", "logs"]
    again = StateFolder(tmp_path, "chat")
    assert [entry.name for entry in again.path.iterdir()] == ["lock"]
    again.close()


def test_the_state_of_a_process_that_is_gone_does_not_count(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessId.of(process.pid)
    assert identity is not None
    assert identity.alive()
    (tmp_path / "chat").mkdir()
    state = {"name": "chat", "pid": identity.pid, "pid_started": identity.started}
    (tmp_path / "chat" / "state.json").write_text(json.dumps(state))
    assert len(list(running(tmp_path))) == 1

    process.communicate(b"\n")
    assert not identity.alive()
    assert list(running(tmp_path)) == []


def test_a_pid_that_came_again_is_somebody_else() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive()
    assert not ProcessId(me.pid, "1").alive()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x", "pid_started": ""}'])
def test_garbage_is_no_cluster(tmp_path: Path, text: str) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "state.json").write_text(text)
    assert list(running(tmp_path)) == []


def test_memory_of_the_dead_is_removed_and_of_the_living_is_not(tmp_path: Path) -> None:
    mine = MemoryFolder("a-1", tmp_path)
    mine.path.mkdir()
    (mine.path / "file").touch()
    dead = tmp_path / f"pdcluster-b-{os.getpid()}-1"
    dead.mkdir()
    other = tmp_path / "something-else"
    other.mkdir()

    second = MemoryFolder("b", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([mine.path, other])
    mine.close()
    second.close()
    assert list(tmp_path.iterdir()) == [other]
