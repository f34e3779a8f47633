"""Builds the cluster's binaries from Go modules, once: `python -m e2e.cluster.build [NAME…]`.

Each folder with a go.mod beside this file is one program. What was built lies in a cache
folder outside of the work tree, named by the version and by a hash of all that it was built
from, so that a checkout of another revision finds its own and nothing is ever half there.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import packages
from e2e.cluster.errors import ClusterError

HERE = Path(__file__).resolve().parent
BUILD_DEADLINE_S = 3600
REPORT_EVERY_S = 20


@dataclass(frozen=True, slots=True)
class Program:
    """One Go module of ours and what comes out of it."""

    name: str
    module: str  # whose version is the program's version; "" for a program of our own
    package: str  # what is built
    cold_minutes: float  # on two cores with nothing cached, for people who wait
    links: tuple[str, ...] = ()  # further names that the program answers to


KUBE = Program(
    "kube",
    "k8s.io/kubernetes",
    ".",
    9,
    (
        "kube-apiserver",
        "kube-controller-manager",
        "kube-proxy",
        "kube-scheduler",
        "kubectl",
        "kubelet",
    ),
)
PROGRAMS = {
    program.name: program
    for program in (
        KUBE,
        Program("helm", "helm.sh/helm/v3", "helm.sh/helm/v3/cmd/helm", 2),
        Program("coredns", "github.com/coredns/coredns", "github.com/coredns/coredns", 3),
        Program(
            "kube-router",
            "github.com/cloudnativelabs/kube-router/v2",
            "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router",
            3,
        ),
        Program("pause", "", ".", 0.2),
    )
}


def cache_root() -> Path:
    """Where all that this package builds is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pdcluster"


def source_of(program: Program) -> Path:
    return HERE / program.name


def version_of(program: Program) -> str:
    """The version that go.mod asks for, without its v."""
    if not program.module:
        return "0"
    text = (source_of(program) / "go.mod").read_text()
    found = re.search(rf"^\s*(?:require )?{re.escape(program.module)} v(\S+)", text, re.MULTILINE)
    if found is None:
        raise ClusterError(f"{source_of(program)}/go.mod asks for no {program.module}")
    return found[1]


def folder_of(program: Program) -> Path:
    """Where the built program lies, or will."""
    digest = hashlib.sha256()
    source = source_of(program)
    for file in sorted(f for f in source.iterdir() if f.suffix in (".go", ".mod", ".sum")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    name = f"{version_of(program)}-{digest.hexdigest()[:12]}"
    return cache_root() / program.name / name


def is_built(name: str) -> bool:
    return (folder_of(PROGRAMS[name]) / name).exists()


def built(name: str) -> Path:
    """The folder with the program `name`, which must have been built."""
    if not is_built(name):
        raise ClusterError(
            f"{name} isn't built; run: make kube-binaries\n"
            "  (needs Go, about 15 minutes the first time), or use a cluster that you have:\n"
            "  KUBECONFIG=… PDCLUSTER_TEST_EXISTING=1"
        )
    return folder_of(PROGRAMS[name])


def build(program: Program) -> Path:
    """Builds it unless it is there; a second builder waits for the first."""
    target = folder_of(program)
    if (target / program.name).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent / ".lock", program.name):
        if (target / program.name).exists():
            return target
        started = time.monotonic()
        print(
            f"{program.name} {version_of(program)}: building"
            f" (about {program.cold_minutes:g} min with nothing cached)",
            flush=True,
        )
        temporary = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        try:
            _go_build(program, temporary / program.name)
            for link in program.links:
                (temporary / link).symlink_to(program.name)
            temporary.chmod(0o755)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        print(f"{program.name}: built in {time.monotonic() - started:.0f} s", flush=True)
    return target


@contextmanager
def _alone(lock: Path, name: str) -> Iterator[None]:
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process builds it; waiting", flush=True)
            _lock_within(held.fileno(), BUILD_DEADLINE_S, name)
        yield


def _lock_within(descriptor: int, deadline_s: float, name: str) -> None:
    end = time.monotonic() + deadline_s
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ClusterError(f"{name}: the other build didn't end in time") from None
            time.sleep(0.5)


def _go() -> str:
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists():
            return candidate
    raise ClusterError(
        "Go isn't installed: the cluster's binaries are built with it. Install Go 1.26 or newer,\n"
        "  or use a cluster that you have: KUBECONFIG=… PDCLUSTER_TEST_EXISTING=1"
    )


def _linker_flags(program: Program) -> str:
    """Stripped; and Kubernetes told its version, which it otherwise doesn't know."""
    if program is not KUBE:
        return "-s -w"
    version = version_of(program)
    major, minor, _ = version.split(".", 2)
    prefix = "k8s.io/component-base/version"
    facts = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X {prefix}.{k}={v}" for k, v in facts.items())])


def _go_build(program: Program, output: Path) -> None:
    command = [_go(), "build", "-v", "-trimpath", "-ldflags", _linker_flags(program)]
    command += ["-o", str(output), program.package]
    nice = shutil.which("nice")
    process = subprocess.Popen(
        [nice, "-n", "10", *command] if nice else command,
        cwd=source_of(program),
        env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = threading.Timer(BUILD_DEADLINE_S, process.kill)
    deadline.start()
    try:
        said = _report(process, program.name)
        if process.wait(timeout=60) != 0:
            tail = "\n".join(said[-30:])
            raise ClusterError(f"{program.name}: go build failed:\n{tail}")
    finally:
        deadline.cancel()
        process.kill()
        process.wait()


def _report(process: subprocess.Popen[str], name: str) -> list[str]:
    """Reads what go says (a line a package) and tells now and then how far it is."""
    said: list[str] = []
    started = told = time.monotonic()
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            said.append(line.rstrip())
            now = time.monotonic()
            if now - told > REPORT_EVERY_S:
                told = now
                print(f"{name}: {now - started:4.0f} s, {len(said)} packages", flush=True)
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.build", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument("--path", action="store_true", help="only print where each lies")
    options = parser.parse_args(arguments)
    names = options.names or list(PROGRAMS)
    if unknown := sorted(set(names) - set(PROGRAMS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    try:
        if not options.path:
            packages.need(packages.ALL if not options.names else packages.CONTROL_PLANE)
        for name in names:
            folder = folder_of(PROGRAMS[name]) if options.path else build(PROGRAMS[name])
            print(f"{name}: {folder}", flush=True)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
