"""Slots on disk: what was written is read, and nothing else ever is."""

import os
import shutil
from pathlib import Path

import pytest

from pd_engine.kv.slots import Corrupt, DiskSlots, HostSlots, disk_slot_bytes

BLOCK = 5000
KEY, OTHER = b"k" * 16, b"o" * 16


def block(seed: int) -> memoryview:
    return memoryview(bytes((seed + at) % 251 for at in range(BLOCK)))


def open_slots(folder: Path, slots: int = 3, layout: str = "layout-a") -> DiskSlots:
    return DiskSlots(folder, slots, BLOCK, layout)


def read(disk: DiskSlots, slot: int, key: bytes = KEY) -> bytes:
    into = bytearray(BLOCK)
    disk.read(slot, key, memoryview(into))
    return bytes(into)


def test_host_slots_keep_to_themselves() -> None:
    host = HostSlots(2, BLOCK)
    host.view(0)[:] = block(1)
    host.view(1)[:] = block(2)
    assert (host.view(0), host.view(1)) == (block(1), block(2))
    host.close()


def test_a_block_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    disk.write(1, KEY, block(7))
    assert read(disk, 1) == block(7)
    disk.close()
    again = open_slots(tmp_path)
    [found] = again.scan()
    assert (found.slot, found.key) == (1, KEY)
    assert 0 <= found.age_s < 60
    assert read(again, 1) == block(7)
    again.close()


def test_others_can_not_read_it(tmp_path: Path) -> None:
    disk = open_slots(tmp_path / "kv")
    assert disk.path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    disk.close()


@pytest.mark.parametrize("where", ["header", "first byte", "last byte", "key"])
def test_a_flipped_bit_is_noticed(where: str, tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    disk.write(1, KEY, block(7))
    begin = disk_slot_bytes(BLOCK)
    at = {"header": 3, "key": 30, "first byte": 4096, "last byte": 4096 + BLOCK - 1}[where]
    with disk.path.open("r+b") as file:
        file.seek(begin + at)
        byte = file.read(1)[0]
        file.seek(begin + at)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(Corrupt):
        read(disk, 1)
    assert bool(list(disk.scan())) == ("byte" in where)  # blocks are checked when read
    disk.close()


def test_a_slot_that_was_being_written_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = open_slots(tmp_path)
    disk.write(1, KEY, block(7))
    real, calls = os.pwrite, 0

    def dies(file: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:  # half of the block
            real(file, data[: BLOCK // 2], offset)
            raise OSError(28, "No space left on device")
        return real(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", dies)
        with pytest.raises(OSError, match="No space"):
            disk.write(1, OTHER, block(9))
    assert not list(disk.scan())
    for key in (KEY, OTHER):
        with pytest.raises(Corrupt):
            read(disk, 1, key)
    disk.close()


def test_a_slot_is_read_by_its_key_alone(tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    disk.write(1, KEY, block(7))
    with pytest.raises(Corrupt, match="another block"):
        read(disk, 1, OTHER)
    disk.close()


def test_an_erased_block_is_gone_from_the_disk(tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    disk.write(0, KEY, block(7))
    disk.erase(0)
    with pytest.raises(Corrupt):
        read(disk, 0)
    disk.close()
    assert bytes(block(7))[:1000] not in disk.path.read_bytes()


def test_a_file_cut_short_is_no_trouble(tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    disk.write(2, KEY, block(7))
    os.truncate(disk.path, 2 * disk_slot_bytes(BLOCK) + 4096 + 10)
    with pytest.raises(Corrupt, match="cut short"):
        read(disk, 2)
    disk.close()


def test_another_layouts_file_is_deleted_and_never_read(tmp_path: Path) -> None:
    first = open_slots(tmp_path)
    first.write(0, KEY, block(7))
    first.close()
    second = open_slots(tmp_path, layout="layout-b")
    assert not list(second.scan())
    assert not first.path.exists()
    second.close()
    os.replace(second.path, first.path)
    impostor = open_slots(tmp_path)
    assert not list(impostor.scan())
    impostor.close()


def test_a_folder_has_one_worker(tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    with pytest.raises(OSError, match="a folder of its own"):
        open_slots(tmp_path)
    disk.close()
    open_slots(tmp_path).close()


@pytest.mark.parametrize("how", ["the file", "its folder", "by another"])
def test_a_file_that_was_deleted_is_made_again(how: str, tmp_path: Path) -> None:
    disk = open_slots(tmp_path / "kv")
    disk.write(1, KEY, block(7))
    assert not disk.gone
    match how:
        case "the file":
            disk.path.unlink()
        case "its folder":
            shutil.rmtree(tmp_path / "kv")
        case _:
            other = open_slots(tmp_path / "other")
            other.write(0, OTHER, block(8))
            other.close()
            os.replace(other.path, disk.path)
    assert disk.gone
    with pytest.raises(FileNotFoundError, match="deleted"):
        disk.write(2, OTHER, block(9))
    disk.remake()
    assert not disk.gone
    assert not list(disk.scan())
    disk.write(2, OTHER, block(9))
    disk.close()
    again = open_slots(tmp_path / "kv")
    assert [(found.slot, found.key) for found in again.scan()] == [(2, OTHER)]
    again.close()


def test_a_file_that_another_worker_has_by_now_is_left_to_it(tmp_path: Path) -> None:
    disk = open_slots(tmp_path)
    disk.path.unlink()
    other = open_slots(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="a folder of its own"):
        disk.remake()
    assert disk.gone
    assert len(os.listdir("/proc/self/fd")) == before
    other.close()
    disk.remake()
    assert not disk.gone
    disk.close()
