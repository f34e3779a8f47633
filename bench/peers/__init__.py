"""Other systems that benches compare with, each in an environment of its own in the cache; and
all of them side by side: see `__main__`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.common import Goal

PEERS: dict[str, tuple[str, ...]] = {
    "vllm-router": ("vllm-router==0.1.17",),
    "smg": ("smg==1.13.0",),
    "llama-cpp-python": ("llama-cpp-python==0.3.36",),  # is compiled: a quarter of an hour
    "dynamo": ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
}
_INSTEAD: dict[str, tuple[str, ...]] = {
    "dynamo": (
        "typing-extensions", "transformers==5.24.0", "pyzmq", "msgspec", "aiohttp>=3.14.3",
        "prometheus-client<1", "uvloop", "redis<9", "zstandard", "tqdm", "certifi", "pydantic",
        "numpy", "pyyaml",
    ),
}  # fmt: skip
"""Of a peer whose own list has more than what is compared needs (a performance model of JAX)."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pdcluster" / "peers"
_INSTALL_DEADLINE_S = 2400

GOALS = {
    "ours_kill_decode_wrong": Goal("<=", 0),
    "ours_kill_prefill_wrong": Goal("<=", 0),
    "ours_stop_decode_wrong": Goal("<=", 0),
    "ours_after_wrong": Goal("<=", 0),
    "minutes": Goal("<=", 20),
}


def install(name: str, download: bool) -> Path | None:
    """The interpreter of a peer's environment; None where it can't be had."""
    folder = CACHE / PEERS[name][0].replace("==", "-")
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists():
        return python
    if not download:
        return None
    print(f"installing {', '.join(PEERS[name])}", file=sys.stderr, flush=True)
    uv = Path(sys.executable).parent / "uv"
    add: tuple[str | Path, ...] = (uv, "pip", "install", "--quiet", "--python", python)
    instead = _INSTEAD.get(name, ())
    commands: list[Sequence[str | Path]] = [
        (uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder),
        (*add, *(("--no-deps",) if instead else ()), *PEERS[name]),
    ]
    if instead:
        commands.append((*add, *instead))
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=_INSTALL_DEADLINE_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{name} can't be installed: {error}", file=sys.stderr)
        return None
    done.touch()
    return python
