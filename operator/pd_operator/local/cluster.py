"""A PDCluster on this machine: the operator's reconcile over the small kubelet."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pd_operator import api, httpget, tlsplan
from pd_operator.certificates import Certifier
from pd_operator.journal import Journal
from pd_operator.keys import Key
from pd_operator.local import support
from pd_operator.local.container import LAST_WORDS_S, Backoff, Publication
from pd_operator.local.kubelet import Kubelet, Listener, Places
from pd_operator.local.network import ClientPort
from pd_operator.local.pod import Pod
from pd_operator.local.state import (
    DECISIONS,
    MemoryFolder,
    StateFolder,
    cache_root,
    state_root,
)
from pd_operator.modelfiles import DRAFT_MODEL, MODEL
from pd_operator.observed import Ref
from pd_operator.peertokens import TokenTerms
from pd_operator.podparts import Manifest, Settings
from pd_operator.podspec import ADMIN_PORT, HTTP_BIND_ENV, REVISION_LABEL, ROLE_LABEL, ROUTER
from pd_operator.queue import Queue
from pd_operator.reconcile import Listener as ReconcileListener
from pd_operator.reconcile import Pace, Reconciler, World
from pd_operator.replicas import Write
from pd_operator.routerparts import NO_LIVE_PAGE
from pd_operator.scaling.explaining import Told, line
from pd_operator.status import timestamp

_PACE = Pace(glance_s=5.0, status_s=0.0)
"""Here one cluster is looked at by one person, and its status costs nothing."""
_ABSENT = frozenset(
    {
        *("PDPool", "PodDisruptionBudget", "NetworkPolicy"),
        *("ServiceAccount", "PodMonitor", "PrometheusRule", "Certificate", "Issuer"),
    }
)
"""Kinds that mean nothing on one machine."""
_SAVE_S = 0.2
_READY_S = 0.1
STOP_GRACE_S = 10.0
"""How long all pods together may take to end when the cluster goes."""
ANSWERS_S = STOP_GRACE_S - LAST_WORDS_S
"""How much of it running answers have; then they fail, which their clients are told."""


@dataclass(frozen=True, slots=True)
class Options:
    """Where a cluster runs on this machine, and with which programs."""

    port: int = 8000
    file: str = ""
    state: Path = field(default_factory=state_root)
    cache: Path = field(default_factory=cache_root)
    settings: Settings = field(default_factory=Settings)
    backoff: Backoff = field(default_factory=Backoff)
    gives_up: bool = False
    """Whether a pod whose model or settings have to be others stays ended: nobody can edit what
    it was made of. Else it's started again, as on Kubernetes."""
    certificate_terms: tlsplan.Terms = field(default_factory=tlsplan.Terms)
    token_terms: TokenTerms = field(default_factory=TokenTerms)


class LocalBackend:
    """The verbs of `reconcile.Backend` over a kubelet in this process."""

    def __init__(self, kubelet: Kubelet, status_written: Callable[[], None]) -> None:
        self._kubelet = kubelet
        self._status_written = status_written
        self.documents: dict[Key, Manifest] = {}

    async def observe(self, key: Key) -> World:
        return World(self.documents.get(key), tuple(self._kubelet.objects()), _ABSENT)

    async def apply(self, key: Key, manifest: Manifest) -> None:
        del key
        self._kubelet.apply(manifest)

    async def provide(self, key: Key, manifest: Manifest) -> None:
        """Here Secrets can be read: nobody asks for this."""
        await self.apply(key, manifest)

    async def scale(self, key: Key, ref: Ref, replicas: int) -> None:
        del key
        self._kubelet.scale(ref, replicas)

    async def delete(self, key: Key, ref: Ref) -> None:
        del key
        self._kubelet.delete(ref)

    async def write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None:
        """An object that has been replaced meanwhile keeps its own status."""
        if self.documents.get(key) is document:
            document["status"] = new
            self._status_written()

    async def write_replicas(self, key: Key, write: Write) -> None:
        """There are no PDPools here: the status says a pool's size."""


