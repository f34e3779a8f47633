"""Where inputs lie: those that are kept in the repository, and what a fuzzer has found here."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
"""A folder a target: inputs that once went wrong, and are tried in every run of the tests."""
BUILD = HERE.parent.parent / "build" / "fuzz"


def files(target: str) -> list[Path]:
    return sorted(path for path in (CORPUS / target).glob("*") if path.is_file())
