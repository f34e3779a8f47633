"""Set clocks, and slow or full disks, in pods of the real cluster.

A machine has one clock and one disk, and others use them. So a library is preloaded into the
pods' processes (`trouble.c`), and what it lies about stands in a file a role, which the pods
mount: a clock that is set tells another time of day and the same monotonic time, a full disk
refuses writes to files with ENOSPC, a slow one makes each access wait.
"""

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLAIM = "trouble"
_MOUNT = "/opt/pdcluster/trouble"
_LIBRARY = "trouble.so"
_WORDS = struct.Struct("<3q")
_COMPILE_DEADLINE_S = 60.0
ROLES = ("prefill", "decode", "router")


class Troubled:
    """A folder with the library and a file for each role, to be mounted by a claim."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).with_suffix(".c")
        flags = ("-O2", "-Wall", "-Werror", "-shared", "-fPIC")
        command = ["gcc", *flags, "-o", str(folder / _LIBRARY), str(source)]
        subprocess.run(command, check=True, timeout=_COMPILE_DEADLINE_S)
        for role in ROLES:
            self.set(role)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)

    def set(
        self, role: str, *, clock_s: float = 0.0, delay_s: float = 0.0, full: bool = False
    ) -> None:
        """From now on this is wrong there, and nothing else."""
        file = self.folder / role
        words = _WORDS.pack(int(clock_s * 1e9), int(delay_s * 1e6), full)
        if file.exists():
            with file.open("r+b") as mapped:  # in its place: pods have it mapped
                mapped.write(words)
        else:
            file.write_bytes(words)

    @contextmanager
    def wrong(self, role: str, **what: Any) -> Iterator[None]:
        self.set(role, **what)
        try:
            yield
        finally:
            self.set(role)


def with_trouble(template: dict[str, Any], container: str, role: str) -> dict[str, Any]:
    """A pod template whose processes have it preloaded."""
    spec = template["spec"]
    volumes = [
        *spec.get("volumes", ()),
        {"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM}},
    ]
    env = [
        {"name": "LD_PRELOAD", "value": f"{_MOUNT}/{_LIBRARY}"},
        {"name": "PD_TROUBLE", "value": f"{_MOUNT}/{role}"},
    ]
    mount = {"name": CLAIM, "mountPath": _MOUNT, "readOnly": True}
    containers = [
        {
            **one,
            "env": [*one.get("env", ()), *env],
            "volumeMounts": [*one.get("volumeMounts", ()), mount],
        }
        if one["name"] == container
        else one
        for one in spec["containers"]
    ]
    return {**template, "spec": {**spec, "volumes": volumes, "containers": containers}}
