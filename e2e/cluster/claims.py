"""Folders of this machine in pods: by a claim, since `restricted` pods may mount no hostPath."""

import shutil
from pathlib import Path

from e2e.cluster.api import Api, Manifest


def claim(api: Api, namespace: str, name: str, folder: Path) -> str:
    """A claim on this folder, to be mounted read-only; nothing else can take its volume, whose
    name is given back: volumes belong to no namespace, so whoever made it deletes it."""
    volume = f"{namespace}-{name}"
    shared: Manifest = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    size = {"storage": "1Gi"}
    api.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **shared,
                "capacity": size,
                "claimRef": {"namespace": namespace, "name": name},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
    )
    api.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {**shared, "volumeName": volume, "resources": {"requests": size}},
        }
    )
    return volume


def readable(folder: Path, target: Path) -> Path:
    """A copy of the folder at `target` that pods may read: their user is nobody here."""
    if not target.is_dir():
        shutil.copytree(folder, target)
        for path in (target.parent, target, *target.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
    return target
