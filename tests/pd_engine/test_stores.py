"""What may be kept of KV beyond the pool: sizes that can't be had name the field that is wrong."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_core.kv import KvLayout
from pd_engine import assembly
from pd_engine.settings import Settings, parse

LAYOUT = KvLayout("hash", "float32", 16, 2, 2, 16)  # blocks of 8 KiB
BASE = ["--role=decode", "--model=/m", "--served-name=chat", "--worker-name=d-0", "--host=h"]


def settings(folder: Path, host: int, disk: int = 0) -> Settings:
    kept = [f"--kv-host-bytes={host}", f"--kv-disk-bytes={disk}", f"--kv-disk-folder={folder}"]
    return parse([*BASE, *kept])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One MiB of memory, and of disk, is free."""
    usage: Any = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(assembly, "free_host_bytes", lambda: 1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


@pytest.mark.parametrize(
    ("host", "disk", "says"),
    [
        (1, 0, "retention.hostMemory (--kv-host-bytes) is 1 bytes, and one KV block takes 8192"),
        (1 << 21, 0, "retention.hostMemory (--kv-host-bytes) is 2 MiB, and 1 MiB of memory"),
        (8192, 1, "retention.disk (--kv-disk-bytes) is 1 bytes, and one KV block"),
        (8192, 1 << 40, "retention.disk (--kv-disk-bytes) is 1048576 MiB, and 1 MiB are free"),
    ],
)
def test_what_cannot_be_had(tmp_path: Path, host: int, disk: int, says: str) -> None:
    with pytest.raises(ValueError, match="retention") as caught:
        assembly._stores(settings(tmp_path / "new" / "kept", host, disk), LAYOUT)
    assert says in str(caught.value)


def test_what_is_kept_already_is_room(tmp_path: Path) -> None:
    wanted = (1 << 20) + 8192
    with pytest.raises(ValueError, match=r"retention\.disk"):
        assembly._stores(settings(tmp_path, 8192, wanted), LAYOUT)
    (tmp_path / "slots").write_bytes(bytes(1 << 16))
    stores = assembly._stores(settings(tmp_path, 8192, wanted), LAYOUT)
    assert stores.host is not None
    assert stores.disk is not None
    stores.host.close()
    stores.disk.close()
