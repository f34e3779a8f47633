"""A pod's volumes as folders of this machine."""

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pd_operator.local.environment import ConfigError, Mount
from pd_operator.podparts import Manifest

_DATA = "..data"


class SecretFolders:
    """A folder for each Secret, for this user's eyes alone. As with the real kubelet its files
    change all at once, by a link that is moved: who reads them sees one version."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._serial = itertools.count(1)

    def find(self, name: str) -> Path | None:
        folder = self._root / name
        return folder if folder.is_dir() else None

    def write(self, name: str, files: Mapping[str, bytes]) -> None:
        folder = self._root / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = {item.name for item in folder.iterdir()}
        version = folder / f"..{next(self._serial)}"
        version.mkdir(mode=0o700)
        for file, text in files.items():
            where = os.open(version / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(where, "wb") as opened:
                opened.write(text)
        link = folder / "..next"
        link.symlink_to(version.name)
        link.replace(folder / _DATA)
        for file in files.keys() - before:
            (folder / file).symlink_to(f"{_DATA}/{file}")
        for old in before - files.keys() - {_DATA}:
            if (folder / old).is_symlink():
                (folder / old).unlink()
            else:
                shutil.rmtree(folder / old)

    def remove(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)


class Volumes:
    """`shared` names the emptyDirs that outlive pods here, such as the models' cache."""

    def __init__(
        self,
        pod: Manifest,
        folder: Path,
        memory: Path,
        shared: Mapping[str, Path],
        secrets: SecretFolders,
    ) -> None:
        self._secrets = secrets
        self._declared = {item["name"]: item for item in pod["spec"].get("volumes", [])}
        self._folder = folder
        self._memory = memory
        self._shared = shared

    def mounts(self, container: Manifest) -> list[Mount]:
        """The container's mounts; folders are made. ConfigError when one can't be had."""
        return [
            Mount(item["mountPath"], str(self._locate(item["name"])))
            for item in container.get("volumeMounts", [])
        ]

    def _locate(self, name: str) -> Path:
        volume = self._declared.get(name)
        if volume is None:
            raise ConfigError(f"volumeMounts: the pod has no volume {name}")
        if "hostPath" in volume:
            return self._host_path(volume["hostPath"])
        if "secret" in volume:
            return self._secret(volume["secret"]["secretName"])
        if "emptyDir" not in volume:
            kinds = ", ".join(key for key in volume if key != "name")
            raise ConfigError(f"volume {name}: {kinds} can't be mounted on this machine")
        folder = self._shared.get(name)
        if folder is None:
            in_memory = volume["emptyDir"].get("medium") == "Memory"
            folder = (self._memory if in_memory else self._folder) / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _secret(self, name: str) -> Path:
        found = self._secrets.find(name)
        if found is None:
            raise ConfigError(f"there is no Secret {name}")
        return found

    def _host_path(self, source: Manifest) -> Path:
        path = Path(source["path"])
        wanted = source.get("type", "")
        if wanted == "Directory" and not path.is_dir():
            raise ConfigError(f"hostPath {path} is not a folder")
        if wanted == "File" and not path.is_file():
            raise ConfigError(f"hostPath {path} is not a file")
        return path

    def remove(self) -> None:
        """Everything that was the pod's alone."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)
