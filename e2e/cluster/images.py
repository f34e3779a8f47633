"""Builds our images and brings them into the cluster: `python -m e2e.cluster.images [NAME…]`.

No registry: the base comes from debootstrap, buildah builds on it, and containerd imports.
What is built stays in the cache folder, layer by layer, so that a change of our code takes
seconds and only a change of the locks installs packages again.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cluster, packages
from e2e.cluster.build import cache_root
from e2e.cluster.containers import Containers
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import DEFAULT_NAME, Layout

ROOT = Path(__file__).resolve().parents[2]
RUN_ROOT = Path("/run/pdcluster-images")
BUILD_DEADLINE_S = 1800
MANY_LAYERS = 400
REFERENCE = "pdcluster.test/{name}:dev"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_UNWANTED = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt")


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    file: str
    target: str = ""
    called: str = ""
    """Its reference, where that isn't the usual one."""
    source: Path = ROOT
    """The tree that it's built from."""

    @property
    def reference(self) -> str:
        return self.called or REFERENCE.format(name=self.name)


IMAGES = {
    image.name: image
    for image in (
        Image("router", "router.Dockerfile"),
        Image("operator", "operator.Dockerfile"),
        Image("engine-thin", "engine.Dockerfile", target="thin"),
        Image("engine", "engine.Dockerfile"),
    )
}
DEFAULT = ("router", "operator", "engine-thin")


def provide(layout: Layout, names: Sequence[str] = DEFAULT) -> None:
    """Builds and imports them; what hasn't changed costs a few seconds."""
    packages.need(packages.IMAGES)
    with alone():
        for name in names:
            build(IMAGES[name])
            load(IMAGES[name], layout)


def build(image: Image) -> None:
    """Builds it on our base."""
    started = time.monotonic()
    base = _base()
    arguments = [
        "bud",
        "--layers",
        "--force-rm",
        "--pull-never",
        "--network",
        "host",
        "--isolation",
        "chroot",
    ]
    arguments += ["--build-arg", f"BASE={base}", *_pip_settings()]
    if image.target:
        arguments += ["--target", image.target]
    file = image.source / "images" / image.file
    arguments += ["--tag", image.reference, "--file", str(file), str(image.source)]
    _buildah(*arguments)
    print(f"{image.reference}: built in {time.monotonic() - started:.0f} s", flush=True)


def load(image: Image, layout: Layout) -> None:
    """Imports it into the cluster, unless this very one is there."""
    started = time.monotonic()
    note = layout.folder / "images.json"  # gone with the cluster, as its images
    loaded = json.loads(note.read_text()) if note.exists() else {}
    built = _buildah("images", "--quiet", "--no-trunc", image.reference).strip()
    if loaded.get(image.reference) == built:
        return
    with tempfile.TemporaryDirectory(dir=_folder(), prefix=".export-") as folder:
        archive = Path(folder) / "image.tar"
        export(image, archive)
        Containers(layout).load(archive)
    note.write_text(json.dumps(loaded | {image.reference: built}))
    print(f"{image.reference}: imported in {time.monotonic() - started:.0f} s", flush=True)


def export(image: Image, archive: Path) -> None:
    """Writes one that is built, as `load-image` wants it."""
    target = f"docker-archive:{archive}:{image.reference}"
    _buildah("push", "--quiet", image.reference, target)


@contextmanager
def mounted(image: Image) -> Iterator[Path]:
    """The root of one that is built."""
    container = _buildah("from", "--pull-never", image.reference).strip()
    try:
        yield Path(_buildah("mount", container).strip())
    finally:
        _buildah("rm", container)


def host_packages() -> Path:
    """Our own installed packages, for thin images."""
    folder = Path(sys.prefix) / "lib" / f"python{_minor()}" / "site-packages"
    if not (folder / "torch").is_dir():
        raise ClusterError(f"{folder} has no torch; run: make env")
    return folder


