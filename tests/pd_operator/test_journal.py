"""Covers journal: lines in order, bounded, and nothing raised where they can't be written."""

from pathlib import Path

from pd_operator.journal import Journal, lines


def test_lines_in_order_over_two_files(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "some.jsonl"
    journal = Journal(path, limit_bytes=20)
    for number in range(12):
        journal.add(f"line {number}")
    kept = lines(path)
    assert kept == [f"line {number}" for number in range(12 - len(kept), 12)]
    assert 3 <= len(kept) <= 6
    assert sum(one.stat().st_size for one in path.parent.iterdir()) <= 2 * 30


def test_clear_forgets_both(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    journal = Journal(path, limit_bytes=1)
    journal.add("a")
    journal.add("b")
    journal.clear()
    assert lines(path) == []


def test_what_cannot_be_written_is_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Journal(tmp_path / "file" / "some.jsonl").add("a")
    assert lines(tmp_path / "nothing") == []
