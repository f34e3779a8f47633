"""Takes a cluster down, whatever state it is in: processes, containers, mounts, the network."""

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from e2e.cluster import netns, node
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout
from e2e.cluster.process import end, started_at

_MNT_DETACH = 2
_DEADLINE_S = 20.0
# Whoever starts or watches containers goes first.
_ORDER = ("kube-router", "kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy")


def remove(layout: Layout, processes: Mapping[str, tuple[int, int]]) -> None:
    """Ends everything and removes all files."""
    stop(layout, processes)
    shutil.rmtree(layout.run, ignore_errors=True)
    shutil.rmtree(layout.folder, ignore_errors=True)
    _remove_strays(layout)
    if layout.folder.exists():
        raise ClusterError(f"{layout.folder} can't be removed entirely")


def stop(layout: Layout, processes: Mapping[str, tuple[int, int]]) -> None:
    """Ends everything that runs; logs stay."""
    end([one for name, one in processes.items() if name in _ORDER], grace_s=3)
    _kill_pods(layout)
    end(_shims(layout), grace_s=2)
    end(list(processes.values()), grace_s=5)
    _unmount_below(layout.folder, layout.run)
    netns.remove(layout)
    _remove_cgroups(layout)


def _kill_pods(layout: Layout) -> None:
    """SIGKILL to whatever is in the cluster's cgroup, until nothing is."""
    deadline = time.monotonic() + _DEADLINE_S
    while pids := _pids(layout):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise ClusterError(f"these processes of pods can't be ended: {sorted(pids)}")
        time.sleep(0.05)


def _pids(layout: Layout) -> set[int]:
    found: set[int] = set()
    for top in node.cgroup_folders(layout):
        for folder, _, _ in os.walk(top):  # passes over what vanishes meanwhile
            with suppress(OSError):
                procs = Path(folder, "cgroup.procs").read_text()
                found.update(int(line) for line in procs.split())
    return {pid for pid in found if started_at(pid) is not None}


def _shims(layout: Layout) -> list[tuple[int, int]]:
    """containerd's helpers: one a pod, each its own session, told by their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            ours = str(layout.containerd_socket) in words
            if ours and Path(words[0]).name.startswith("containerd-shim"):
                began = started_at(int(entry.name))
                if began is not None:
                    found.append((int(entry.name), began))
    return found


def _unmount_below(*folders: Path) -> None:
    """Pods' root filesystems and volumes, the deepest first."""
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = line.split()[4].encode().decode("unicode_escape")
        if any(target.startswith(f"{folder}/") for folder in folders):
            mounted.append(target)
    for target in sorted(mounted, key=len, reverse=True):
        if libc.umount2(os.fsencode(target), _MNT_DETACH) != 0:
            raise ClusterError(f"{target} can't be unmounted: {os.strerror(ctypes.get_errno())}")


def _remove_cgroups(layout: Layout) -> None:
    for top in node.cgroup_folders(layout):
        for folder, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                os.rmdir(folder)


def _remove_strays(layout: Layout) -> None:
    """What kubelet and the CNI plugins write to fixed places."""
    results = Path("/var/lib/cni/results")
    for result in list(results.glob(f"{layout.cni_network}-*-eth0")):
        container = result.name.removeprefix(f"{layout.cni_network}-").removesuffix("-eth0")
        _remove_files([result, results / f"cni-loopback-{container}-lo"])
    _remove_files(
        link
        for link in Path("/var/log/containers").glob("*.log")
        if link.is_symlink() and os.readlink(link).startswith(str(layout.pod_logs))
    )


def _remove_files(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OSError):
            file.unlink()
