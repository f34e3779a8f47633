"""A PDCluster on this machine for tests and benches: `pdcluster up` as a process of its own.

Waits poll what a user could see (the printed lines, `pdcluster status`, /metrics), each
with a deadline. What a cluster leaves behind is checked when it is stopped.
"""

import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.ports import free_port

PDCLUSTER = (sys.executable, "-m", "pd_cli.main")
READY_DEADLINE_S = 90.0
STOP_DEADLINE_S = 60.0
POLL_S = 0.05
BLOCK_STATES = ("free", "cached", "active", "granted", "quarantined")
_SHM = Path("/dev/shm")
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ClusterError(AssertionError):
    """The cluster didn't do what was waited for; the message holds what it printed."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One process of the cluster, as `pdcluster status -o json` shows it."""

    name: str
    pool: str  # prefill, decode, colocated, router
    ip: str
    pid: int
    ready: bool
    terminating: bool
    restarts: int
    revision: str


Labels = tuple[tuple[str, str], ...]


def parse_metrics(text: str) -> dict[str, dict[Labels, float]]:
    """Prometheus' text format: name -> labels -> value."""
    found: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            name, labels, value = match.groups()
            key = tuple(sorted(_LABEL.findall(labels or "")))
            found.setdefault(name, {})[key] = float(value)
    return found


