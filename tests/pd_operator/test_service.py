"""The operator put together, over a fake API server: when it is ready, what it forgets, how
failures of calls are told apart, and that many PDClusters are looked at side by side.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pd_operator import informer, service
from pd_operator.keys import Key
from pd_operator.leadership import Terms
from pd_operator.metrics import Metrics
from pd_operator.podparts import Manifest
from pd_operator.service import Operator, Options
from pd_operator.teller import Teller
from tests.pd_operator.fake_api import FakeApi
from tests.pd_operator.objects import document

pytestmark = pytest.mark.slow

TERMS = Terms(duration_s=1.5, deadline_s=1.0, period_s=0.1, timeout_s=0.09)


def pdcluster(name: str) -> Manifest:
    made = document(**{"metadata.name": name, "metadata.namespace": "ns"})
    return {**made, "metadata": {**made["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"}}


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def operating(api: FakeApi, **changes: Any) -> AsyncIterator[tuple[Operator, Metrics]]:
    fields: dict[str, Any] = {"identity": "one", "namespace": "ns", "terms": TERMS, "handover_s": 0}
    metrics = Metrics()
    made = Operator(api, Options(**{**fields, **changes}), metrics)

    async def work() -> None:
        await made.lead()
        await made.run()

    task = asyncio.create_task(work())
    try:
        yield made, metrics
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.close()


def looks(metrics: Metrics, result: str) -> float:
    text = f'pdcluster_operator_reconcile_seconds_count{{result="{result}"}} '
    lines = metrics.render().decode().splitlines()
    return sum(float(line.removeprefix(text)) for line in lines if line.startswith(text))


def test_everything_is_made_once_and_forgotten_with_its_object(run):
    async def scenario() -> None:
        api = FakeApi()
        await api.put(pdcluster("chat"))
        async with operating(api) as (operator, metrics):
            await until(lambda: "status" in api.objects["PDCluster", "ns", "chat"])
            await until(lambda: operator.unready() == "")
            kinds = {place[0] for place in api.objects}
            assert {"StatefulSet", "Deployment", "Service", "PDPool"} <= kinds
            own = 'pdcluster_namespace="ns",pdcluster="chat",role="decode",state="desired"'
            assert f"pdcluster_operator_pool_replicas{{{own}}} 1\n" in metrics.render().decode()
            await asyncio.sleep(0.3)
            api.asked.clear()
            await asyncio.sleep(0.3)
            assert {one.resource.kind for one in api.asked} <= {"Lease"}
            assert operator._looked_at.keys() == operator._uids.keys() != set()
            await api.remove("PDCluster", "ns", "chat")
            await until(lambda: not operator._looked_at)
            assert not operator._uids
            assert not operator._reconciler._written_at
            assert not operator._reconciler._calm
            assert looks(metrics, "ok") > 1
            assert 'pdcluster="chat"' not in metrics.render().decode()

    run(scenario())


def test_rest_costs_nothing_and_changes_are_seen(run, monkeypatch: pytest.MonkeyPatch):
    """After one look that found all in order, the next ones look at versions alone."""

    async def scenario() -> None:
        api = FakeApi()
        await api.put(pdcluster("chat"))
        async with operating(api, resync_s=0.1) as (operator, metrics):
            await until(lambda: bool(operator._reconciler._calm))
            closely = 0
            look = operator._reconciler._look_closely

            async def counted(*arguments: Any) -> Any:
                nonlocal closely
                closely += 1
                return await look(*arguments)

            monkeypatch.setattr(operator._reconciler, "_look_closely", counted)
            before = looks(metrics, "ok")
            await until(lambda: looks(metrics, "ok") >= before + 3)
            assert closely == 0
            document = api.objects["PDCluster", "ns", "chat"]
            spec = {**document["spec"], "decode": {"replicas": 3}}
            await api.put({**document, "spec": spec})

            await until(lambda: closely > 0)

    run(scenario())


def test_routers_are_told_of_pools_that_are_sized(run, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        api, told = FakeApi(), {}
        await api.put(pdcluster("fixed"))
        target = {"target": "1s"}
        sized = document(**{
            "metadata.name": "sized", "metadata.namespace": "ns",
            "metadata.creationTimestamp": "2026-01-01T00:00:00Z",
            "spec.slo": {"ttft": target, "tpot": target},
            "spec.decode": {"scaling": {"mode": "SLO", "maxReplicas": 3}},
        })  # fmt: skip

        def tell(teller: Teller, key: Key, routers: dict[str, str]) -> None:
            del routers
            told[key.name] = json.loads(teller._known[key].body())["standing"]

        monkeypatch.setattr(Teller, "tell", tell)
        async with operating(api):
            await api.put(sized)
            await until(lambda: {"fixed", "sized"} <= told.keys())
            assert told["fixed"] == []
            assert [one["pool"] for one in told["sized"]] == ["decode"]

    run(scenario())


def test_ready_means_that_all_is_heard_and_looked_at(run, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        api = FakeApi(refuse={"list": 503})
        async with operating(api, resync_s=0.2) as (operator, _):
            await until(operator.lease.holds)
            assert operator.unready() == "objects are being listed"
            api.refuse.clear()
            await until(lambda: operator.unready() == "")
            monkeypatch.setattr(informer, "FRESH_S", 0.0)
            assert "nothing heard for too long about PDCluster" in operator.unready()
            monkeypatch.setattr(informer, "FRESH_S", 100.0)
            await api.put(pdcluster("chat"))
            await until(lambda: bool(operator._looked_at))
            for key in operator._looked_at:
                operator._looked_at[key] -= 1000
            assert "1 PDClusters haven't been looked at" in operator.unready()
            await until(lambda: operator.unready() == "")  # by the resync

    run(scenario())


def test_one_that_waits_for_the_lease_is_ready_while_the_server_answers(run):
    async def scenario() -> None:
        api = FakeApi()
        async with operating(api), operating(api, identity="two") as (second, _):
            await until(lambda: second.lease.holder == "one")
            assert second.unready() == ""
            second.lease.heard_at -= 1000
            assert second.unready() == "the API server doesn't answer"

    run(scenario())


@pytest.mark.parametrize(
    ("code", "result"),
    [(409, "conflict"), (429, "throttled"), (500, "unavailable"), (0, "unavailable")],
)
def test_failures_by_kind_and_recovery(
    run, monkeypatch: pytest.MonkeyPatch, code: int, result: str
):
    monkeypatch.setattr(service, "CONFLICT_S", 0.02)
    monkeypatch.setattr("pd_operator.queue.FIRST_RETRY_S", 0.02)

    async def scenario() -> None:
        api = FakeApi(refuse={"apply": code})
        await api.put(pdcluster("chat"))
        async with operating(api) as (_, metrics):
            await until(lambda: looks(metrics, result) >= 1)
            api.refuse.clear()
            await until(lambda: "status" in api.objects["PDCluster", "ns", "chat"])

    run(scenario())


def test_a_refused_object_is_told_and_the_others_are_made(run):
    async def scenario() -> None:
        api = FakeApi()
        send = api.send

        async def refusing(request: Any) -> Any:
            if request.resource.kind == "Deployment" and request.verb == "apply":
                return await FakeApi(refuse={"apply": 422}).send(request)
            return await send(request)

        api.send = refusing
        await api.put(pdcluster("chat"))
        async with operating(api):
            await until(lambda: "status" in api.objects["PDCluster", "ns", "chat"])
            conditions = api.objects["PDCluster", "ns", "chat"]["status"]["conditions"]
            [ready] = [one for one in conditions if one["type"] == "Ready"]
            assert ready["reason"] == "Refused"
            assert "Deployment chat-router is refused" in ready["message"]
            assert [place for place in api.objects if place[0] == "StatefulSet"]

    run(scenario())


def test_many_are_looked_at_side_by_side(run):
    async def scenario() -> None:
        api, busy, most = FakeApi(), 0, 0
        send = api.send

        async def slow(request: Any) -> Any:
            nonlocal busy, most
            busy += request.is_write and request.resource.kind != "Lease"
            most = max(most, busy)
            await asyncio.sleep(0.002)
            response = await send(request)
            busy -= request.is_write and request.resource.kind != "Lease"
            return response

        api.send = slow
        for number in range(12):
            await api.put(pdcluster(f"chat-{number}"))
        async with operating(api, runners=4):
            await until(
                lambda: all(
                    "status" in one for at, one in api.objects.items() if at[0] == "PDCluster"
                )
            )
        assert most in (4, 5)  # four runners, and the recorder of events

    run(scenario())
