"""Fuzzes one target in this process, by atheris: what `python -m tests.fuzz` starts.

python -m tests.fuzz.one TARGET --seconds 20
python -m tests.fuzz.one TARGET FILE ...      what these inputs do
"""

import argparse
import ast
import sys
import tempfile
from pathlib import Path

from tests.fuzz import targets
from tests.fuzz.corpus import BUILD, CORPUS

_INPUT_S = 20
_MEMORY_MIB = 3072
_MAX_BYTES = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=targets.NAMES)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=int, default=20)
    given = parser.parse_args()
    if given.files:
        target = targets.load(given.target)
        for file in given.files:
            target.one(file.read_bytes())
        return
    _fuzz(given.target, given.seconds)


def _fuzz(name: str, seconds: int) -> None:
    import atheris

    packages = _packages(name)
    with atheris.instrument_imports(include=packages, enable_loader_override=False):
        target = targets.load(name)
    kept, found = BUILD / "corpus" / name, BUILD / "findings" / name
    for folder in (kept, found, CORPUS / name):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        seeds, words = Path(work) / "seeds", Path(work) / "words"
        seeds.mkdir()
        for number, seed in enumerate(target.seeds()):
            (seeds / str(number)).write_bytes(seed)
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.WORDS))
        arguments = [
            sys.argv[0],
            f"-max_total_time={seconds}",
            f"-timeout={_INPUT_S}",
            f"-rss_limit_mb={_MEMORY_MIB}",
            f"-max_len={_MAX_BYTES}",
            f"-artifact_prefix={found}/",
            f"-dict={words}",
            "-print_final_stats=1",
            str(kept),
            str(CORPUS / name),
            str(seeds),
        ]
        atheris.Setup(arguments, target.one)
        atheris.Fuzz()


def _packages(name: str) -> list[str]:
    """Read without importing it: what is imported before isn't watched."""
    text = (Path(targets.__file__).parent / f"{name}.py").read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{name} has no PACKAGES")


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word)


if __name__ == "__main__":
    main()
