"""An API server alone, for tests of what talks to it: etcd and kube-apiserver on loopback.

Real validation, CEL, server-side apply, watches and RBAC, but no nodes: no pod ever runs.
The processes die with the one that started them, even when that one is killed.
"""

import fcntl
import os
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from e2e.cluster import access, build, controlplane, packages, ports
from e2e.cluster.api import Api, Manifest, wait_for
from e2e.cluster.audit import Audit
from e2e.cluster.errors import ClusterError
from e2e.cluster.process import Child

START_DEADLINE_S = 90.0
START_TRIES = 3
YOUNG_S = 60.0
PREFIX = "pdcluster-envtest-"
EXISTING = "PDCLUSTER_TEST_EXISTING"
KUBECTL_DEADLINE_S = 60


@dataclass
class Kube:
    """A cluster's API as its administrator, whoever runs the cluster."""

    kubeconfig: Path
    folder: Path  # for files that tests need as long as the cluster

    def __post_init__(self) -> None:
        self.api = Api(self.kubeconfig)

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """What kubectl prints; ClusterError, with what it says, when it fails."""
        done = subprocess.run(
            [kubectl(), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=input,
            capture_output=True,
            text=True,
            timeout=KUBECTL_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def service_account(
        self,
        namespace: str,
        name: str,
        *,
        rules: Sequence[Manifest] = (),
        cluster_rules: Sequence[Manifest] = (),
    ) -> Path:
        """A new ServiceAccount with these RBAC rules; the path of its kubeconfig."""
        return access.service_account(
            self.api, self.folder, namespace, name, rules=rules, cluster_rules=cluster_rules
        )

    def kubeconfig_for(self, namespace: str, name: str) -> Path:
        """A kubeconfig for a ServiceAccount that is there."""
        return access.kubeconfig_for(self.api, self.folder, namespace, name)

    def close(self) -> None:
        self.api.close()


class ApiServer:
    """The API server as something that fails."""

    def __init__(self, child: Child, api: Api) -> None:
        self._child = child
        self._api = api

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """SIGKILL: connections break, new ones are refused."""
        self._child.kill()

    def start(self) -> None:
        """Starts it again and returns when it's ready."""
        self._child.start()
        self.wait_ready()

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        self._child.freeze()

    def thaw(self) -> None:
        self._child.thaw()

    def restore(self) -> None:
        """Whatever a test did to it: it serves again."""
        if self._child.running:
            self.thaw()
        self.start()

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        def ready() -> bool:
            self._child.check()
            return bool(self._api.call("GET", "/readyz", deadline_s=2) == "ok")

        wait_for("the API server is ready", ready, deadline_s)


class EnvTest(Kube):
    """An API server of our own."""

    def __init__(self, plane: controlplane.ControlPlane) -> None:
        super().__init__(plane.admin, plane.folder / "kubeconfigs")
        self._plane = plane
        self._etcd = Child(controlplane.etcd(plane))
        self._child = Child(controlplane.apiserver(plane))
        self.apiserver = ApiServer(self._child, self.api)

    @property
    def logs(self) -> Path:
        return self._plane.folder / "logs"

    def audit(self) -> Audit:
        """What is requested from now on."""
        return Audit(self._plane.audit_log)

    def start(self) -> None:
        self._etcd.start()
        self.apiserver.start()

    def stop(self) -> None:
        """At once: what it stored is thrown away."""
        self.close()
        self._child.kill()
        self._etcd.kill()

    @contextmanager
    def controllers(self, *names: str) -> Iterator[Child]:
        """Runs the controller manager meanwhile, with these of its controllers, such as
        garbage-collector-controller or statefulset-controller (whose pods stay Pending)."""
        child = Child(controlplane.manager(self._plane, names or ("*",)))
        child.start()
        try:
            url = f"https://{self._plane.address}:{self._plane.manager_port}/healthz"
            wait_for(
                "the controller manager is healthy",
                lambda: _healthy(url, self._plane.authority, child),
            )
            yield child
        finally:
            child.stop(grace_s=5)


def kubectl() -> str:
    """The kubectl that was built, or one on PATH."""
    if build.is_built("kube"):
        return str(build.built("kube") / "kubectl")
    if found := shutil.which("kubectl"):
        return found
    raise ClusterError("there is no kubectl; run: make kube-binaries")


def existing() -> Path | None:
    """The kubeconfig of a cluster that tests are to use instead of one of their own."""
    if os.environ.get(EXISTING) != "1":
        return None
    file = os.environ.get("KUBECONFIG", "")
    if not file or not Path(file).is_file():
        raise ClusterError(f"{EXISTING}=1 needs KUBECONFIG to name one file; it is {file!r}")
    return Path(file)


@contextmanager
def running(garbage_percent: int = 100) -> Iterator[EnvTest]:
    """An API server, gone afterwards; `garbage_percent` as for a `ControlPlane`."""
    need()
    with _folder() as folder:
        envtest = _started(folder, garbage_percent)
        try:
            yield envtest
        finally:
            envtest.stop()


def need() -> None:
    """The programs, or an error that says how to get them."""
    build.built("kube")
    packages.need(packages.CONTROL_PLANE)


def _started(folder: Path, garbage_percent: int) -> EnvTest:
    """Between finding free ports and listening on them, somebody may take one: tried again."""
    for attempt in range(1, START_TRIES + 1):
        api_port, etcd_port, peer_port, manager_port = ports.free(4)
        plane = controlplane.ControlPlane(
            folder=folder / str(attempt),
            address="127.0.0.1",
            api_port=api_port,
            etcd_port=etcd_port,
            etcd_peer_port=peer_port,
            manager_port=manager_port,
            garbage_percent=garbage_percent,
        )
        controlplane.prepare(plane)
        envtest = EnvTest(plane)
        try:
            envtest.start()
            return envtest
        except BaseException as error:
            envtest.stop()
            if attempt == START_TRIES or "address already in use" not in str(error):
                raise
    raise AssertionError("not reached")


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder, locked while we live; those that killed processes left are removed."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{PREFIX}*"):
        # A new one isn't locked for a moment.
        if not left.exists() or time.time() - left.stat().st_mtime < YOUNG_S:
            continue
        with suppress(OSError), (left / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with _locked(folder / "lock"):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[IO[str]]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def _healthy(url: str, authority: Path, child: Child) -> bool:
    child.check()
    context = ssl.create_default_context(cafile=str(authority))
    with urllib.request.urlopen(url, context=context, timeout=2) as answer:
        return bool(answer.status == 200)
