"""Other systems that benches compare with, each in an environment of its own in the cache."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PEERS = {
    "vllm-router": "vllm-router==0.1.17",
    "smg": "smg==1.13.0",
    "llama-cpp-python": "llama-cpp-python==0.3.36",  # is compiled: a quarter of an hour
}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pdcluster" / "peers"
_INSTALL_DEADLINE_S = 2400


def install(name: str, download: bool) -> Path | None:
    """The interpreter of a peer's environment; None where it can't be had."""
    folder = CACHE / PEERS[name].replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists():
        return python
    if not download:
        return None
    print(f"installing {PEERS[name]}", file=sys.stderr, flush=True)
    uv = Path(sys.executable).parent / "uv"
    commands: Sequence[Sequence[str | Path]] = (
        (uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder),
        (uv, "pip", "install", "--quiet", "--python", python, PEERS[name]),
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=_INSTALL_DEADLINE_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name} can't be installed: {error}", file=sys.stderr)
        return None
    done.touch()
    return python
