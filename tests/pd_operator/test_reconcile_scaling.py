"""The line with pools that scale: routers' readings move a pool by way of its PDPool, the status
tells why, external scaling is followed, foreign values are set back, a crash forgets nothing.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pd_operator.keys import Key
from pd_operator.measured import Counters, RouterReading, Samples, WorkerReading
from pd_operator.notices import Notice
from pd_operator.observed import Ref
from pd_operator.podparts import Manifest
from pd_operator.reconcile import Listener, Pace, Reconciler
from pd_operator.scaler import Scaler
from pd_operator.teller import Teller
from tests.pd_operator.objects import SETTINGS, document
from tests.pd_operator.test_reconcile import KEY, Backend

SLO: dict[str, Any] = {
    "spec.slo": {"ttft": {"target": "1s"}},
    "spec.prefill.replicas": ...,
    "spec.prefill.scaling": {"maxReplicas": 6},
}
EXTERNAL: dict[str, Any] = {
    "spec.prefill.replicas": ...,
    "spec.prefill.scaling": {"maxReplicas": 6, "mode": "External"},
}
POOL = Ref("PDPool", "chat-prefill")


@dataclass
class Told(Listener):
    """Events, as texts."""

    reasons: list[str] = field(default_factory=list)

    def notices(self, document: Manifest, found: Sequence[Notice]) -> None:
        del document
        self.reasons += [one.reason for one in found]


class Heard(Teller):
    """What routers would be told, look by look."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Any] = {}
        self.routers: set[str] = set()

    def tell(self, key: Key, routers: Mapping[str, str]) -> None:
        self.last = json.loads(self._known[key].body())
        self.routers = set(routers.values())


@dataclass
class Line:
    """A reconciler over settled objects, with routers that tell of so many requests a second."""

    backend: Backend
    run: Any
    requests: float = 0.0
    now: float = 0.0
    count: float = 0.0
    told: Told = field(default_factory=Told)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The operator's process is another one."""

        async def read_samples(routers: Iterable[str]) -> Samples:
            del routers
            counters = Counters(
                arrived_requests=self.count,
                arrived_sequences=self.count,
                arrived_tokens=1000 * self.count,
            )
            worker = WorkerReading(
                "chat-p-0", "e", "prefill", self.now, heartbeats=9, prefill_tokens_per_s=10_000
            )
            router = RouterReading("a", self.now, 1000.0 + self.now, counters)
            return Samples(routers=(router,), workers=(worker,))

        self.heard = Heard()
        start = datetime(2026, 1, 1, tzinfo=UTC)
        self.made = Reconciler(
            self.backend,
            SETTINGS,
            listener=self.told,
            pace=Pace(status_s=0.0),
            read_samples=read_samples,
            clock=lambda: start + timedelta(seconds=self.now),
            scaler=Scaler[Key](lambda: self.now),
            teller=self.heard,
        )

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 5.0
            self.count += 5.0 * self.requests
            self.run(self.made.reconcile(KEY))

    @property
    def replicas(self) -> tuple[int, int]:
        """In the PDPool, and in the StatefulSet."""
        sets = [
            item["spec"]["replicas"]
            for ref, item in self.backend.objects.items()
            if ref.kind == "StatefulSet" and ref.name.startswith("chat-p-")
        ]
        [in_set] = sets
        return self.backend.objects[POOL]["spec"]["replicas"], in_set

    def scale(self, value: int) -> None:
        """kubectl scale."""
        item = self.backend.objects[POOL]
        self.backend.objects[POOL] = {**item, "spec": {"replicas": value}}

    def status(self) -> Any:
        assert self.backend.document is not None
        return self.backend.document["status"]

    def condition(self) -> str:
        conditions = {one["type"]: one for one in self.status()["conditions"]}
        return str(conditions["ScalingActive"]["reason"])


@pytest.fixture
def line(run) -> Line:
    made = Line(Backend(document(**SLO)), run)
    made.backend.settle()
    return made


