"""The informer's edge over a fake API server: list, watch, ends, gaps, refusals, kinds that
come and go, and what it tells of them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest

from pd_operator import informer, kube
from pd_operator.informer import Watcher
from pd_operator.keys import Key
from pd_operator.kube import Kube
from pd_operator.podparts import Manifest
from pd_operator.resources import PDCLUSTER, POD_MONITOR, STATEFUL_SET, Resource
from tests.pd_operator.fake_api import FakeApi

DEADLINE_S = 10.0


def pdcluster(name: str, **spec: object) -> Manifest:
    metadata = {"namespace": "ns", "name": name}
    return {"kind": "PDCluster", "metadata": metadata, "spec": spec}


def labelled(kind: str, name: str, cluster: str) -> Manifest:
    labels = {"pdcluster.dev/cluster": cluster}
    return {"kind": kind, "metadata": {"namespace": "ns", "name": name, "labels": labels}}


class Heard:
    """What was told, and a way to wait for it."""

    def __init__(self) -> None:
        self.told: list[set[str] | None] = []
        self.restarts: list[str] = []
        self._more = asyncio.Condition()

    def touched(self, resource: Resource, keys: Iterable[Key] | None) -> None:
        del resource
        self.told.append(None if keys is None else {key.name for key in keys})

    def restarted(self, resource: Resource, why: str) -> None:
        del resource
        self.restarts.append(why)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def watching(api: FakeApi, resource: Resource, heard: Heard) -> AsyncIterator[Watcher]:
    made = Watcher(Kube(api), resource, "", heard.touched, heard.restarted)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "BACKOFF_S", (0.01, 0.05))
    monkeypatch.setattr(informer, "ABSENT_S", 0.02)


def names(of: Watcher) -> set[str]:
    return {one["metadata"]["name"] for one in of.store}


def test_what_is_there_and_what_comes(run):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        await api.put(pdcluster("a"))
        async with watching(api, PDCLUSTER, heard) as made:
            await until(made.settled.is_set)
            assert heard.told == [{"a"}]
            await api.put(pdcluster("b"))
            await until(lambda: names(made) == {"a", "b"})
            await api.remove("PDCluster", "ns", "a")
            await until(lambda: names(made) == {"b"})
            assert heard.told == [{"a"}, {"b"}, {"a"}]
            assert made.fresh()
        first = next(one for one in api.asked if one.verb == "list")
        assert first.query["resourceVersion"] == "0"
        assert "labelSelector" not in first.query

    run(scenario())


def test_children_are_selected_by_label(run):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        await api.put(labelled("StatefulSet", "s", "a"))
        async with watching(api, STATEFUL_SET, heard) as made:
            await until(made.settled.is_set)
            assert [one["metadata"]["name"] for one in made.store.group(Key("ns", "a"))] == ["s"]
        assert {one.query["labelSelector"] for one in api.asked} == {informer.MANAGED}

    run(scenario())


def test_a_watch_that_ends_goes_on_where_it_was(run):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        async with watching(api, PDCLUSTER, heard) as made:
            await until(made.settled.is_set)
            await api.put(pdcluster("a"))
            await until(lambda: names(made) == {"a"})
            await api.bookmark()
            await until(lambda: made.store.seen == api.version)
            reached = str(api.version)
            await api.hang_up()
            await until(lambda: api.asked[-1].query.get("resourceVersion") == reached)
            await api.put(pdcluster("b"))
            await until(lambda: names(made) == {"a", "b"})
        assert [one.verb for one in api.asked].count("list") == 1

    run(scenario())


def test_after_a_410_a_list_tells_what_has_gone(run):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        await api.put(pdcluster("kept"))
        await api.put(pdcluster("gone"))
        async with watching(api, PDCLUSTER, heard) as made:
            await until(made.settled.is_set)
            known = str(made.store.seen)
            await api.remove("PDCluster", "ns", "gone", told=False)
            await api.put(pdcluster("new"), told=False)
            api.oldest = api.version
            await api.hang_up()
            await until(lambda: names(made) == {"kept", "new"})
            assert heard.told[-1] == {"gone", "new"}
            assert heard.restarts[-1] == "Gone"
        again = [one for one in api.asked if one.verb == "list"][1]
        assert again.query["resourceVersion"] == known  # not older than what is known

    run(scenario())


@pytest.mark.parametrize("code", [0, 429, 500, 503, 403])
def test_refusals_keep_the_version(run, code: int):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        async with watching(api, PDCLUSTER, heard) as made:
            await until(made.settled.is_set)
            api.refuse["watch"] = code
            await api.hang_up()
            await until(lambda: len(heard.restarts) >= 3)
            del api.refuse["watch"]
            await api.put(pdcluster("a"))
            await until(lambda: names(made) == {"a"})
        assert [one.verb for one in api.asked].count("list") == 1

    run(scenario())


def test_after_silence_comes_a_list(run, monkeypatch: pytest.MonkeyPatch):
    """A server tells nothing of a kind of which nothing has changed since it started; a list
    is heard, and what a watch kept to itself is found by it."""
    monkeypatch.setattr(kube, "SILENCE_S", 0.05)
    monkeypatch.setattr(informer, "FRESH_S", 5.0)

    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        async with watching(api, PDCLUSTER, heard) as made:
            await until(lambda: heard.restarts.count("Silent") >= 2)
            first = made.heard_at
            await api.put(pdcluster("unheard"), told=False)
            await until(lambda: names(made) == {"unheard"})
            assert made.heard_at > first
            assert made.fresh()
        first_list, *later = [one for one in api.asked if one.verb == "list"]
        assert "resourceVersion" in first_list.query
        assert not any("resourceVersion" in one.query for one in later)  # of the store itself

    run(scenario())


def test_streams_that_end_at_once_are_not_asked_for_without_a_pause(run):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()

        async def nothing(_request: object):
            for line in ():
                yield line

        api.stream = nothing
        began = asyncio.get_running_loop().time()
        async with watching(api, PDCLUSTER, heard) as made:
            calls = 0
            once = made._once

            async def counted() -> None:
                nonlocal calls
                calls += 1
                await once()

            made._once = counted
            await asyncio.sleep(0.3)
            took = asyncio.get_running_loop().time() - began
        assert calls <= took / 0.007 + 2

    run(scenario())


def test_an_optional_kind_comes_and_goes(run):
    async def scenario() -> None:
        api, heard = FakeApi(absent={"PodMonitor"}), Heard()
        async with watching(api, POD_MONITOR, heard) as made:
            await until(made.settled.is_set)
            assert not made.present.is_set()
            api.absent.clear()
            await api.put(labelled("PodMonitor", "m", "a"))
            await until(made.present.is_set)
            assert None in heard.told  # it matters to all
            await until(lambda: names(made) == {"m"})
            api.absent.add("PodMonitor")
            await api.hang_up()
            await until(lambda: not made.present.is_set())
            assert heard.told[-1] == {"a"}
            assert made.fresh()

    run(scenario())


def test_a_restored_backup(run):
    async def scenario() -> None:
        api, heard = FakeApi(), Heard()
        await api.put(pdcluster("a"))
        async with watching(api, PDCLUSTER, heard) as made:
            await until(made.settled.is_set)
            api.restore(10)
            await api.put(pdcluster("b"))
            await api.hang_up()
            await until(lambda: names(made) == {"b"})
            assert made.store.seen == 11

    run(scenario())
