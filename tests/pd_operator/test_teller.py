"""Covers pd_operator.teller: routers hear of each change once, those that come later of what
there was, those that don't answer again; nobody waits for them, and nothing grows."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from pd_operator.keys import Key
from pd_operator.observed import pod_view
from pd_operator.scaling.explaining import Told
from pd_operator.teller import CHANGES, Teller

CHAT = Key("ml", "chat")


def told(pool: str, before: int, after: int, reason: str = "MoreDemand") -> Told:
    return Told("2026-01-01T00:00:00Z", "ml/chat", pool, before, after, reason, "12 needed")


class Routers:
    """What each has heard; those in `silent` answer nothing."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.silent: set[str] = set()

    async def post(self, router: str, body: bytes) -> bool:
        if router in self.silent:
            return False
        self.heard.append((router, json.loads(body)))
        return True


def go(scenario: Callable[[Teller, Routers], Awaitable[None]]) -> Routers:
    async def whole() -> Routers:
        routers = Routers()
        teller = Teller(routers.post)
        await scenario(teller, routers)
        await teller.close()
        return routers

    return asyncio.run(whole())


async def told_to(teller: Teller, *routers: str) -> None:
    teller.tell(CHAT, {router: router for router in routers})
    for _ in range(5):
        await asyncio.sleep(0)


def test_each_change_once_and_all_of_it_to_those_that_are_new() -> None:
    async def scenario(teller: Teller, routers: Routers) -> None:
        teller.remember(CHAT, {}, ["prefill"])
        await told_to(teller, "a")
        assert routers.heard == []  # there is nothing to tell
        teller.note(CHAT, told("prefill", 1, 2))
        for _ in range(3):
            await told_to(teller, "a")
        assert [router for router, _ in routers.heard] == ["a"]
        await told_to(teller, "a", "b")
        teller.note(CHAT, told("prefill", 2, 2, "AtTarget"))
        await told_to(teller, "a", "b")
        assert [router for router, _ in routers.heard] == ["a", "b", "a", "b"]

    _, found = go(scenario).heard[-1]
    [now], [change] = found["standing"], found["changes"]
    assert now["text"] == "prefill stays at 2: that is what it needs"
    assert change == {
        "time": "2026-01-01T00:00:00Z", "pool": "prefill", "to": 2, "reason": "MoreDemand",
        "text": "prefill from 1 to 2: more demand than its workers can meet within the target",
        "details": ["12 needed"],
    }  # fmt: skip


def test_one_that_began_anew_is_told_again() -> None:
    """It wasn't among those that serve for a look."""

    async def scenario(teller: Teller, routers: Routers) -> None:
        teller.note(CHAT, told("decode", 1, 3))
        await told_to(teller, "a")
        await told_to(teller)
        await told_to(teller, "a")
        assert len(routers.heard) == 2

    go(scenario)


def test_another_process_at_the_same_address_is_told_again() -> None:
    """It restarted between two looks, and its pod kept its address."""

    async def scenario(teller: Teller, routers: Routers) -> None:
        teller.note(CHAT, told("decode", 1, 3))
        for process in ("uid-a/0", "uid-a/0", "uid-a/1", "uid-b/0", "uid-b/0"):
            teller.tell(CHAT, {process: "10.0.0.7"})
            for _ in range(5):
                await asyncio.sleep(0)
        assert [router for router, _ in routers.heard] == ["10.0.0.7"] * 3

    go(scenario)


def test_one_that_does_not_answer_is_told_when_it_does() -> None:
    async def scenario(teller: Teller, routers: Routers) -> None:
        routers.silent = {"a"}
        teller.note(CHAT, told("decode", 1, 3))
        await told_to(teller, "a", "b")
        await told_to(teller, "a", "b")
        assert [router for router, _ in routers.heard] == ["b"]
        routers.silent.clear()
        await told_to(teller, "a", "b")
        assert [router for router, _ in routers.heard] == ["b", "a"]

    go(scenario)


def test_nobody_waits_and_a_router_is_asked_once_at_a_time() -> None:
    async def scenario(_: Teller, routers: Routers) -> None:
        del routers
        asked = 0

        async def never(router: str, body: bytes) -> bool:
            nonlocal asked
            del router, body
            asked += 1
            await asyncio.Event().wait()
            return True

        slow = Teller(never)
        slow.note(CHAT, told("decode", 1, 3))
        async with asyncio.timeout(1):
            for _ in range(3):
                await told_to(slow, "a")
            assert asked == 1
            await slow.close()

    go(scenario)


def test_a_new_operator_tells_what_the_status_keeps() -> None:
    kept = {"replicas": 4, "reason": "Burst", "message": "9 needed", "time": "2026-01-01T00:00:00Z"}
    status = {"decode": {"decision": kept}, "prefill": {"desired": 1}}

    async def scenario(teller: Teller, routers: Routers) -> None:
        del routers
        assert not teller.knows(CHAT)
        teller.remember(CHAT, status, ["prefill", "decode"])
        assert teller.knows(CHAT)
        await told_to(teller, "a")

    [(_, found)] = go(scenario).heard
    assert found["standing"] == []
    [change] = found["changes"]
    assert change["text"] == "decode to 4: the last seconds alone ask for far more workers"
    assert change["details"] == ["9 needed"]


def test_what_is_told_is_bounded_and_ends() -> None:
    async def scenario(teller: Teller, routers: Routers) -> None:
        for number in range(50):
            teller.note(CHAT, told("decode", number, number + 1))
        await told_to(teller, "a")
        [(_, found)] = routers.heard
        assert [one["to"] for one in found["changes"]] == list(range(50, 50 - CHANGES, -1))
        teller.keep(CHAT, ["prefill"])  # decode's size is fixed now
        await told_to(teller, "a")
        assert routers.heard[-1][1]["standing"] == []
        teller.forget(CHAT)
        await told_to(teller, "a")
        assert len(routers.heard) == 2

    go(scenario)


def test_a_pods_process_is_another_one_after_a_restart() -> None:
    def pod(uid: str, restarts: int) -> str:
        status = {"podIP": "10.0.0.7", "containerStatuses": [{"restartCount": restarts}]}
        return pod_view({"metadata": {"name": "r-0", "uid": uid}, "status": status}).process

    assert pod("a", 0) == pod("a", 0)
    assert len({pod("a", 0), pod("a", 1), pod("b", 0)}) == 3
