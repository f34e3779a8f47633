"""Which changes of a status are worth an event, how many an object may have, and posting."""

import asyncio
from typing import Any

from pd_operator import notices
from pd_operator.events import MAX_REASONS, Recorder
from pd_operator.kube import Kube
from pd_operator.notices import Budget, Notice
from tests.pd_operator.fake_api import FakeApi

DOCUMENT = {
    "apiVersion": "pdcluster.dev/v1alpha1",
    "kind": "PDCluster",
    "metadata": {"namespace": "ns", "name": "chat", "uid": "u1"},
}


def status(**conditions: tuple[str, str]) -> dict[str, Any]:
    return {
        "conditions": [
            {
                "type": kind,
                "status": text,
                "reason": reason,
                "message": f"{kind} message",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for kind, (text, reason) in conditions.items()
        ]
    }


def test_changes_are_told_and_states_are_not():
    before = status(Ready=("False", "ImagePullBackOff"), Degraded=("True", "ImagePullBackOff"))
    after = status(Ready=("True", "AllReady"), Degraded=("False", "NoProblem"))
    assert [one.reason for one in notices.of_change(before, after)] == ["AllReady"]
    assert notices.of_change(after, after) == []
    found = notices.of_change(after, before)
    assert [(one.reason, one.warning) for one in found] == [("ImagePullBackOff", True)] * 2
    assert notices.of_change({}, status(Ready=("False", "Starting"))) == []
    assert notices.of_change({}, status(SLOMet=("False", "TargetMissed"))) == []


def test_long_texts_are_cut():
    after = status(Ready=("False", "Refused"))
    after["conditions"][0]["message"] = "x" * 5000
    [found] = notices.of_change({}, after)
    assert len(found.text) == notices.MAX_TEXT


def test_a_budget():
    budget = Budget(burst=2, refill_s=10, left=2, at_s=0)
    assert [budget.take(now) for now in (0, 0, 0, 5, 10, 10)] == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert [budget.take(1000), budget.take(1000), budget.take(1000)] == [True, True, False]


BURST = Budget().burst


async def posted(api: FakeApi, recorder: Recorder, count: int) -> list[dict[str, Any]]:
    task = asyncio.create_task(recorder.run())
    async with asyncio.timeout(10):
        while len([one for one in api.asked if one.verb == "create"]) < count:
            await asyncio.sleep(0.005)
    task.cancel()
    return [one for place, one in api.objects.items() if place[0] == "Event"]


def test_an_event_and_its_repetition(run):
    async def scenario() -> None:
        api = FakeApi()
        notice = Notice("AllReady", "Ready: all", since="2026-01-01T00:00:00Z")
        for _ in range(2):  # by an operator, and by its successor
            recorder = Recorder(Kube(api), "operator-1")
            recorder.add(DOCUMENT, [notice])
            found = await posted(api, recorder, 1)
        [event] = found
        assert event["metadata"]["namespace"] == "ns"
        assert event["regarding"]["uid"] == "u1"
        assert (event["type"], event["reason"], event["note"]) == (
            "Normal",
            "AllReady",
            "Ready: all",
        )

    run(scenario())


def test_failures_are_nobodys_affair_and_floods_are_cut(run):
    async def scenario() -> None:
        api = FakeApi()
        recorder = Recorder(Kube(api), "operator-1")
        recorder.add(DOCUMENT, [Notice("Flaps", f"text {n}") for n in range(500)])
        recorder.add(DOCUMENT, [Notice("ScaleReverted", "text", warning=True)])
        api.refuse["create"] = 403
        await posted(api, recorder, BURST + 1)
        told = [one for one in api.asked if one.verb == "create"]
        assert len(told) == BURST + 1  # the flapping takes nothing from the other
        recorder.add(DOCUMENT, [Notice(f"R{n}", "text") for n in range(500)])
        assert len(recorder._budgets["u1"]) <= MAX_REASONS + 1
        recorder.forget("u1")
        recorder._waiting.clear()
        api.refuse.clear()
        recorder.add(DOCUMENT, [Notice("Last", "text", warning=True)])
        [event] = await posted(api, recorder, BURST + 2)
        assert (event["type"], event["reason"]) == ("Warning", "Last")

    run(scenario())
