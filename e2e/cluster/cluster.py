"""A whole single-node Kubernetes on this machine: up, down, and what it looks like.

Its processes outlive the command that starts them; who they are is kept in state.json, each
with the moment of its start, so that no other process that got the same number is ever ended.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from e2e.cluster import addons, archive, build, controlplane, netns, node, packages, ports, teardown
from e2e.cluster.api import Api, wait_for
from e2e.cluster.containers import Containers
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import API_PORT, NODE_ADDRESS, Layout
from e2e.cluster.process import Command, alive, start, started_at, tail

PROGRAMS = ("kube", "coredns", "kube-router", "pause")
READY_DEADLINE_S = 120.0


@dataclass
class State:
    """What runs: name -> (pid, when it started)."""

    processes: dict[str, tuple[int, int]] = field(default_factory=dict)
    ready: bool = False

    @classmethod
    def read(cls, layout: Layout) -> "State | None":
        try:
            document = json.loads(layout.state.read_text())
        except FileNotFoundError:
            return None
        found = {name: (one[0], one[1]) for name, one in document["processes"].items()}
        return cls(found, document["ready"])

    def write(self, layout: Layout) -> None:
        temporary = layout.state.with_suffix(".part")
        temporary.write_text(json.dumps({"processes": self.processes, "ready": self.ready}))
        temporary.rename(layout.state)

    def dead(self) -> list[str]:
        return [name for name, one in self.processes.items() if not alive(*one)]


@contextmanager
def alone(layout: Layout) -> Iterator[Path]:
    """One command at a time for a cluster. Gives the file that says so, which whoever has it may
    remove."""
    file = layout.folder.parent / f"{layout.name}.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(file.open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterError(
                    f"another command works on cluster {layout.name!r}; wait for it"
                ) from None
            # One that was removed since it was opened keeps nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(file.stat(), os.fstat(lock.fileno())):
                    break
        yield file


def up(layout: Layout) -> None:
    """Starts it. A cluster that runs already is left as it is; what is half there is removed."""
    _check_machine()
    with alone(layout):
        state = State.read(layout)
        if state and state.ready and not state.dead():
            _say(f"cluster {layout.name!r} is up already")
            return
        if state or netns.exists(layout):
            _say("removing what an earlier run left")
            teardown.remove(layout, state.processes if state else {})
        try:
            _start(layout)
        except BaseException:
            # Its logs stay, and say why; the next `up` or `down` removes them.
            with suppress(ClusterError):
                left = State.read(layout)
                teardown.stop(layout, left.processes if left else {})
            raise


def down(layout: Layout) -> None:
    """Ends it, and removes all that it had."""
    with alone(layout) as lock:
        state = State.read(layout)
        teardown.remove(layout, state.processes if state else {})
        lock.unlink()


def pid_of(layout: Layout, name: str) -> int:
    """Of a process of the cluster that `up` started."""
    state = State.read(layout)
    if state is None:
        raise ClusterError(f"cluster {layout.name!r} isn't up; run: make cluster-up")
    return state.processes[name][0]


def restart(layout: Layout, name: str) -> None:
    """Kills etcd or the API server, and starts it again as it was. Who starts them reaps them."""
    state = State.read(layout)
    if state is None:
        raise ClusterError(f"cluster {layout.name!r} isn't up; run: make cluster-up")
    plane = layout.plane
    commands = {one.name: one for one in (controlplane.etcd(plane), controlplane.apiserver(plane))}
    process = psutil.Process(state.processes[name][0])
    process.kill()
    process.wait(READY_DEADLINE_S)
    _run(layout, state, netns.inside(layout, commands[name]))


def kubeconfig_of(layout: Layout) -> Path:
    """The kubeconfig of a cluster that runs."""
    state = State.read(layout)
    if state is None or not state.ready:
        raise ClusterError(f"cluster {layout.name!r} isn't up; run: make cluster-up")
    if dead := state.dead():
        logs = "\n".join(f"--- {name}\n{tail(layout.log(name), 1000)}" for name in dead)
        raise ClusterError(
            f"of cluster {layout.name!r} these have ended: {', '.join(dead)};"
            f" run: make cluster-down cluster-up\n{logs}"
        )
    return layout.admin


def _check_machine() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterError(
            "a cluster of our own needs Linux and root; elsewhere use one that you have:\n"
            "  KUBECONFIG=… PDCLUSTER_TEST_EXISTING=1"
        )
    packages.need({**packages.CONTROL_PLANE, **packages.NODE})
    for name in PROGRAMS:
        build.build(build.PROGRAMS[name])


def _start(layout: Layout) -> None:
    started = time.monotonic()
    state = State()
    shutil.rmtree(layout.folder, ignore_errors=True)
    layout.folder.mkdir(parents=True)
    layout.folder.chmod(0o711)  # kubeconfigs and keys below are for their owner alone
    state.write(layout)
    _say(f"network namespace {layout.namespace}")
    netns.make(layout)
    controlplane.prepare(layout.plane)
    node.write_configs(layout)
    for folder in node.cgroup_folders(layout):
        folder.mkdir(exist_ok=True)

    _say("etcd, kube-apiserver, containerd")
    plane = layout.plane
    for command in (controlplane.etcd(plane), controlplane.apiserver(plane)):
        _run(layout, state, netns.inside(layout, command))
    _run(layout, state, node.containerd(layout))
    api = _reach(layout, state)
    containers = Containers(layout)
    wait_for("containerd answers", containers.answers, READY_DEADLINE_S)
    _import_system_images(layout, containers)
    _wait_ready(layout, state, api)

    _say("controllers, scheduler, kubelet, kube-proxy")
    for command in (controlplane.manager(plane), controlplane.scheduler(plane)):
        _run(layout, state, netns.inside(layout, command))
    _run(layout, state, node.kubelet(layout))
    _run(layout, state, node.kube_proxy(layout))
    try:
        addons.install(api, lambda: _run(layout, state, node.kube_router(layout)))
        netns.filter_bridges(layout)
    except TimeoutError as error:
        raise _explained(layout, state, str(error)) from error
    finally:
        api.close()
    if state.dead():
        raise _explained(layout, state, "not all processes have stayed")
    state.ready = True
    state.write(layout)
    _say(f"up after {time.monotonic() - started:.0f} s")


def _reach(layout: Layout, state: State) -> Api:
    """A port on loopback that leads to the API server, and the kubeconfig that names it."""
    [port] = ports.free(1)
    options = {
        "--listen": str(port),
        "--namespace": str(layout.namespace_file),
        "--to": f"{NODE_ADDRESS}:{API_PORT}",
    }
    argv = [sys.executable, "-m", "e2e.cluster.proxy"]
    for option, value in options.items():
        argv += [option, value]
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    _run(layout, state, Command("proxy", tuple(argv), layout.log("proxy"), env))
    inner = layout.plane.admin.read_text()
    layout.admin.write_text(inner.replace(layout.plane.url, f"https://127.0.0.1:{port}"))
    layout.admin.chmod(0o600)
    return Api(layout.admin)


def _import_system_images(layout: Layout, containers: Containers) -> None:
    for name, reference in (("pause", node.PAUSE_IMAGE), ("coredns", node.COREDNS_IMAGE)):
        file = layout.folder / f"{name}.tar"
        program = build.built(name) / name
        archive.write(file, reference, {f"/{name}": program}, [f"/{name}"])
        containers.load(file)
        file.unlink()


def _wait_ready(layout: Layout, state: State, api: Api) -> None:
    def ready() -> bool:
        if state.dead():
            raise _explained(layout, state, "the control plane doesn't stay up")
        return bool(api.call("GET", "/readyz", deadline_s=2) == "ok")

    try:
        wait_for("the API server is ready", ready, READY_DEADLINE_S)
    except TimeoutError as error:
        raise _explained(layout, state, str(error)) from error


def _run(layout: Layout, state: State, command: Command) -> None:
    process = start(command, outlive=True)
    began = started_at(process.pid)
    state.processes[command.name] = (process.pid, began if began is not None else -1)
    state.write(layout)


def _explained(layout: Layout, state: State, what: str) -> ClusterError:
    """With the ends of the logs of those that ended, or of all."""
    names = state.dead() or list(state.processes)
    logs = "\n".join(f"--- {name}\n{tail(layout.log(name), 1500)}" for name in names)
    return ClusterError(f"{what}\n{logs}\n(all logs: {layout.folder / 'logs'})")


def _say(text: str) -> None:
    print(text, flush=True)