def http_get(url: str, timeout_s: float = 5.0) -> tuple[int, str]:
    """(status, body), whatever the status; raises OSError when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def listeners(addresses: set[str]) -> list[str]:
    """host:port of all sockets that listen on these addresses."""
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    ends = [c.laddr for c in listening if c.laddr]
    return [f"{end.ip}:{end.port}" for end in ends if end.ip in addresses]


def pdcluster(
    *arguments: str, env: Mapping[str, str], timeout_s: float = 60.0, cwd: Path | None = None
) -> Any:
    """Runs the command to its end: a CompletedProcess with text."""
    return subprocess.run(
        [*PDCLUSTER, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@dataclass
class Cluster:
    """A running `pdcluster up`. Use `Cluster.start(...)` or the context manager `serving`."""

    file: Path
    port: int
    env: dict[str, str]
    process: subprocess.Popen[str]
    printed: list[str] = field(default_factory=list)
    ready_s: float = 0.0
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)
    _seen: dict[int, Pod] = field(default_factory=dict)
    _shm_before: set[str] = field(default_factory=set)

    # ---- its life

    @classmethod
    def start(
        cls,
        spec: Mapping[str, Any],
        folder: Path,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
    ) -> "Cluster":
        """Writes `spec` as a PDCluster file into `folder` and brings it up."""
        file = folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(dict(spec)))
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **(env or {})}
        port = free_port()
        shm = {p.name for p in _SHM.iterdir()} if _SHM.is_dir() else set()
        process = subprocess.Popen(
            [*PDCLUSTER, "up", "-f", str(file), "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        cluster = cls(file, port, environment, process, _shm_before=shm)
        threading.Thread(target=cluster._read, daemon=True).start()
        if wait:
            try:
                cluster.wait_ready()
            except BaseException:
                cluster.destroy()
                raise
        return cluster

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_line(self, pattern: str, deadline_s: float) -> str:
        """The first line from now on that matches; what was printed before is skipped."""
        started = time.monotonic()
        while (left := started + deadline_s - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                raise self.failure(f"ended with {self.process.wait(STOP_DEADLINE_S)}")
            self.printed.append(line)
            if re.search(pattern, line):
                return line
        raise self.failure(f"no line like {pattern!r} in {deadline_s:g} s")

    def wait_ready(self, deadline_s: float = READY_DEADLINE_S) -> None:
        started = time.monotonic()
        self.wait_line(rf"ready: http://127\.0\.0\.1:{self.port}/v1", deadline_s)
        self.ready_s = time.monotonic() - started
        self.pods()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ends it as Ctrl-C does and asserts that nothing is left. Returns the exit code."""
        self.pods()
        self.process.send_signal(number)
        try:
            code = self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise self.failure(f"still there {STOP_DEADLINE_S:g} s after {number.name}") from None
        self.drain_output()
        self.assert_nothing_left()
        return code

    def drain_output(self) -> None:
        """Takes over what an ended process has printed."""
        while (line := self._lines.get(timeout=STOP_DEADLINE_S)) is not None:
            self.printed.append(line)

    def destroy(self) -> None:
        """Ends whatever of it is still there, by force. For a test that failed."""
        victims = [self.process.pid, *self._seen]
        with suppress(psutil.NoSuchProcess):
            victims += [c.pid for c in psutil.Process(self.process.pid).children(recursive=True)]
        for pid in victims:
            if _is_ours(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_DEADLINE_S)

    def assert_nothing_left(self) -> None:
        processes = [f"{p.name} ({p.pid})" for p in self._seen.values() if _is_ours(p.pid)]
        ports = listeners({p.ip for p in self._seen.values()})
        if port_taken("127.0.0.1", self.port):
            ports.append(f"127.0.0.1:{self.port}")
        shm = {p.name for p in _SHM.iterdir()} - self._shm_before if _SHM.is_dir() else set()
        shm = {name for name in shm if name.startswith(("pd", "psm_"))}
        if processes or ports or shm:
            raise self.failure(f"left behind: processes {processes}, ports {ports}, shm {shm}")

    def failure(self, what: str) -> ClusterError:
        while not self._lines.empty():
            self.printed.append(self._lines.get() or "(end of output)")
        return ClusterError(f"pdcluster up: {what}; it printed:\n" + "\n".join(self.printed[-60:]))

    # ---- what a user sees of it

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def status(self) -> dict[str, Any]:
        """What `pdcluster status -o json` says."""
        done = pdcluster("status", "-o", "json", env=self.env)
        if done.returncode != 0:
            raise self.failure(f"status failed: {done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def pods(self, pool: str | None = None) -> list[Pod]:
        """The pods that have a process now, by name; of one pool where named.

        Read from the file that `pdcluster status` reads: starting a process for each
        look would keep a small machine busy.
        """
        [state] = Path(self.env["XDG_STATE_HOME"]).glob("pdcluster/*/state.json")
        names = Pod.__dataclass_fields__
        found = json.loads(state.read_text())["pods"]
        pods = [Pod(**{name: p[name] for name in names}) for p in found if p["pid"]]
        self._seen.update({p.pid: p for p in pods})
        return sorted((p for p in pods if pool in (None, p.pool)), key=lambda p: p.name)

    def pod(self, pool: str, index: int = 0) -> Pod:
        return self.pods(pool)[index]

    def workers(self) -> list[Pod]:
        return [p for p in self.pods() if p.pool != "router"]

    def metrics(self, pod: Pod) -> dict[str, dict[Labels, float]]:
        return parse_metrics(http_get(f"http://{pod.ip}:9090/metrics")[1])

    def blocks(self, pod: Pod) -> dict[str, int]:
        """KV blocks of a worker by state."""
        samples = self.metrics(pod)["pdcluster_engine_kv_blocks"]
        return {dict(labels)["state"]: int(value) for labels, value in samples.items()}

    # ---- what a test does to it

    def kill(self, pid: int, number: signal.Signals) -> None:
        """Signals one of the cluster's own processes."""
        assert pid in self._seen, f"{pid} is no process of this cluster"
        os.kill(pid, number)

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the PDCluster file in place, as an editor's save does (atomically)."""
        spec = yaml.safe_load(self.file.read_text())
        change(spec)
        self.write(yaml.safe_dump(spec))

    def write(self, text: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.file)

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 30.0) -> Any:
        """Polls until the condition's value is true and returns it."""
        ends = time.monotonic() + deadline_s
        while True:
            try:
                value = condition()
            except (OSError, LookupError, ValueError, ClusterError) as error:
                value, last = None, repr(error)
            else:
                last = repr(value)
            if value:
                return value
            if self.process.poll() is not None:
                raise self.failure(f"ended with {self.process.returncode} while waiting: {what}")
            if time.monotonic() > ends:
                raise self.failure(f"not within {deadline_s:g} s: {what} (last: {last})")
            time.sleep(POLL_S)

    def all_ready(self) -> bool:
        pods = self.pods()
        return bool(pods) and all(p.ready and not p.terminating for p in pods)

    def until_settled(self, deadline_s: float = 5.0) -> None:
        """Conservation on every worker: blocks add up, and nothing is held for anybody."""

        def settled() -> bool:
            return all(self._settled(pod) for pod in self.workers())

        self.until(settled, "no block active, granted or quarantined", deadline_s)

    def _settled(self, pod: Pod) -> bool:
        blocks = self.blocks(pod)
        if set(blocks) != set(BLOCK_STATES):
            raise self.failure(f"{pod.name}: states {sorted(blocks)}")
        return blocks["active"] == blocks["granted"] == blocks["quarantined"] == 0


def _is_ours(pid: int) -> bool:
    """Whether the process still runs and is one of the cluster's (numbers are reused)."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return any(part.startswith("pd_") for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def port_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def said_until_ready(process: subprocess.Popen[str], port: int) -> list[str]:
    """The lines of a command up to `ready:`; fails when it ends instead."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(f"ready: http://127.0.0.1:{port}/v1"):
            return said
    raise AssertionError(f"it ended: {''.join(said)}")


@contextmanager
def serving(
    spec: Mapping[str, Any], folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster that is ready inside the block and leaves nothing after it."""
    cluster = Cluster.start(spec, folder, env)
    try:
        yield cluster
    except BaseException:
        cluster.destroy()
        raise
    cluster.stop()


def spec(model: Path, dtype: str = "float32", **pools: Any) -> dict[str, Any]:
    """A PDCluster for a test: one prefill and one decode worker unless told otherwise."""
    source = {"hostPath": str(model)}
    return {
        "apiVersion": "pdcluster.dev/v1alpha1",
        "kind": "PDCluster",
        "metadata": {"name": "test"},
        "spec": {
            "model": {"name": "tiny", "source": source, "dtype": dtype},
            **(pools or {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}),
        },
    }
