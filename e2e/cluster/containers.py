"""The cluster's containerd, spoken to with its own command."""

import subprocess
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

CTR = "/usr/bin/ctr"
NAMESPACE = "k8s.io"  # where the kubelet looks
IMPORT_DEADLINE_S = 900


class Containers:
    def __init__(self, layout: Layout) -> None:
        self._socket = layout.containerd_socket

    def answers(self) -> bool:
        return self._ctr("version", deadline_s=5).returncode == 0

    def load(self, file: Path) -> None:
        """Imports a docker or OCI archive."""
        done = self._ctr("images", "import", str(file), deadline_s=IMPORT_DEADLINE_S)
        if done.returncode != 0:
            raise ClusterError(f"{file} can't be imported: {done.stderr.strip()}")

    def images(self) -> list[str]:
        return self._ctr("images", "ls", "-q", deadline_s=30).stdout.split()

    def _ctr(self, *arguments: str, deadline_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CTR, "--address", str(self._socket), "--namespace", NAMESPACE, *arguments],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
