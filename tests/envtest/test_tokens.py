"""Each PDCluster's token, on a real API server: an operator that may create Secrets and read none
makes it and makes it again; one that may read them follows it by the next; nobody's Secret is
overwritten, and the token is nowhere but in its own."""

import base64
import json
import logging
from datetime import timedelta

import pytest

from e2e.cluster.audit import Audit
from e2e.cluster.envtest import EnvTest, Kube
from pd_core.proof import parse_tokens
from pd_operator import reconcile, tokening
from pd_operator.podparts import Manifest, Settings
from pd_operator.resources import EVENT, SECRET
from tests.envtest.access import rules
from tests.envtest.operating import Scene, Watching, looking_on, operating, scene
from tests.envtest.podstub import running
from tests.envtest.test_certificates import Clock, look_again
from tests.envtest.test_operator import at_rest
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 100.0
CREATING = Settings(certificates=False)


async def held(there: Watching, name: str = "chat") -> tuple[bytes, ...]:
    secret = await there.get("Secret", f"{name}-token")
    return parse_tokens(base64.b64decode(secret["data"]["tokens"]))


def test_it_takes_no_right_but_to_create_secrets(
    own_kube: EnvTest, namespace: str, audit: Audit, run, monkeypatch
) -> None:
    """It's made, made again where somebody deleted it, never read, and each has its own."""
    monkeypatch.setattr(tokening, "PROVIDED_AGAIN", timedelta(0))
    given = rules("namespaced", "peerTokens", "lease")
    account = own_kube.service_account(namespace, "creating", rules=given)

    async def scenario() -> None:
        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            running(own_kube.kubeconfig, namespace) as stub,
            operating(account, namespace, settings=CREATING),
        ):
            for name in ("chat", "other"):
                await there.create(document(**{"metadata.name": name}))
                await there.until_ready(name)
            [first], [second] = await held(there), await held(there, "other")
            assert first != second
            [owner] = (await there.get("Secret", "chat-token"))["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["name"]) == ("PDCluster", "chat")
            await there.delete("Secret", "chat-token")
            stub.ready = lambda _pod: False  # as pods whose Secret isn't there
            await there.edit("chat", {"decode": {"replicas": 2}})

            async def is_back() -> bool:
                return await there.find("Secret", "chat-token") is not None

            await there.until("it is there again", is_back)
            assert await held(there, "other") == (second,)

    run(scenario(), DEADLINE_S)
    mine = list(audit.requests(user=f"{namespace}:creating"))
    assert {one.verb for one in mine if one.resource == "secrets"} == {"create"}
    assert [one for one in mine if one.code == 403] == []


def test_without_the_right_it_says_so(own_kube: EnvTest, namespace: str, run, monkeypatch) -> None:
    monkeypatch.setattr(reconcile, "RETRY_S", 0.2)
    account = own_kube.service_account(namespace, "not", rules=rules("namespaced", "lease"))

    async def scenario() -> None:
        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            operating(account, namespace, settings=CREATING),
        ):
            await there.create(document())

            async def said() -> bool:
                return "chat-token" in json.dumps((await there.cluster("chat")).get("status"))

            await there.until("the status says what is refused", said)

    run(scenario(), DEADLINE_S)


def test_one_that_may_only_create_is_at_rest_and_overwrites_nobody(
    kube: Kube, namespace: str, run
) -> None:
    """A Secret of that name that is there is taken as it is, as one that a person rotated."""
    own = base64.b64encode(b"o" * 40).decode()
    foreign: Manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "chat-token", "namespace": namespace},
        "data": {"tokens": own},
    }

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace, settings=CREATING) as stage:
            await stage.there.api.create(SECRET, foreign)
            await stage.there.create(document())
            await stage.there.until_ready("chat")
            assert await held(stage.there) == (b"o" * 40,)
            await at_rest(stage)

    run(scenario(), DEADLINE_S)


def test_a_life_of_tokens(kube: Kube, namespace: str, run, caplog) -> None:
    """Made, kept, followed by the next; each write is due, and shows nothing."""
    clock = Clock()
    seen: list[tuple[bytes, ...]] = []

    async def after(stage: Scene, days: float) -> tuple[bytes, ...]:
        clock.ahead += timedelta(days=days)
        await look_again(stage, len(seen))
        seen.append(await held(stage.there))
        return seen[-1]

    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace, clock=clock) as stage:
            await stage.there.create(document())
            await stage.there.until_ready("chat")
            await at_rest(stage)
            [first] = await after(stage, 0)
            assert await after(stage, 29) == (first,)
            [_, second] = await after(stage, 1.1)
            assert seen[-1] == (first, second)
            assert await after(stage, 0.5) == (first, second)
            assert await after(stage, 0.6) == (second, first)
            assert await after(stage, 1.1) == (second,)
            await at_rest(stage)
            document_now = await stage.there.cluster("chat")
            events = list((await stage.there.api.list(EVENT, namespace)).items)
            shown = json.dumps([document_now, events]) + caplog.text
            for one in (first, second):
                assert one.decode() not in shown
                assert base64.b64encode(one).decode()[:32] not in shown

    with caplog.at_level(logging.DEBUG, logger="pd_operator"):
        run(scenario(), DEADLINE_S)


def test_what_somebody_breaks_is_made_anew(kube: Kube, namespace: str, run) -> None:
    async def scenario() -> None:
        async with scene(kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            broken = {"data": {"tokens": base64.b64encode(b"x").decode()}}
            await there.api.patch(SECRET, namespace, "chat-token", broken)

            async def whole() -> bool:
                found = (await there.get("Secret", "chat-token"))["data"]["tokens"]
                return len(base64.b64decode(found)) > 32

            await there.until("it is a token again", whole)

    run(scenario(), DEADLINE_S)