class LocalCluster:
    """From the first `submit` on it runs what the document says; `close` ends all of it.

    Raises AlreadyRunning or AddressTaken when it can't have its name or its port.
    """

    def __init__(self, name: str, options: Options, listener: Listener) -> None:
        self._options = options
        self._listener = listener
        with ExitStack() as claims:
            self._port = claims.enter_context(closing(ClientPort(options.port)))
            self._folder = claims.enter_context(closing(StateFolder(options.state, name)))
            memory = claims.enter_context(closing(MemoryFolder(name)))
            self._kubelet = Kubelet(
                Places(self._folder.path, memory.path, self._shared_folders()),
                _Relay(self),
                publications=(self._publication(),),
                backoff=options.backoff,
                gives_up=options.gives_up,
            )
            self._claims = claims.pop_all()
        self._refused = ""
        self._given_up = asyncio.Event()
        self._backend = LocalBackend(self._kubelet, self._save_soon)
        journal = Journal(self.logs / DECISIONS)
        journal.clear()  # those of an `up` before
        reconciler = Reconciler(
            self._backend,
            options.settings,
            pace=_PACE,
            listener=_Decisions(journal),
            certifier=Certifier(options.certificate_terms),
            token_terms=options.token_terms,
        )
        self._queue = Queue(reconciler.reconcile)
        self._key: Key | None = None
        self._cluster: api.Cluster | None = None
        self._save_timer: asyncio.TimerHandle | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.port}/v1"

    @property
    def port(self) -> int:
        return self._port.port

    @property
    def logs(self) -> Path:
        return self._folder.path / "logs"

    @property
    def pods(self) -> tuple[Pod, ...]:
        return self._kubelet.pods

    def router_admins(self) -> list[tuple[str, int]]:
        """Where the routers that are ready answer about metrics and requests."""
        pods = [pod for pod in self._kubelet.pods if pod.labels.get(ROLE_LABEL) == ROUTER]
        return [(pod.ip, ADMIN_PORT) for pod in pods if pod.ready and not pod.terminating]

    def live_page(self) -> str:
        """Where to see it live, by a router that is ready; "" where nobody shows it."""
        shown = self._shows_live_page()
        return next((_page(host) for host, _ in self.router_admins()), "") if shown else ""

    def _shows_live_page(self) -> bool:
        flags = self._cluster.router.flags if self._cluster else ()
        return self._options.settings.live_page and NO_LIVE_PAGE not in flags

    def document(self) -> Manifest:
        """The object with its status; empty before the first `submit`."""
        return self._backend.documents[self._key] if self._key else {}

    def refuse(self, why: str) -> None:
        """Notes down, for whoever asks for the status, that the file as it is now isn't in
        effect; "" when it is again."""
        if why != self._refused:
            self._refused = why
            self._save_soon()

    def submit(self, document: Mapping[str, Any]) -> api.Cluster:
        """Takes a new version of the object. InvalidCluster: what runs stays as it is."""
        cluster = api.parse(document)
        support.check(cluster)
        if self._cluster is not None:
            api.check_update(self._cluster, cluster)
        before = self.document()
        key = Key(cluster.namespace, cluster.name)
        if before.get("spec") == document["spec"]:
            return cluster
        metadata = before.get("metadata") or {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": timestamp(datetime.now(UTC)),
            "generation": 0,
        }
        self._backend.documents[key] = {
            "apiVersion": api.API_VERSION,
            "kind": api.KIND,
            "metadata": {
                **metadata,
                "name": cluster.name,
                "namespace": cluster.namespace,
                "generation": metadata["generation"] + 1,
            },
            "spec": document["spec"],
            "status": before.get("status", {}),
        }
        self._key, self._cluster = key, cluster
        self._queue.add(key)
        return cluster

    async def run(self) -> None:
        """Reconciles until cancelled."""
        await self._queue.run()

    async def wait_ready(self) -> None:
        """Until every pod is ready and a request would succeed; other commands know it, too."""
        while not (is_ready(self.document()) and await self._answers()):
            await asyncio.sleep(_READY_S)
        self._save()

    async def wait_given_up(self) -> str:
        """Until a pod stays ended because no restart would help; its last words."""
        await self._given_up.wait()
        return next((pod.given_up for pod in self.pods if pod.given_up), "")

    async def _answers(self) -> bool:
        try:
            response = await httpget.get("127.0.0.1", self._port.port, "/ready", timeout_s=2.0)
        except httpget.GetFailed:
            return False
        return response.status == 200

    def hurry(self) -> None:
        """Ends what is ending without any grace."""
        self._kubelet.hurry()

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """No process, port, state or file in shared memory is left; the logs are."""
        await self._kubelet.close(grace_s)
        if self._save_timer is not None:
            self._save_timer.cancel()
        self._claims.close()

    def on_change(self) -> None:
        """The kubelet's word that something is different."""
        if self._key is not None:
            self._queue.add(self._key)
        self._save_soon()
        if any(pod.given_up for pod in self.pods):
            self._given_up.set()
        self._listener.changed()

    def relay(self) -> Listener:
        return self._listener

    def _save_soon(self) -> None:
        """Many changes in a moment are written once."""
        if self._save_timer is None:
            loop = asyncio.get_running_loop()
            self._save_timer = loop.call_later(_SAVE_S, self._save)

    def _save(self) -> None:
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save_timer = None
        document = self.document()
        if document:
            self._folder.write(
                {
                    "name": document["metadata"]["name"],
                    "namespace": document["metadata"]["namespace"],
                    "file": self._options.file,
                    "url": self.url,
                    "live_page": self.live_page(),
                    "refused": self._refused,
                    "document": document,
                    "pods": [_pod_state(pod) for pod in self._kubelet.pods],
                }
            )

    def _shared_folders(self) -> dict[str, Path]:
        """Volumes that are the user's here: models are converted once for all clusters,
        and what libraries cache below the home folder is kept as well."""
        models = self._options.cache / "models"
        models.mkdir(parents=True, exist_ok=True)
        return {
            MODEL.models_volume: models,
            DRAFT_MODEL.models_volume: models,
            "home": Path.home(),
        }

    def _publication(self) -> Publication:
        address = ("127.0.0.1", self._port.port)
        return Publication(ROUTER, "http", address, HTTP_BIND_ENV, ("--reuse-port",))


