"""The module list of ARCHITECTURE.md, from the modules' own first lines.

`python -m scripts.module_list` writes it; check_repo.py compares.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "ARCHITECTURE.md"
_HEAD = "## Modules\n"
_PACKAGES = {
    "operator/pd_cli": "The command",
    "operator/pd_operator": "The operator",
    "operator/pd_operator/scaling": "How many workers each pool needs",
    "operator/pd_operator/local": "The operator's backend for one machine",
    "runtime/pd_core": "Shared",
    "proto/pd_proto": "The wire",
    "runtime/pd_router": "The router",
    "runtime/pd_engine": "The engine",
    "runtime/pd_engine/attention": "The engine's attention",
    "runtime/pd_engine/kv": "The engine's KV plane",
    "runtime/pd_sim": "The simulator",
}


def summary(module: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(module.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def render(root: Path = ROOT) -> str:
    """The section, from its head to the document's end."""
    parts = [_HEAD]
    for package, title in _PACKAGES.items():
        modules = sorted((root / package).glob("*.py"))
        rows = [f"| `{m.stem}` | {summary(m)} |" for m in modules if m.name != "__init__.py"]
        parts += [f"### {title} (`{package}`)\n", "| module | |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def updated(document: str, root: Path = ROOT) -> str:
    """The document with a fresh list."""
    return document[: document.index(_HEAD)] + render(root)


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
