"""A pod's volumes as folders of this machine."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from pd_operator.local.environment import ConfigError, Mount
from pd_operator.podparts import Manifest


class Volumes:
    """`shared` names the emptyDirs that outlive pods here, such as the models' cache."""

    def __init__(
        self, pod: Manifest, folder: Path, memory: Path, shared: Mapping[str, Path]
    ) -> None:
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
        if "emptyDir" not in volume:
            kinds = ", ".join(key for key in volume if key != "name")
            raise ConfigError(f"volume {name}: {kinds} can't be mounted on this machine")
        folder = self._shared.get(name)
        if folder is None:
            in_memory = volume["emptyDir"].get("medium") == "Memory"
            folder = (self._memory if in_memory else self._folder) / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

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