def _page(host: str) -> str:
    return f"http://{host}:{ADMIN_PORT}/"


def is_ready(document: Manifest) -> bool:
    """Whether what runs is what the present version of the document says, and is ready."""
    status = document.get("status", {})
    if status.get("observedGeneration") != document["metadata"]["generation"]:
        return False
    conditions = {one["type"]: one for one in status["conditions"]}
    # It is ready while only routers are replaced, and then the old ones are still there.
    rolls = conditions["Progressing"]["reason"] == "RollingOut"
    return conditions["Ready"]["status"] == "True" and not rolls


class _Decisions(ReconcileListener):
    """Keeps why pools have the sizes that they have."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def told(self, one: Told) -> None:
        self._journal.add(line(one))


class _Relay(Listener):
    """Lets the cluster hear of changes before its listener does."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def changed(self) -> None:
        self._cluster.on_change()

    def say(self, pod: str, text: str) -> None:
        self._cluster.relay().say(pod, text)

    def output(self, pod: str, line: str) -> None:
        self._cluster.relay().output(pod, line)


def _pod_state(pod: Pod) -> dict[str, Any]:
    document = pod.document()
    statuses = document["status"]["containerStatuses"]
    pool = pod.labels.get(ROLE_LABEL, "")
    return {
        "name": pod.name,
        "pool": pool,
        "pid": pod.pid,
        "ip": pod.ip,
        "ready": pod.ready,
        "terminating": pod.terminating,
        "restarts": sum(item["restartCount"] for item in statuses),
        "revision": pod.labels.get(REVISION_LABEL, ""),
        "log": pod.log,
        "admin" if pool == ROUTER else "health": f"http://{pod.ip}:{ADMIN_PORT}",
    }
