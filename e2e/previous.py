"""The release before this one, for upgrades. None has been published yet, so a commit of this
repository stands for it: its CRDs, its chart and its images, as they were.
"""

import dataclasses
import io
import subprocess
import tarfile
from pathlib import Path

from e2e.cluster import images
from e2e.cluster.errors import ClusterError
from e2e.cluster.images import ROOT, Image

COMMIT = "4a0aff31f6c87953d81196c07e908f8cd99a8a51"
"""Older than hedged prefill, clients' weights and the operator's counts of workers."""
PARTS = (
    "charts",
    "crds",
    "images",
    "operator",
    "proto",
    "pyproject.toml",
    "requirements",
    "runtime",
)


def unpack(folder: Path, repository: Path = ROOT, commit: str = COMMIT) -> Path:
    """Its tree, as far as it's installed. Raises ClusterError where the history isn't there."""
    command = ["git", "-C", str(repository), "archive", commit, *PARTS]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if done.returncode != 0:
        raise ClusterError(
            f"the previous release is commit {commit[:12]} of this repository, which this clone"
            f" lacks; run: git fetch --unshallow ({done.stderr.decode().strip()})"
        )
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def image(name: str, tree: Path) -> Image:
    """One of `images.IMAGES`, built from that tree, under a name of its own."""
    called = f"pdcluster.test/{name}:previous"
    return dataclasses.replace(images.IMAGES[name], called=called, source=tree)
