"""What goes wrong between the operator and the API server: it is killed, frozen, throttles,
forgets versions, lets watches go silent, answers late or not at all, and others write to the
same objects all the time. The operator recovers by itself and does nothing twice.
"""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from e2e.cluster.envtest import ApiServer, Kube
from pd_operator import apierrors, informer
from pd_operator import kube as pd_kube
from pd_operator.kube import Request, Response
from pd_operator.resources import STATEFUL_SET
from tests.envtest.operating import Scene, Send, Stream, is_counted, scene
from tests.envtest.test_operator import at_rest, of_kind
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 110.0
EDIT = {"decode": {"replicas": 2, "engine": {"maxRunning": 8}}}


async def created(stage: Scene) -> None:
    await stage.there.create(document())
    await stage.there.until_ready("chat")


# ---- the API server itself ------------------------------------------------------------


def test_the_api_server_is_killed_and_comes_back(
    kube: Kube, namespace: str, apiserver: ApiServer, run
):
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            await created(stage)
            apiserver.kill()
            await asyncio.sleep(3)
            apiserver.start()  # stops this loop, too: the server dies with its starter's thread
            await stage.there.edit("chat", EDIT)
            await stage.there.until_ready("chat")
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_the_api_server_freezes_in_the_middle_of_a_change(
    kube: Kube, namespace: str, apiserver: ApiServer, run, monkeypatch: pytest.MonkeyPatch
):
    """Calls end at their deadline, whether or not the server carries them out later."""
    monkeypatch.setattr(pd_kube, "CALL_TIMEOUT_S", 1.0)

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            await created(stage)
            stage.seam.writes.clear()
            await stage.there.edit("chat", EDIT)
            while not stage.seam.writes:
                await asyncio.sleep(0)
            apiserver.freeze()
            await asyncio.sleep(4)
            apiserver.thaw()
            await stage.there.until_ready("chat")
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


# ---- between the two ------------------------------------------------------------------


@dataclass
class Line:
    """The way to the API server. While it is cut, nothing gets through in either direction."""

    cut: bool = False
    answer: Callable[[Request], Response | None] = lambda _request: None
    ends_watches_with: apierrors.ApiError | None = None
    asked: list[Request] = field(default_factory=list)

    async def send(self, request: Request, send: Send) -> Response:
        self.asked.append(request)
        if self.cut:
            raise apierrors.Unavailable("the line is cut")
        faked = self.answer(request)
        return faked if faked is not None else await send(request)

    async def stream(self, request: Request, lines: Stream) -> Stream:
        self.asked.append(request)
        if self.cut:
            raise apierrors.Unavailable("the line is cut")
        if self.ends_watches_with is not None:
            raise self.ends_watches_with
        async for line in lines:
            while self.cut:
                await asyncio.sleep(0.05)
            if self.ends_watches_with is not None:
                raise self.ends_watches_with
            yield line


def status(code: int, headers: dict[str, str] | None = None, **fields: object) -> Response:
    return Response(
        code, headers or {}, json.dumps({"kind": "Status", "code": code, **fields}).encode()
    )


