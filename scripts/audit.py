"""What our dependencies are licensed under, and what is known to be wrong with them:
`python -m scripts.audit [--licences]`.

Licences are read from what is installed, for each package that a lock pins. Known
vulnerabilities come from https://osv.dev in one question, which tells it the locks' names and
versions and nothing else; `make check` asks for licences only, and so works without a network.
"""

import argparse
import importlib.metadata
import json
import re
import sys
import urllib.request
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from scripts.check_repo import ROOT, pins

OSV = "https://api.osv.dev/v1/querybatch"
_DEADLINE_S = 60
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0",
    "Unlicense", "Zlib",
}  # fmt: skip
"""All may be used beside and within an Apache-2.0 program (MPL's files stay under MPL)."""
_SAID_OTHERWISE = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_NVIDIAS = (
    "NVIDIA's own terms: CUDA's libraries, which torch and nixl load; the engine's image has them"
)
EXCEPTIONS = {
    "atheris": "Apache-2.0 by its LICENSE file; its metadata says nothing",
    "cuda-toolkit": _NVIDIAS,
    "nvidia-*": _NVIDIAS,
    "promql-parser": "MIT by its LICENSE file; its metadata says nothing",
}
"""Packages whose metadata isn't enough, and why they are taken all the same."""
_NO_LICENCE = ("DFSG approved",)


def licence(metadata: Any) -> str:
    """An SPDX expression, or what stands there in its place; "" when nothing does."""
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classifiers = [
        line.split(" :: ")[-1]
        for line in metadata.get_all("Classifier") or ()
        if line.startswith("License :: ")
    ]
    named = [name for name in classifiers if name not in _NO_LICENCE]
    if named:
        return " AND ".join(_SAID_OTHERWISE.get(name, name) for name in named)
    text = (metadata.get("License") or "").strip().splitlines()
    return _SAID_OTHERWISE.get(text[0], text[0]) if text else ""


def allowed(expression: str) -> bool:
    """All that it joins by AND; of what it joins by OR, one."""
    parts = re.sub(r"[()]", "", expression).split(" AND ")
    return all(any(name.strip() in ALLOWED for name in part.split(" OR ")) for part in parts)


def licences(
    distributions: Iterable[importlib.metadata.Distribution], pinned: Iterable[str]
) -> list[str]:
    """Findings about installed distributions that a lock pins."""
    names = set(pinned)
    found, used = [], set()
    for distribution in distributions:
        name = canonicalize_name(distribution.metadata["Name"])
        if name not in names:
            continue
        said = licence(distribution.metadata)
        if said and allowed(said):
            continue
        exception = next((pattern for pattern in EXCEPTIONS if fnmatch(name, pattern)), None)
        if exception is None:
            found.append(
                f"{name} {distribution.version}: its licence is {said or 'not said'!r}; take"
                f" another package, or write into scripts/audit.py why not"
            )
        used.add(exception)
    return found + [
        f"scripts/audit.py: no package needs the exception {pattern!r}: remove it"
        for pattern in EXCEPTIONS
        if pattern not in used
    ]


def vulnerabilities(pinned: Mapping[str, Iterable[Any]], url: str = OSV) -> list[str]:
    """Findings about pinned versions. OSError when nobody answers, ValueError when it is
    nonsense."""
    asked = [(name, str(version)) for name, versions in pinned.items() for version in versions]
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version}
        for name, version in asked
    ]
    request = urllib.request.Request(
        url, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as response:
        results = json.load(response)["results"]
    if len(results) != len(asked):
        raise ValueError(f"{len(results)} answers to {len(asked)} questions")
    return [
        f"{name} {version}: {', '.join(one['id'] for one in result['vulns'])}; run: make lock"
        for (name, version), result in zip(asked, results, strict=True)
        if result.get("vulns")
    ]


def _locked() -> dict[str, list[Any]]:
    texts = [file.read_text() for file in sorted((ROOT / "requirements").glob("*.lock"))]
    return pins("\n".join(texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--licences", action="store_true", help="nothing that needs a network")
    options = parser.parse_args()
    locked = _locked()
    found = licences(importlib.metadata.distributions(path=_folders()), locked)
    if not options.licences:
        try:
            found += vulnerabilities(locked)
        except (OSError, ValueError, KeyError) as error:
            found.append(f"known vulnerabilities: {OSV} can't be asked: {error}")
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def _folders() -> list[str]:
    """Where our packages lie, and those of tools beside them."""
    beside = (ROOT / "build" / "packages").glob("*")
    return [*sys.path, *(str(folder) for folder in beside if Path(folder).is_dir())]


if __name__ == "__main__":
    sys.exit(main())
