"""The lease's edge over a fake API server: taking, waiting, renewing, losing, giving back,
outages; and the namespaces that a cluster-wide operator leaves to others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

import pytest

from pd_operator import apierrors, territory
from pd_operator.kube import Kube, Request
from pd_operator.leadership import Terms
from pd_operator.lease import NAMESPACED, SCOPE_LABEL, Lease, LeaseLost, NotHeld
from pd_operator.podparts import Manifest
from pd_operator.resources import LEASE, SERVICE
from pd_operator.territory import NotOurs, Territory
from tests.pd_operator.fake_api import FakeApi

TERMS = Terms(duration_s=0.6, deadline_s=0.4, period_s=0.05, timeout_s=0.04)
PLACE = ("Lease", "ns", "lease")


def lease(api: FakeApi, identity: str) -> Lease:
    return Lease(Kube(api), "ns", "lease", identity, terms=TERMS)


def holder(api: FakeApi) -> str:
    return str(api.objects[PLACE]["spec"]["holderIdentity"])


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def held(one: Lease) -> AsyncIterator[asyncio.Task[None]]:
    await one.acquire()
    task = asyncio.create_task(one.hold())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_taken_renewed_given_back(run):
    async def scenario() -> None:
        api, one = FakeApi(), None
        one = lease(api, "one")
        with pytest.raises(NotHeld):
            one.check()
        async with held(one):
            assert one.created
            first = api.objects[PLACE]
            await until(lambda: api.objects[PLACE] != first)
            await asyncio.sleep(TERMS.duration_s)
            one.check()
            spec = api.objects[PLACE]["spec"]
            assert spec["holderIdentity"] == "one"
            assert spec["acquireTime"] == first["spec"]["acquireTime"] < spec["renewTime"]
            assert datetime.fromisoformat(spec["renewTime"]).utcoffset() is not None
        await one.release()
        assert holder(api) == ""
        with pytest.raises(NotHeld):
            one.check()

    run(scenario())


@pytest.mark.slow
def test_a_second_one_waits_for_a_silent_holder(run):
    async def scenario() -> None:
        api = FakeApi()
        async with held(lease(api, "one")):
            waiting = asyncio.create_task(lease(api, "two").acquire())
            await asyncio.sleep(2 * TERMS.duration_s)
            assert not waiting.done()
        loop = asyncio.get_running_loop()
        silent_since = loop.time()
        await waiting
        assert loop.time() - silent_since >= TERMS.duration_s - 2 * TERMS.period_s
        assert holder(api) == "two"
        assert api.objects[PLACE]["spec"]["leaseTransitions"] == 1

    run(scenario())


def test_given_back_it_is_taken_at_once(run):
    async def scenario() -> None:
        api, one, two = FakeApi(), None, None
        one, two = lease(api, "one"), lease(api, "two")
        async with held(one):
            waiting = asyncio.create_task(two.acquire())
            await asyncio.sleep(0.1)
        await one.release()
        async with asyncio.timeout(3 * TERMS.period_s):
            await waiting

    run(scenario())


@pytest.mark.slow
def test_an_outage_stops_writes_in_time_and_ends_nothing(run):
    async def scenario() -> None:
        api, regained = FakeApi(), []
        one = lease(api, "one")
        await one.acquire()
        task = asyncio.create_task(one.hold(lambda: regained.append(1)))
        api.refuse = {"get": 0, "update": 0}
        await until(lambda: not one.holds())
        await asyncio.sleep(TERMS.duration_s)
        assert not task.done()
        api.refuse = {}
        await until(one.holds)
        assert regained == [1]
        task.cancel()

    run(scenario())


def test_whoever_took_it_meanwhile_has_it(run):
    async def scenario() -> None:
        api = FakeApi()
        one = lease(api, "one")
        async with held(one) as task:
            api.refuse = {"get": 0, "update": 0}
            await until(lambda: not one.holds())
            spec = {"holderIdentity": "two", "leaseDurationSeconds": 15}
            await api.put({**api.objects[PLACE], "spec": spec})
            api.refuse = {}
            with pytest.raises(LeaseLost, match="two has it"):
                await task
            with pytest.raises(NotHeld):
                one.check()
            await one.release()
            assert holder(api) == "two"

    run(scenario())


def test_a_lost_answer_is_no_lost_lease(run):
    """The renewal was carried out: its version isn't the one that we know, the holder is."""

    async def scenario() -> None:
        api = FakeApi()
        one = lease(api, "one")
        async with held(one) as task:
            await api.put(dict(api.objects[PLACE]))  # another version, by our lost write
            await asyncio.sleep(TERMS.duration_s)
            assert one.holds()
            assert not task.done()

    run(scenario())


def test_it_is_given_back_after_a_renewal_that_was_cut_off(run):
    """It was carried out. What somebody else has meanwhile isn't ours to give."""

    async def scenario() -> None:
        api = FakeApi()
        one = lease(api, "one")
        await one.acquire()
        await api.put(dict(api.objects[PLACE]))
        await one.release()
        assert holder(api) == ""

        two = lease(api, "two")
        await two.acquire()
        taken = api.objects[PLACE]
        await api.put({**taken, "spec": {**taken["spec"], "holderIdentity": "three"}})
        await two.release()
        assert holder(api) == "three"

    run(scenario())


def test_without_rights_it_ends_all_the_same(run, caplog):
    """As after `helm uninstall`."""

    async def scenario() -> None:
        api = FakeApi()
        one = lease(api, "one")
        await one.acquire()
        api.refuse = {"update": 403}
        await one.release()
        assert holder(api) == "one"
        assert "lease not given back" in caplog.text

    run(scenario())


def test_a_deleted_lease_is_made_again(run):
    async def scenario() -> None:
        api = FakeApi()
        one = lease(api, "one")
        async with held(one) as task:
            await api.remove(*PLACE)
            await until(lambda: PLACE in api.objects)
            await until(one.holds)
            assert not task.done()

    run(scenario())


# ---- namespaces of others -------------------------------------------------------------


def foreign(namespace: str) -> Manifest:
    metadata = {"namespace": namespace, "name": "op", "labels": {SCOPE_LABEL: NAMESPACED}}
    return {"kind": "Lease", "metadata": metadata, "spec": {}}


def write(namespace: str) -> Request:
    return Request("apply", SERVICE, "PATCH", "/x", namespace=namespace)


def test_namespaces_with_an_operator_of_their_own(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(territory, "PERIOD_S", 0.02)
    monkeypatch.setattr(territory, "VALID_S", 0.2)

    async def scenario() -> None:
        api = FakeApi()
        changed: list[set[str]] = []
        made = Territory(Kube(api), lambda namespaces: changed.append(set(namespaces)))
        with pytest.raises(apierrors.Unavailable):
            made.check(write("a"))  # before the first list nobody can tell
        task = asyncio.create_task(made.run())
        await until(lambda: len(api.asked) > 1)
        made.check(write("a"))
        await api.put(foreign("a"))
        await until(lambda: changed == [{"a"}])
        with pytest.raises(NotOurs):
            made.check(write("a"))
        made.check(write("b"))
        await api.remove(LEASE.kind, "a", "op")
        await until(lambda: changed == [{"a"}, {"a"}])
        made.check(write("a"))
        api.refuse["list"] = 500
        await asyncio.sleep(0.3)
        with pytest.raises(apierrors.Unavailable):
            made.check(write("b"))  # the list is too old to go by
        task.cancel()

    run(scenario())
