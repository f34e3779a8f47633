"""Container logs: the last words of the present run, whole lines as they come, a bound."""

import os
import tracemalloc
from pathlib import Path

from pd_operator.local.logs import LogFile


def write(log: LogFile, *texts: bytes) -> None:
    descriptor = log.open_run()
    for text in texts:
        os.write(descriptor, text)
    os.close(descriptor)


def test_last_words_are_those_of_the_present_run(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    assert log.last_line() == ""
    write(log, b"first\nKeyError: 'rope'\n\n  \n")
    assert log.last_line() == "KeyError: 'rope'"
    write(log)
    assert log.last_line() == ""
    write(log, b"\xff half")
    assert log.last_line() == "\ufffd half"
    assert (tmp_path / "log").read_bytes().startswith(b"first\n")


def test_lines_come_whole_and_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    descriptor = log.open_run()
    os.write(descriptor, b"one\ntw")
    assert log.new_lines() == ["one"]
    os.write(descriptor, b"o\nthree\n")
    assert log.new_lines() == ["two", "three"]
    assert log.new_lines() == []
    os.close(descriptor)


def test_a_line_without_end_is_no_burden(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    write(log, b"x" * 1_000_000 + b"\nlast\n")
    found = [line for _ in range(30) for line in log.new_lines()]
    assert found[-1] == "last"
    assert all(len(line) <= 200_000 for line in found)


def test_a_log_stays_bounded_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = LogFile(path, max_bytes=1000)
    descriptor = log.open_run()
    for number in range(100):
        os.write(descriptor, b"%098d\n" % number)
        log.trim()
        assert path.stat().st_size <= 1100
    assert (tmp_path / "log.1").stat().st_size <= 1000
    assert log.last_line().endswith("99")
    os.close(descriptor)


def test_trimming_takes_little_memory(tmp_path: Path) -> None:
    """`up` stays as small as it was: what it trims isn't read as a whole."""
    content = b"%099d\n" * 40_000 % tuple(range(40_000))
    (tmp_path / "log").write_bytes(content)
    tracemalloc.start()
    try:
        LogFile(tmp_path / "log", max_bytes=3_000_000).trim()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 500_000
    assert (tmp_path / "log.1").read_bytes() == content[-3_000_000:]
    assert (tmp_path / "log").stat().st_size == 0
