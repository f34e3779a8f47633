"""What images hold: nothing that gives its caller another user's rights, and no shell."""

import os
import stat
from pathlib import Path

import pytest

from e2e.cluster import images

SHELLS = {"sh", "ash", "bash", "busybox", "csh", "dash", "fish", "ksh", "rbash", "tcsh", "zsh"}


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("site")  # it has built them
@pytest.mark.parametrize("name", images.DEFAULT)
def test_no_setuid_files_and_no_shells(name: str) -> None:
    with images.mounted(images.IMAGES[name]) as root:
        files = [Path(folder) / file for folder, _, names in os.walk(root) for file in names]
        assert len(files) > 1000
        modes = {file: file.lstat().st_mode for file in files}
        raised = [
            str(file.relative_to(root))
            for file, mode in modes.items()
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID)
        ]
        shells = [
            str(file.relative_to(root))
            for file, mode in modes.items()
            if file.name in SHELLS and file.parent.name in ("bin", "sbin") and mode & 0o111
        ]
    assert raised == shells == []
