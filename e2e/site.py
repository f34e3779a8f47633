"""A cluster with our operator in it, as a platform engineer has it: kubectl, helm, files.

PDClusters of tests use the thin engine image: torch comes from this machine's environment,
through a claim on a volume that is a folder of the node.
"""

import json
import re
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from e2e.cluster import build, claims, cluster, images, netns
from e2e.cluster.api import Api, Manifest, wait_for
from e2e.cluster.envtest import Kube, kubectl
from e2e.cluster.errors import ClusterError
from e2e.cluster.layout import Layout

SYSTEM = "pdcluster-system"
_OPERATOR = ("-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")
RELEASE = "pdcluster"
CHART = images.ROOT / "charts" / "pdcluster"
PDCLUSTER = ("pdcluster.dev/v1alpha1", "PDCluster")
PDPOOL = ("pdcluster.dev/v1alpha1", "PDPool")
HTTP_PORT = 8000
HELM_DEADLINE_S = 300
FORWARD_DEADLINE_S = 60
READY_DEADLINE_S = 420.0
GONE_DEADLINE_S = 180.0
PACKAGES, MODEL = "packages", "model"


@dataclass
class Site:
    """One cluster; `kube` is its administrator."""

    kube: Kube
    layout: Layout

    @property
    def api(self) -> Api:
        return self.kube.api

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        return self.kube.kubectl(*arguments, input=input)

    @contextmanager
    def forwarded(self, namespace: str, target: str, port: int) -> Iterator[int]:
        """The local port at which `kubectl port-forward` serves one of a target's."""
        command = [
            kubectl(), "--kubeconfig", str(self.kube.kubeconfig), "port-forward",
            "-n", namespace, target, f":{port}", "--address=127.0.0.1",
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            deadline = threading.Timer(FORWARD_DEADLINE_S, process.kill)
            deadline.start()
            try:
                line = process.stdout.readline()
                deadline.cancel()
                found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+) ", line)
                if found is None:
                    raise ClusterError(f"kubectl port-forward {target}: {line.strip()}")
                yield int(found[1])
            finally:
                deadline.cancel()
                process.terminate()

    def helm(self, *arguments: str) -> str:
        done = subprocess.run(
            [
                str(build.built("helm") / "helm"),
                "--kubeconfig",
                str(self.kube.kubeconfig),
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=HELM_DEADLINE_S,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def install(self, *more: str, chart: Path = CHART) -> str:
        """`helm upgrade --install` of a chart with our own images."""
        pairs = {
            "image.repository": "pdcluster.test/operator",
            "image.tag": "dev",
            "image.pullPolicy": "Never",
            "engine.image": images.IMAGES["engine-thin"].reference,
            "router.image": images.IMAGES["router"].reference,
        }
        settings = [part for name, value in pairs.items() for part in ("--set", f"{name}={value}")]
        return self.helm(
            "upgrade", "--install", RELEASE, str(chart), "--namespace", SYSTEM,
            "--create-namespace", "--wait", "--timeout", "120s", *settings, *more,
        )  # fmt: skip

    # ---- namespaces and volumes ---------------------------------------------------

    @contextmanager
    def namespace(self, model: Path | None = None, claim: str = MODEL) -> Iterator[str]:
        """A namespace under the `restricted` Pod Security Standard, with a claim on the
        packages and, where given, one on a model's folder."""
        name = f"test-{secrets.token_hex(3)}"
        self.api.create(restricted(name))
        volumes: list[str] = []
        try:
            volumes.append(claims.claim(self.api, name, PACKAGES, images.host_packages()))
            if model is not None:
                folder = claims.readable(model, self.layout.folder / "models" / model.name)
                volumes.append(claims.claim(self.api, name, claim, folder))
            yield name
        finally:
            self.api.delete("v1", "Namespace", name)
            wait_for(
                f"the end of namespace {name}",
                lambda: self.api.find("v1", "Namespace", name) is None,
                GONE_DEADLINE_S,
            )
            for volume in volumes:
                self.api.delete("v1", "PersistentVolume", volume)

    # ---- PDClusters ---------------------------------------------------------------

    def operators(self) -> dict[str, Manifest]:
        """The operator's pods, by uid."""
        found = json.loads(self.kubectl("get", "pods", *_OPERATOR, "-o", "json"))
        return {pod["metadata"]["uid"]: pod for pod in found["items"]}

    def kill_operator(self) -> None:
        self.kubectl("delete", "pods", *_OPERATOR, "--grace-period=0", "--force")

    def pdcluster(self, namespace: str, name: str) -> Manifest:
        return self.api.get(*PDCLUSTER, name, namespace)

    def wait_ready(self, namespace: str, name: str, deadline_s: float = READY_DEADLINE_S) -> None:
        """Until `kubectl wait --for=condition=Ready` says so; else what one would look at."""
        try:
            wait_for(f"{name} to be ready", lambda: self.is_ready(namespace, name), deadline_s)
        except TimeoutError as error:
            raise ClusterError(f"{error}\n{self.describe(namespace)}") from None
        self.kubectl("wait", "pdc", name, "-n", namespace, "--for=condition=Ready")

    def is_ready(self, namespace: str, name: str) -> bool:
        """For the object as it is now, routers that are replaced included."""
        made = self.pdcluster(namespace, name)
        status = made.get("status", {})
        found = {one["type"]: one for one in status.get("conditions", [])}
        if status.get("observedGeneration") != made["metadata"]["generation"]:
            return False
        rolls = found["Progressing"]["reason"] == "RollingOut"
        return bool(found["Ready"]["status"] == "True" and not rolls)

    def describe(self, namespace: str) -> str:
        """What one would look at: objects, pods, events."""
        parts = [
            ("get", "pdc", "-o", "yaml"),
            ("get", "all,pdp", "-o", "wide"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("logs", "-l", "app.kubernetes.io/name=pdcluster", "--tail=15", "--prefix"),
        ]
        return "\n".join(self._try(*part, "-n", namespace) for part in parts)

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)[-6000:]
        except (ClusterError, subprocess.TimeoutExpired) as error:
            return str(error)

    def condition(self, namespace: str, name: str, kind: str) -> dict[str, Any]:
        conditions = self.pdcluster(namespace, name).get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def address(self, namespace: str, name: str) -> tuple[str, int]:
        """Of the Service that clients use."""
        service = self.api.get("v1", "Service", f"{name}-router", namespace)
        return service["spec"]["clusterIP"], HTTP_PORT

    def pods(self, namespace: str, role: str = "") -> list[Manifest]:
        labels = f"pdcluster.dev/role={role}" if role else "app.kubernetes.io/name=pdcluster"
        return self.api.items("v1", "Pod", namespace, labels)

    # ---- trouble ------------------------------------------------------------------

    def processes(self, pod: Manifest) -> list[psutil.Process]:
        """The pod's own, as the machine sees them."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("POD_NAME") == pod["metadata"]["name"]:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def signal(self, pod: Manifest, number: signal.Signals) -> None:
        found = self.processes(pod)
        if not found:
            raise ClusterError(f"pod {pod['metadata']['name']} has no process to be seen")
        for process in found:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def enter(self, *command: str) -> None:
        """A command in the cluster's network."""
        argv = [*netns.enter(self.layout), *command]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def is_ready(pod: Manifest) -> bool:
    """A pod that serves, and isn't about to go."""
    conditions = pod.get("status", {}).get("conditions", [])
    serves = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return serves and "deletionTimestamp" not in pod["metadata"]


@contextmanager
def running(name: str) -> Iterator[Site]:
    """A cluster of this name with the operator; all of it goes at the end."""
    layout = Layout(name)
    build.build(build.PROGRAMS["helm"])
    cluster.up(layout)
    try:
        images.provide(layout)
        with tempfile.TemporaryDirectory() as folder:
            kube = Kube(cluster.kubeconfig_of(layout), Path(folder))
            try:
                site = Site(kube, layout)
                site.install()
                yield site
            finally:
                kube.close()
    finally:
        cluster.down(layout)


def restricted(name: str) -> Manifest:
    """A namespace that enforces the `restricted` Pod Security Standard."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def worker_template() -> dict[str, Any]:
    """For the thin image: its packages come by a claim."""
    return {
        "spec": {
            "volumes": [{"name": PACKAGES, "persistentVolumeClaim": {"claimName": PACKAGES}}],
            "containers": [
                {
                    "name": "engine",
                    "imagePullPolicy": "Never",
                    "volumeMounts": [
                        {
                            "name": PACKAGES,
                            "mountPath": "/opt/pdcluster/packages",
                            "readOnly": True,
                        }
                    ],
                }
            ],
        }
    }


def pool(replicas: int, **more: Any) -> dict[str, Any]:
    """A pool of workers of one thread, each with one of the node's GPUs."""
    return {
        "replicas": replicas,
        "accelerator": {"resource": "nvidia.com/gpu"},
        "engine": {"threads": 1, "kvCacheTokens": 8192, **more.pop("engine", {})},
        "template": worker_template(),
        **more,
    }


def document(name: str, source: dict[str, Any], **spec: Any) -> Manifest:
    """A PDCluster: 2 prefill and 3 decode workers unless told otherwise."""
    return {
        "apiVersion": PDCLUSTER[0],
        "kind": PDCLUSTER[1],
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "tiny", "source": source, "dtype": "float32"},
            "slo": {"ttft": {"target": "5s"}, "tpot": {"target": "1s"}},
            "prefill": pool(2),
            "decode": pool(3),
            "router": {
                "replicas": 2,
                "template": {
                    "spec": {"containers": [{"name": "router", "imagePullPolicy": "Never"}]}
                },
            },
            "rollout": {"drainTimeout": "30s"},
            **spec,
        },
    }


CLAIMED_MODEL = {"persistentVolumeClaim": {"claimName": MODEL}}
BUILTIN_MODEL = {"builtin": "smollm2-135m-instruct"}


def demo(api: Api, namespace: str) -> Manifest:
    """Makes the namespace with what the thin image needs; gives a PDCluster for it."""
    api.apply(restricted(namespace))
    claims.claim(api, namespace, PACKAGES, images.host_packages())
    model = {"name": "smollm2", "source": BUILTIN_MODEL, "dtype": "float32"}
    made = document("demo", BUILTIN_MODEL, model=model, prefill=pool(1), decode=pool(1))
    made["metadata"]["namespace"] = namespace
    made["spec"]["router"]["replicas"] = 1
    return made
