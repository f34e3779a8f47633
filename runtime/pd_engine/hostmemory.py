"""How much memory this process may still take."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int:
    """Free memory of the device; for the CPU, within the container's limit."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return free_host_bytes()


def free_host_bytes() -> int:
    """Free memory of this machine, within the container's limit."""
    available = _available()
    room = _cgroup_room()
    return available if room is None else min(available, room)


def _available(meminfo: Path = Path("/proc/meminfo")) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} has no line MemAvailable")


def _cgroup_room(root: Path = _CGROUP) -> int | None:
    """Limit minus what is used and can't be dropped; None where no limit is set."""
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        stat = (root / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return None
    if limit == "max":
        return None
    counters = dict(line.split() for line in stat.splitlines())
    return max(0, int(limit) - used + int(counters.get("inactive_file", 0)))
