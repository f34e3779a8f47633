"""Secrets as folders of this machine: one version at a time, for their user's eyes alone; a
container that mounts one waits until it is there."""

import stat
from pathlib import Path

import pytest

from pd_operator import tlsobjects
from pd_operator.local.volumes import SecretFolders
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest
from tests.pd_operator.local.rig import container, kubelet, workload

ONE = {"tls.crt": b"one", "tls.key": b"key"}


def test_files_are_its_users_alone(tmp_path: Path) -> None:
    folders = SecretFolders(tmp_path / "secrets")
    folders.write("a", ONE)
    folder = folders.find("a")
    assert folder is not None
    assert {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()} == ONE
    for name in ONE:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_new_version_stands_in_for_the_old_one(tmp_path: Path) -> None:
    folders = SecretFolders(tmp_path)
    folders.write("a", ONE)
    folders.write("a", {"tls.crt": b"two", "ca.crt": b"ca"})
    found = {one.name: one.read_bytes() for one in (tmp_path / "a").iterdir() if one.is_file()}
    assert found == {"tls.crt": b"two", "ca.crt": b"ca"}
    assert not [one for one in tmp_path.rglob("*") if one.is_file() and one.read_bytes() == b"key"]


def test_what_is_removed_is_gone(tmp_path: Path) -> None:
    folders = SecretFolders(tmp_path)
    folders.write("a", ONE)
    folders.remove("a")
    folders.remove("a")
    assert folders.find("a") is None
    assert list(tmp_path.iterdir()) == []


def secret() -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "web-tls", "namespace": "default"},
        "data": tlsobjects.encoded(ONE),
    }


@pytest.mark.slow
def test_a_container_waits_for_its_secret(run, tmp_path: Path) -> None:
    mount = {"name": "tls", "mountPath": "/etc/tls", "readOnly": True}
    volume = {"name": "tls", "secret": {"secretName": "web-tls"}}
    made = container(volumeMounts=[mount])
    made["args"].append("--certificates=/etc/tls")

    async def scenario() -> None:
        async with kubelet(tmp_path) as rig:
            rig.kubelet.apply(workload(containers=[made], volumes=[volume]))
            await rig.until(
                lambda: "there is no Secret web-tls" in str(list(rig.kubelet.objects()))
            )
            rig.kubelet.apply(secret())
            await rig.until(lambda: rig.ready("web-0"))
            folder = tmp_path / "state" / "secrets" / "web-tls"
            arguments = Path(f"/proc/{rig.pid('web-0')}/cmdline").read_text().split("\0")
            assert f"--certificates={folder}" in arguments
            rig.kubelet.delete(Ref("Secret", "web-tls"))
            assert not folder.exists()

    run(scenario())
