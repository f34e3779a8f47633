"""The files of tests/cases/bad_pdclusters: what is wrong with a PDCluster, and who says what.

A file begins with comments: `# says:` is a whole message of `pd_operator.api`, `# server:` a
part of what the API server answers, `# server: -` with a reason where it can't answer. Two
documents are an object and a change of it that is refused.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent.parent / "cases" / "bad_pdclusters"


@dataclass(frozen=True, slots=True)
class Case:
    """`before` is None where the object itself is refused."""

    name: str
    before: Any
    document: Any
    says: tuple[str, ...]
    server: tuple[str, ...]

    @property
    def reaches_a_server(self) -> bool:
        return not self.server[0].startswith("-")


def _read(file: Path) -> Case:
    text = file.read_text()
    found: dict[str, list[str]] = {"says": [], "server": []}
    for line in text.splitlines():
        for key, values in found.items():
            if line.startswith(f"# {key}: "):
                values.append(line.removeprefix(f"# {key}: "))
    *before, document = yaml.safe_load_all(text)
    return Case(
        file.stem,
        before[0] if before else None,
        document,
        tuple(found["says"]),
        tuple(found["server"]),
    )


CASES = {case.name: case for case in map(_read, sorted(FOLDER.glob("*.yaml")))}