@pytest.mark.parametrize("forgotten", [False, True], ids=["goes on", "410"])
def test_what_was_deleted_during_an_outage_is_noticed(
    kube: Kube, namespace: str, run, monkeypatch: pytest.MonkeyPatch, forgotten: bool
):
    """By the events of the gap where the server still has them, by a new list otherwise."""
    monkeypatch.setattr(pd_kube, "SILENCE_S", 1.0)
    line = Line()

    async def scenario() -> None:
        async with scene(
            kube.kubeconfig, namespace, on_send=line.send, on_stream=line.stream
        ) as stage:
            await created(stage)
            await stage.there.create(document(**{"metadata.name": "other"}))
            await stage.there.until_ready("other")
            line.cut = True
            sets = of_kind(await stage.there.objects(), "StatefulSet")
            for one in sets:
                await stage.there.delete("StatefulSet", one["metadata"]["name"])
            await stage.there.delete("PDCluster", "other")
            await asyncio.sleep(2)
            if forgotten:
                line.ends_watches_with = apierrors.Gone("too old resource version", code=410)
            line.cut = False
            await asyncio.sleep(1)
            line.ends_watches_with = None

            async def made_again() -> bool:
                return len(of_kind(await stage.there.objects(), "StatefulSet")) == 2

            await stage.there.until("what was deleted is there again", made_again)
            await stage.there.until_ready("chat")
            now = of_kind(await stage.there.objects(), "StatefulSet")
            assert not {one["metadata"]["uid"] for one in now} & {
                one["metadata"]["uid"] for one in sets
            }

            async def forgotten_too() -> bool:
                return [key.name for key in stage.operator.known()] == ["chat"]

            await stage.there.until("the deleted PDCluster is known to be gone", forgotten_too)
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_throttled(kube: Kube, namespace: str, run):
    """Most calls are refused for a while, with a time to come back: which is respected."""
    line, chance = Line(), random.Random(1)

    def refuse(request: Request) -> Response | None:
        if request.resource.kind == "Lease" or chance.random() > 0.8:
            return None
        return status(429, {"Retry-After": "1"}, reason="TooManyRequests")

    async def scenario() -> None:
        async with scene(
            kube.kubeconfig, namespace, on_send=line.send, on_stream=line.stream
        ) as stage:
            await created(stage)
            line.answer = refuse
            line.asked.clear()
            await stage.there.edit("chat", EDIT)
            await asyncio.sleep(8)
            calls = [one for one in line.asked if is_counted(one)]
            assert len(calls) < 8 * 5 * 5  # no flood: a key waits after each refusal
            line.answer = lambda _request: None
            await stage.there.until_ready("chat")
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_lists_find_what_silent_watches_keep_to_themselves(
    kube: Kube, namespace: str, run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pd_kube, "SILENCE_S", 0.5)
    silent = True

    async def swallow(_request: Request, lines: Stream) -> Stream:
        async for line in lines:
            if not silent:
                yield line

    async def scenario() -> None:
        nonlocal silent
        silent = False
        async with scene(kube.kubeconfig, namespace, on_stream=swallow) as stage:
            await created(stage)
            silent = True
            await stage.there.edit("chat", EDIT)
            await stage.there.until_ready("chat")
            silent = False
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_lost_answers(kube: Kube, namespace: str, run):
    """Every third write is carried out and its answer is lost: nothing is made twice."""
    count = 0

    async def lose(request: Request, send: Send) -> Response:
        nonlocal count
        response = await send(request)
        if is_counted(request):
            count += 1
            if count % 3 == 0:
                raise apierrors.Unavailable("the answer is lost")
        return response

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace, on_send=lose) as stage:
            await created(stage)
            uids = {one["metadata"]["uid"] for one in await stage.there.objects()}
            await stage.there.edit("chat", EDIT)
            await stage.there.until_ready("chat")
            kept = {
                one["metadata"]["uid"]
                for one in await stage.there.objects()
                if one["kind"] in ("Service", "Deployment", "PDPool")
                and not one["metadata"]["name"].startswith("chat-d-")
            }
            assert kept <= uids
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_others_write_to_the_same_objects_all_the_time(kube: Kube, namespace: str, run):
    """Each write of ours meets a version that is new: it is decided again, and gets through."""

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            await created(stage)
            there = stage.there

            async def disturb() -> None:
                for number in range(10_000):
                    for one in of_kind(await there.objects(), "StatefulSet"):
                        note = {"annotations": {"example.com/number": str(number)}}
                        try:
                            await there.api.patch(
                                STATEFUL_SET, namespace, one["metadata"]["name"], {"metadata": note}
                            )
                        except apierrors.NotFound:
                            continue
                    await asyncio.sleep(0.02)

            disturbing = asyncio.create_task(disturb())
            await there.edit("chat", EDIT)
            await there.until_ready("chat")
            disturbing.cancel()
            await asyncio.wait([disturbing])
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_versions_begin_anew(kube: Kube, namespace: str, run):
    """As after a restored backup: the server hasn't come to the version that we know."""
    line = Line()

    def ahead(request: Request) -> Response | None:
        if request.verb == "list" and request.query.get("resourceVersion"):
            causes = [{"reason": "ResourceVersionTooLarge"}]
            return status(504, reason="Timeout", details={"causes": causes})
        return None

    async def scenario() -> None:
        async with scene(
            kube.kubeconfig, namespace, on_send=line.send, on_stream=line.stream
        ) as stage:
            await created(stage)
            line.answer = ahead
            line.ends_watches_with = apierrors.VersionAhead("too large resource version", code=504)
            await stage.there.edit("chat", EDIT)
            await asyncio.sleep(2 * informer.BACKOFF_S[0])
            line.ends_watches_with = None
            await stage.there.until_ready("chat")
            await at_rest(stage)

    run(scenario(), DEADLINE_S)
