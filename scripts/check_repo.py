"""Checks of the repository that no linter makes: `python -m scripts.check_repo`.

Each check returns its findings, one line a finding that says where and what to do.
"""

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts import chart, module_list, reference
from scripts.generate_proto import generate

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600
MAX_FILE_BYTES = 1024 * 1024
# Written so that these lines don't match themselves.
REGISTRY = re.compile(
    r"(index-url|registry)[ ]*[=:][ ]*.?https?://"
    r"|\"resolved\": *\"https?://|GOPROXY[=]http|^deb[ ]https?://|source = [{] registry"
)


def tracked_files(root: Path = ROOT) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def long_files(files: Iterable[Path]) -> list[str]:
    found = []
    for file in files:
        if file.suffix == ".py" and "_pb2" not in file.name:
            lines = len(file.read_bytes().splitlines())
            if lines > MAX_LINES:
                found.append(f"{file}: {lines} lines, at most {MAX_LINES}: split it")
    return found


def large_files(files: Iterable[Path]) -> list[str]:
    return [
        f"{file}: {file.stat().st_size} bytes, at most {MAX_FILE_BYTES}"
        for file in files
        if file.stat().st_size > MAX_FILE_BYTES
    ]


def registry_hosts(files: Iterable[Path]) -> list[str]:
    found = []
    for file in files:
        data = file.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if REGISTRY.search(line):
                found.append(
                    f"{file}:{number}: names a registry host; leave that to pip's settings"
                )
    return found


def shadowing_packages(root: Path = ROOT) -> list[str]:
    """`operator/` as a package would hide the standard library's `operator`."""
    folders = ("operator", "proto", "runtime")
    return [
        f"{root / folder / '__init__.py'}: remove it, {folder}/ is a folder, never a package"
        for folder in folders
        if (root / folder / "__init__.py").exists()
    ]


def stale_proto(root: Path = ROOT) -> list[str]:
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        generate(Path(temporary))
        for fresh in sorted(Path(temporary).rglob("*_pb2*")):
            committed = root / "proto" / fresh.relative_to(temporary)
            if not committed.exists() or committed.read_bytes() != fresh.read_bytes():
                found.append(f"{committed}: differs from its .proto; run: make proto")
    return found


def stale_module_list(root: Path = ROOT) -> list[str]:
    document = root / "ARCHITECTURE.md"
    text = document.read_text()
    if module_list.updated(text, root) == text:
        return []
    return [f"{document}: its list of modules is out of date; run: make docs"]


def stale_reference(root: Path = ROOT) -> list[str]:
    differing = reference.stale(root)
    return [f"{root / name}: differs from the code; run: make docs" for name in differing]


def broken_links(files: Iterable[Path]) -> list[str]:
    """Of pages: to files that aren't there. mkdocs knows those of docs/ alone."""
    found = []
    for file in files:
        if file.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text()):
                if "://" not in target and not (file.parent / target).exists():
                    found.append(f"{file}: links to {target}, which isn't there")
    return found


def stale_chart(root: Path = ROOT) -> list[str]:
    differing = chart.stale(root)
    return [
        f"{root / name}: differs from what it is made of; run: make chart" for name in differing
    ]


def pins(lock: str) -> dict[str, list[Version]]:
    """The versions that a lock file pins, by canonical name (several where markers differ)."""
    found: dict[str, list[Version]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", lock, re.MULTILINE):
        found.setdefault(canonicalize_name(name), []).append(Version(version))
    return found


def wanted(project: dict[str, Any], name: str = "pdcluster") -> list[Requirement]:
    """All that pyproject asks for: dependencies, extras and groups, but not itself."""
    table = project["project"]
    groups = project.get("dependency-groups", {})
    if not isinstance(table, dict) or not isinstance(groups, dict):
        raise TypeError("pyproject.toml: [project] and [dependency-groups] must be tables")
    lists = [
        table.get("dependencies", []),
        *table.get("optional-dependencies", {}).values(),
        *groups.values(),
    ]
    requirements = [Requirement(text) for texts in lists for text in texts]
    return [r for r in requirements if canonicalize_name(r.name) != name]


def stale_lock(root: Path = ROOT) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    folder = root / "requirements"
    found = _unmet(wanted(project), folder / "all.lock")
    for source in sorted(folder.glob("*.in")):
        lines = (line.split("#")[0].strip() for line in source.read_text().splitlines())
        found += _unmet([Requirement(x) for x in lines if x], source.with_suffix(".lock"))
    return found + _stale_parts(project, folder)


def _stale_parts(project: dict[str, Any], folder: Path) -> list[str]:
    """An extra's own lock, for its image, has what the extra asks for, as all.lock has it."""
    found = []
    everything = pins((folder / "all.lock").read_text())
    for extra, texts in project["project"].get("optional-dependencies", {}).items():
        lock = folder / f"{extra}.lock"
        if not lock.exists():
            continue
        found += _unmet([Requirement(text) for text in texts], lock)
        for name, versions in pins(lock.read_text()).items():
            if not set(versions) <= set(everything.get(name, [])):
                have = ", ".join(map(str, versions))
                found.append(f"{lock}: {name} is {have}, not as in all.lock; run: make lock")
    return found


def _unmet(requirements: Iterable[Requirement], lock: Path) -> list[str]:
    pinned = pins(lock.read_text())
    found = []
    for requirement in requirements:
        versions = pinned.get(canonicalize_name(requirement.name), [])
        if not versions or not all(requirement.specifier.contains(v, True) for v in versions):
            have = ", ".join(map(str, versions)) or "nothing"
            found.append(f"{lock}: {requirement} is asked for, {have} is pinned; run: make lock")
    return found


def main() -> int:
    files = tracked_files()
    checks: list[Callable[[], list[str]]] = [
        lambda: long_files(files),
        lambda: large_files(files),
        lambda: registry_hosts(files),
        shadowing_packages,
        stale_proto,
        stale_lock,
        stale_module_list,
        stale_reference,
        lambda: broken_links(files),
        stale_chart,
    ]
    found = [finding for check in checks for finding in check()]
    for finding in found:
        print(finding.replace(f"{ROOT}/", ""))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
