"""Fenced blocks of the documents, so that tests run what readers copy."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md", "CONTRIBUTING.md", "SECURITY.md", "e2e/README.md", "charts/pdcluster/README.md",
    "tests/README.md", "tests/envtest/README.md", "docs/**/*.md",
)  # fmt: skip
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """`language` is "" where the fence names none: commands, or what they print."""

    document: str
    language: str
    text: str

    @property
    def commands(self) -> tuple[str, ...]:
        """What a reader types: the lines behind `$ ` where there are such, else all of them.
        Continued lines are one command, comments are left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        plain = (re.sub(r"(^|\s)#\s.*", "", line) for line in lines)
        return tuple(" ".join(line.split()) for line in plain if line.strip())

    @property
    def output(self) -> str:
        """What stands below the command."""
        return "".join(
            line for line in self.text.splitlines(keepends=True) if not line.startswith("$ ")
        )


def blocks() -> list[Block]:
    """All of them."""
    found = []
    for pattern in DOCUMENTS:
        for file in sorted(ROOT.glob(pattern)):
            name = file.relative_to(ROOT).as_posix()
            found += [Block(name, *match.groups()) for match in _FENCE.finditer(file.read_text())]
    return found


def block(document: str, beginning: str) -> Block:
    """The only one of a document whose text begins so."""
    [found] = [
        one for one in blocks() if one.document == document and one.text.startswith(beginning)
    ]
    return found
