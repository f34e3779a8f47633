"""The line from object to children and status, over a backend of dicts: creation, no write
when nothing changed, an unreadable object, a failing backend, samples from ready routers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pd_operator import peertokens
from pd_operator.api import Cluster, parse
from pd_operator.keys import Key
from pd_operator.measured import Counters, RouterReading, Samples
from pd_operator.observed import Ref, observe
from pd_operator.peertokens import TokenTerms
from pd_operator.pki import make_token
from pd_operator.podparts import Manifest, Settings
from pd_operator.reconcile import MISSING_S, RESYNC_S, UNSAID_S, Pace, Reconciler, World
from pd_operator.replicas import MARK, Write, pool_statuses
from tests.pd_operator.objects import SETTINGS, cluster, document, rendered, running

KEY = Key("default", "chat")
POOL_OBJECTS = 4  # a StatefulSet and a Service for each of two pools
TOKEN = 1


@dataclass
class Backend:
    """Objects in a dict; every write is recorded."""

    document: Manifest | None
    objects: dict[Ref, Manifest] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    fails: bool = False

    def settle(self, of: Cluster | None = None, settings: Settings = SETTINGS) -> None:
        """All that is desired is there and ready, and what PDPools say is right."""
        of = of or cluster()
        token = peertokens.keep(of, {}, TokenTerms(), NOW, make_token()).manifest
        for item in [token, *running(rendered(of, settings))]:
            if item["kind"] == "PDPool":
                annotations = {**item["metadata"]["annotations"], MARK: "1"}
                item = {**item, "metadata": {**item["metadata"], "annotations": annotations}}
                item["spec"] = {"replicas": 1}
            self.objects[Ref(item["kind"], item["metadata"]["name"])] = item
        for item, status in pool_statuses(of, observe(self.objects.values())):
            item["status"] = status

    async def observe(self, key: Key) -> World:
        assert key == KEY
        return World(self.document, tuple(self.objects.values()))

    async def apply(self, key: Key, manifest: Manifest) -> None:
        del key
        if self.fails:
            raise TimeoutError("the API server is away")
        ref = Ref(manifest["kind"], manifest["metadata"]["name"])
        self.objects[ref] = manifest
        self.writes.append(f"apply {ref.kind}")

    async def scale(self, key: Key, ref: Ref, replicas: int) -> None:
        del key
        manifest = self.objects[ref]
        spec = {**manifest["spec"], "replicas": replicas}
        self.objects[ref] = {**manifest, "spec": spec}
        self.writes.append(f"scale {ref.kind}")

    async def delete(self, key: Key, ref: Ref) -> None:
        del key
        del self.objects[ref]
        self.writes.append(f"delete {ref.kind}")

    async def write_replicas(self, key: Key, write: Write) -> None:
        del key
        metadata = write.pool["metadata"]
        annotations = {**metadata.get("annotations", {}), MARK: write.mark}
        self.objects[Ref("PDPool", write.name)] = {
            **write.pool,
            "metadata": {**metadata, "annotations": annotations},
            "spec": {"replicas": write.replicas},
        }
        self.writes.append(f"replicas {write.name} {write.replicas}")

    async def write_status(self, key: Key, document: Manifest, new: dict[str, Any]) -> None:
        del key
        document["status"] = new
        self.writes.append("status")


class Marked(Backend):
    """One that tells when nothing has changed."""

    async def observe(self, key: Key) -> World:
        return replace(await super().observe(key), mark=(str(len(self.writes)),))


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def reconciler(
    backend: Backend, asked: list[str] | None = None, clock: Callable[[], datetime] = lambda: NOW
) -> Reconciler:
    async def read_samples(routers: Iterable[str]) -> Samples:
        if asked is not None:
            asked.extend(routers)
        return Samples()

    return Reconciler(backend, SETTINGS, read_samples=read_samples, clock=clock)


def ready(body: Manifest) -> str:
    return next(one["status"] for one in body["status"]["conditions"] if one["type"] == "Ready")


def test_creation_then_no_writes(run) -> None:
    backend = Backend(document())
    made = reconciler(backend)
    assert run(made.reconcile(KEY)) == UNSAID_S  # what runs of the PDPools is still to be said
    applied = [write for write in backend.writes if write.startswith("apply")]
    assert len(applied) == len(rendered(cluster()).surroundings) + POOL_OBJECTS + TOKEN

    assert run(made.reconcile(KEY)) == MISSING_S  # nobody makes pods here
    backend.writes.clear()
    run(made.reconcile(KEY))
    assert backend.writes == []


def test_pods_that_nobody_makes_are_told_without_any_event(run) -> None:
    body, now = document(), NOW
    made = reconciler(Marked(body), clock=lambda: now)
    while run(made.reconcile(KEY)) < MISSING_S:
        pass
    for seconds, reason, again_s in ((0, "Starting", MISSING_S), (30, "PodMissing", RESYNC_S)):
        now = NOW + timedelta(seconds=seconds)
        assert run(made.reconcile(KEY)) == again_s
        assert {one["reason"] for one in body["status"]["conditions"][4:6]} == {reason}


def test_pods_make_it_ready_and_routers_are_asked(run) -> None:
    body = document()
    backend = Backend(body)
    backend.settle()
    asked: list[str] = []
    assert run(reconciler(backend, asked).reconcile(KEY)) == Pace().glance_s
    assert backend.writes == ["status"]
    assert ready(body) == "True"
    assert asked == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("told", "again_s"),
    [
        (Samples(routers=(RouterReading("r", 0, 1, Counters(), clients=0),)), Pace().sample_s),
        (Samples(routers=(RouterReading("r", 0, 1, Counters(), clients=1),)), Pace().glance_s),
        (Samples(silent=1), Pace().sample_s),
    ],
)
def test_routers_that_let_nobody_in_are_asked_again_soon(
    run, told: Samples, again_s: float
) -> None:
    async def read_samples(routers: Iterable[str]) -> Samples:
        del routers
        return told

    kubernetes = Settings(host_paths=False)
    body = document(**{"spec.security.apiKeys": {"secret": "chat-keys"}})
    backend = Backend(body)
    backend.settle(parse(body), kubernetes)
    made = Reconciler(backend, kubernetes, read_samples=read_samples, clock=lambda: NOW)
    assert run(made.reconcile(KEY)) == again_s
    assert ready(body) == str(told.locked is not True)


def test_an_edit_of_the_replicas_says_so_before_anything_follows(run) -> None:
    backend = Backend(document(**{"spec.decode.replicas": 3}))
    backend.settle()
    run(reconciler(backend).reconcile(KEY))
    assert backend.writes == ["replicas chat-decode 3", "scale StatefulSet", "status"]


def test_what_runs_of_pools_is_said_though_each_look_has_something_to_do(run) -> None:
    """Somebody undoes one of ours after each look; an HPA reads what the PDPool says."""
    backend = Backend(document())
    made = reconciler(backend)
    victim = Ref("Service", "chat-control")
    for _ in range(2):
        assert backend.objects.pop(victim, None) is not None or not backend.objects
        backend.writes.clear()
        run(made.reconcile(KEY))
        assert "apply Service" in backend.writes
    pools = [one for ref, one in backend.objects.items() if ref.kind == "PDPool"]
    assert backend.writes.count("status") == len(pools)


def test_an_unreadable_object_leaves_what_runs(run) -> None:
    backend = Backend(document(**{"spec.decode.replicas": "two"}))
    backend.objects[Ref("StatefulSet", "x")] = {
        "kind": "StatefulSet",
        "metadata": {"name": "x"},
        "spec": {},
    }
    run(reconciler(backend).reconcile(KEY))
    assert backend.writes == ["status"]
    assert backend.document is not None
    assert ready(backend.document) == "False"


def test_an_object_that_is_gone_is_left_alone(run) -> None:
    backend = Backend(None)
    assert run(reconciler(backend).reconcile(KEY)) is None
    assert backend.writes == []


def test_a_failing_backend_is_the_queues_affair(run) -> None:
    backend = Backend(document(), fails=True)
    with pytest.raises(TimeoutError):
        run(reconciler(backend).reconcile(KEY))
    backend.fails = False
    run(reconciler(backend).reconcile(KEY))
    assert len(backend.objects) == len(rendered(cluster()).surroundings) + POOL_OBJECTS + TOKEN