def test_load_moves_a_pool_and_the_status_says_why(line: Line) -> None:
    line.look(2)
    assert line.condition() == "FollowsSLO"
    line.requests = 30.0
    line.look(4)
    in_pool, in_set = line.replicas
    assert 1 < in_pool == in_set <= 6
    decision = line.status()["prefill"]["decision"]
    assert decision["replicas"] == in_pool
    assert decision["reason"] in ("Burst", "MoreDemand")
    assert "tokens/s" in decision["message"]
    assert "ScaledUp" in line.told.reasons
    line.look(20)  # within bounds now, and nothing is left to write
    line.backend.writes.clear()
    line.look(5)
    assert line.backend.writes == []


def test_routers_are_told_why_and_by_an_operator_that_has_just_started(line: Line) -> None:
    line.look(2)
    assert line.heard.routers
    assert line.heard.last["changes"] == []
    line.requests = 30.0
    line.look(4)
    size = line.replicas[0]
    change = line.heard.last["changes"][0]
    assert (change["pool"], change["to"]) == ("prefill", size)
    assert "tokens/s a worker" in " ".join(change["details"])
    standing = {one["pool"]: one for one in line.heard.last["standing"]}
    assert standing["prefill"]["to"] == size
    line.restart()
    line.look()
    [kept] = [one for one in line.heard.last["changes"] if one["pool"] == "prefill"]
    assert (kept["time"], kept["to"]) == (change["time"], size)
    standing = {one["pool"]: one for one in line.heard.last["standing"]}
    assert standing["prefill"]["reason"] == "NoData"


def test_the_first_look_without_two_readings_holds(line: Line) -> None:
    line.look()
    assert line.condition() == "NoData"
    assert line.replicas == (1, 1)


def test_a_restart_keeps_the_size(line: Line) -> None:
    line.requests = 30.0
    line.look(5)
    size = line.replicas
    line.restart()
    line.requests = 0.0
    line.look(50)
    assert line.replicas == size
    line.look(15)
    assert line.replicas < size
    assert "ScaledDown" in line.told.reasons


def test_a_crash_after_the_pdpool_was_written_loses_nothing(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.requests = 30.0
    line.look()
    monkeypatch.setattr(line.backend, "scale", _dies)
    with pytest.raises(TimeoutError):
        line.look(3)
    monkeypatch.undo()
    in_pool = line.backend.objects[POOL]["spec"]["replicas"]
    assert in_pool > 1
    line.restart()
    line.look()
    assert line.replicas == (in_pool, in_pool)
    assert "ScaleReverted" not in line.told.reasons


async def _dies(*_: Any) -> None:
    raise TimeoutError


def test_a_foreign_value_is_set_back_with_an_event(line: Line) -> None:
    line.look(2)
    line.scale(5)
    line.look()
    assert line.replicas == (1, 1)
    assert line.told.reasons.count("ScaleReverted") == 1
    line.look(3)
    assert line.told.reasons.count("ScaleReverted") == 1


def test_external_scaling_is_followed_and_not_fought(run) -> None:
    line = Line(Backend(document(**EXTERNAL)), run)
    line.backend.settle()
    line.look(2)
    assert line.condition() == "External"
    for value, size in ((3, 3), (5, 5), (9, 6), (2, 2)):
        line.scale(value)
        line.look(2)
        assert line.replicas == (value, size)
    line.scale(9)
    line.look()
    assert line.condition() == "OutOfBounds"
    assert "ScaleReverted" not in line.told.reasons


def test_a_pdpool_that_is_new_gets_its_size_and_status(run) -> None:
    line = Line(Backend(document(**SLO | {"spec.decode.replicas": 2})), run)
    line.look(3)
    decode = line.backend.objects[Ref("PDPool", "chat-decode")]
    assert decode["spec"]["replicas"] == 2
    assert decode["status"]["replicas"] == 0
    assert "pdcluster.dev/role=decode" in decode["status"]["selector"]
    line.backend.writes.clear()
    line.look()
    assert line.backend.writes == []


def test_fixed_pools_say_so(run) -> None:
    line = Line(Backend(document()), run)
    line.backend.settle()
    line.look()
    assert line.condition() == "FixedReplicas"