def _minor() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _folder() -> Path:
    folder = cache_root() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def alone() -> Iterator[None]:
    """Nobody else builds meanwhile."""
    with (_folder() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _buildah_run("rm", "--all")  # what a build that failed left, and has mounted
            if len(_buildah_run("images", "--all", "--quiet").stdout.split()) > MANY_LAYERS:
                _buildah_run("rmi", "--prune", "--force")  # of sources that are history


# ---- the base -----------------------------------------------------------------------


def _base() -> str:
    """The base image's name; made when it isn't there."""
    suite = _suite()
    digest = hashlib.sha256(" ".join((suite, *BASE_PACKAGES, *_UNWANTED)).encode())
    reference = f"localhost/pdcluster-base:{suite}-{digest.hexdigest()[:8]}"
    if _buildah_run("inspect", "--type", "image", reference).returncode == 0:
        return reference
    started = time.monotonic()
    print(f"{reference}: debootstrap (1 to 2 min)", flush=True)
    with tempfile.TemporaryDirectory(dir=_folder(), prefix=".base-") as folder:
        root = Path(folder) / "root"
        _debootstrap(suite, root)
        container = _buildah("from", "scratch").strip()
        try:
            _buildah("add", "--quiet", container, str(root), "/")
            _buildah("commit", "--quiet", container, reference)
        finally:
            _buildah_run("rm", container)
    print(f"{reference}: made in {time.monotonic() - started:.0f} s", flush=True)
    return reference


def _debootstrap(suite: str, root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"]
    _checked([*command, suite, str(root), *_mirror()])
    for unwanted in _UNWANTED:
        shutil.rmtree(root / unwanted, ignore_errors=True)
    for file in (root / "var/lib/apt/lists").glob("*Packages*"):
        file.unlink()
    python = root / "usr/bin/python"
    if not python.exists():
        python.symlink_to("python3")


def _suite() -> str:
    """This machine's release where it's Debian, so that both have the same Python."""
    facts = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    if facts.get("ID", "").strip('"') == "debian":
        return facts.get("VERSION_CODENAME", "bookworm").strip('"')
    return "bookworm"


def _mirror() -> list[str]:
    """Where apt gets its packages; debootstrap's own default elsewhere."""
    found = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    ).stdout.split()
    usable = [uri for uri in found if uri.rstrip("/").endswith("/debian")]
    return usable[:1]


# ---- buildah ------------------------------------------------------------------------


def _pip_settings() -> list[str]:
    """pip's mirror and certificate authority, as this machine's pip has them."""
    settings = []
    index = os.environ.get("PIP_INDEX_URL") or _pip_config("global.index-url")
    if index:
        settings += ["--build-arg", f"PIP_INDEX_URL={index}"]
    authority = os.environ.get("PIP_CERT") or _pip_config("global.cert")
    if authority and Path(authority).is_file():
        inside = "/run/certificates.pem"
        settings += ["--volume", f"{authority}:{inside}:ro", "--build-arg", f"PIP_CERT={inside}"]
    return settings


def _pip_config(key: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", key],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _buildah(*arguments: str) -> str:
    return _checked(_buildah_command(*arguments))


def _buildah_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _buildah_command(*arguments), capture_output=True, text=True, timeout=120, check=False
    )


def _buildah_command(*arguments: str) -> list[str]:
    """With a storage of its own: nothing of it shows up in the user's."""
    storage = ["--root", str(_folder() / "storage"), "--runroot", str(RUN_ROOT)]
    return ["buildah", *storage, "--storage-driver", "overlay", *arguments]


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-3000:]
        raise ClusterError(f"{' '.join(command)}\nfailed:\n{said}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.images", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(IMAGES)} (default: {DEFAULT})"
    )
    parser.add_argument("--name", default=DEFAULT_NAME, help="the cluster (%(default)s)")
    parser.add_argument("--only-build", action="store_true", help="don't import them")
    options = parser.parse_args(arguments)
    names = options.names or list(DEFAULT)
    if unknown := sorted(set(names) - set(IMAGES)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(IMAGES)}")
    layout = Layout(options.name)
    try:
        if options.only_build:
            packages.need(packages.IMAGES)
            with alone():
                for name in names:
                    build(IMAGES[name])
        else:
            cluster.kubeconfig_of(layout)
            provide(layout, names)
    except (ClusterError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
