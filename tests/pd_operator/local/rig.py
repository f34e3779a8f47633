"""A kubelet in a test: fake containers, recorded events, waiting for what is to happen."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_operator.local.container import Backoff, Publication
from pd_operator.local.kubelet import Kubelet, Listener, Places
from pd_operator.local.pod import Pod
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest

FAKE = str(Path(__file__).with_name("fake.py"))
FAST = Backoff(first_s=0.05, last_s=0.2, forget_after_s=60.0)
DEADLINE_S = 30.0


@dataclass
class Rig(Listener):
    """`until` waits for a condition that is looked at whenever something changes."""

    kubelet: Kubelet = field(init=False)
    said: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def changed(self) -> None:
        self._news.set()

    def say(self, pod: str, text: str) -> None:
        self.said.append(f"{pod}: {text}")
        self._news.set()

    def output(self, pod: str, line: str) -> None:
        del pod
        self.lines.append(line)
        self._news.set()

    async def until(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                while not (found := condition()):
                    self._news.clear()
                    # Not all that a test looks at is news: a file's content isn't.
                    await self._nudged(0.1)
                return found
        except TimeoutError:
            raise AssertionError(f"didn't happen; said: {self.said[-20:]}") from None

    async def _nudged(self, at_most_s: float) -> None:
        try:
            async with asyncio.timeout(at_most_s):
                await self._news.wait()
        except TimeoutError:
            return

    def pod(self, name: str) -> Pod:
        return next(pod for pod in self.kubelet.pods if pod.name == name)

    def names(self) -> list[str]:
        return sorted(pod.name for pod in self.kubelet.pods)

    def ready(self, *names: str) -> bool:
        found = {pod.name for pod in self.kubelet.pods if pod.ready and not pod.terminating}
        return found == set(names)

    def pid(self, name: str) -> int:
        found = self.pod(name).pid
        assert found is not None
        return found

    def container(self, name: str, kind: str = "containerStatuses") -> dict[str, Any]:
        """The status of a pod's first container."""
        found: dict[str, Any] = self.pod(name).document()["status"][kind][0]
        return found


@asynccontextmanager
async def kubelet(
    folder: Path,
    *,
    shared: dict[str, Path] | None = None,
    publications: tuple[Publication, ...] = (),
    backoff: Backoff = FAST,
    gives_up: bool = False,
) -> AsyncIterator[Rig]:
    rig = Rig()
    places = Places(folder / "state", folder / "memory", shared or {})
    rig.kubelet = Kubelet(
        places, rig, publications=publications, backoff=backoff, gives_up=gives_up
    )
    try:
        yield rig
    finally:
        await rig.kubelet.close(grace_s=1.0)


def container(**fields: Any) -> Manifest:
    """A fake engine; `env` may be a plain dict."""
    env = [{"name": name, "value": value} for name, value in fields.pop("env", {}).items()]
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {
        "name": "engine",
        "image": "engine:1",
        "command": [sys.executable, FAKE, "engine"],
        "args": ["--host=$(POD_IP)", "--health-port=9090"],
        "env": [address, *env],
        "ports": [{"name": "health", "containerPort": 9090}],
        "readinessProbe": probe("/readyz"),
        **fields,
    }


def probe(path: str, **fields: Any) -> Manifest:
    get = {"path": path, "port": "health"}
    return {"httpGet": get, "periodSeconds": 0.1, "timeoutSeconds": 0.5, **fields}


def workload(
    kind: str = "StatefulSet",
    name: str = "web",
    replicas: int = 1,
    containers: list[Manifest] | None = None,
    **pod: Any,
) -> Manifest:
    spec = {"terminationGracePeriodSeconds": 5, "containers": containers or [container()], **pod}
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def service(name: str = "web", app: str = "web", *, everyone: bool = True) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": everyone,
            "selector": {"app": app},
            "ports": [],
        },
    }


WEB = Ref("StatefulSet", "web")
