"""Covers e2e.previous: the tree of an older commit, and clones that don't have it."""

import subprocess
from pathlib import Path

import pytest

from e2e import previous
from e2e.cluster import images
from e2e.cluster.errors import ClusterError

# Git's own settings of whoever runs this don't matter.
_GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@example.test")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With two commits, the older one tagged `before`."""
    made = tmp_path / "repository"
    git(made.parent, "init", "--quiet", str(made))
    for part in (*previous.PARTS, "docs"):
        (made / part).mkdir()
        (made / part / "text").write_text("old")
    git(made, "add", "--all")
    git(made, "commit", "--quiet", "-m", "old")
    git(made, "tag", "before")
    (made / "charts" / "text").write_text("new")
    git(made, "commit", "--quiet", "--all", "-m", "new")
    return made


def git(folder: Path, *arguments: str) -> None:
    subprocess.run([*_GIT, "-C", str(folder), *arguments], check=True)


def test_the_older_tree_as_far_as_it_is_installed(repository: Path, tmp_path: Path) -> None:
    tree = previous.unpack(tmp_path / "tree", repository, "before")
    assert {one.name for one in tree.iterdir()} == set(previous.PARTS)
    assert (tree / "charts" / "text").read_text() == "old"


def test_a_shallow_clone_is_told_what_to_do(repository: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--depth=1", "--no-tags", repository.as_uri(), str(clone))
    with pytest.raises(ClusterError, match="run: git fetch --unshallow"):
        previous.unpack(tmp_path / "tree", clone)


@pytest.mark.parametrize("name", images.DEFAULT)
def test_its_images_have_names_of_their_own(name: str, tmp_path: Path) -> None:
    built = previous.image(name, tmp_path)
    assert built.reference == f"pdcluster.test/{name}:previous"
    assert (built.source, built.file) == (tmp_path, images.IMAGES[name].file)
