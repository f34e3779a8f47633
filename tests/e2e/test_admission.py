"""What `router.admission` promises, through a PDCluster's file and real processes: a class by
header, refusals that say when to come again, limits of each client, and that others are served."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.cluster import Cluster, http_get, parse_metrics, serving, spec
from tests.e2e.asking import text_of

LONG = text_of(1200)
AT_ONCE = 5
ADMISSION = {
    "classHeader": True,
    "classes": [
        {"name": "plain", "share": 0.2},
        {"name": "hopeless", "ttft": "1ms", "priority": 5},
        {"name": "chat", "ttft": "30s", "priority": 10, "share": 0.5},
    ],
    "limits": {"requestsPerMinute": AT_ONCE, "burst": "1m"},
}


@pytest.fixture(scope="module")
def promising(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    one: dict[str, int] = {"replicas": 1}
    made = spec(model, prefill=one, decode=one, router={"admission": ADMISSION})
    with serving(made, tmp_path_factory.mktemp("promising")) as running:
        running.until(running.all_ready, "all pods ready")
        yield running


def asks(cluster: Cluster, key: str, **options: Any) -> OpenAI:
    """A client with a rate of its own."""
    return OpenAI(base_url=cluster.base_url, api_key=key, max_retries=0, timeout=60, **options)


def complete(client: OpenAI, prompt: str = "How far?", sla: str | None = None) -> Any:
    headers = {} if sla is None else {"x-pdcluster-class": sla}
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, extra_headers=headers
    )


def seconds(error: openai.APIStatusError) -> int:
    return int(error.response.headers["retry-after"])


def test_a_promise_that_cannot_be_kept_is_refused_at_once(promising: Cluster) -> None:
    with asks(promising, "early") as client:
        complete(client, LONG, "chat")  # from now on prefill's speed is known
        with pytest.raises(openai.RateLimitError) as refused:
            complete(client, LONG.replace("boats", "ships"), "hopeless")
        assert seconds(refused.value) >= 1
        assert refused.value.code == "overloaded"
        assert "class 'hopeless' promises 0.001 s" in refused.value.message
        assert complete(client, LONG.replace("boats", "ships")).usage.completion_tokens == 2


def test_streams_hear_of_it_by_a_status(promising: Cluster) -> None:
    with asks(promising, "streams") as client:
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(
                model="tiny", prompt=text_of(1100, number=7), max_tokens=2, stream=True,
                extra_headers={"x-pdcluster-class": "hopeless"},
            )  # fmt: skip
        assert seconds(refused.value) >= 1


def test_a_class_that_there_is_not(promising: Cluster) -> None:
    with asks(promising, "unknown") as client:
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, sla="vip")
        assert "there are plain, hopeless, chat" in refused.value.message


def test_a_clients_limit_is_its_own(promising: Cluster) -> None:
    """So many at once, then none; another client is served."""

    async def scenario() -> list[Any]:
        async with AsyncOpenAI(
            base_url=promising.base_url, api_key="greedy", max_retries=0, timeout=60
        ) as client:
            asked = [
                client.completions.create(model="tiny", prompt=f"{n} boats", max_tokens=2)
                for n in range(AT_ONCE + 3)
            ]
            return await asyncio.gather(*asked, return_exceptions=True)

    results = asyncio.run(scenario())
    refused = [one for one in results if isinstance(one, openai.RateLimitError)]
    assert len(refused) == 3
    assert len([one for one in results if not isinstance(one, BaseException)]) == AT_ONCE
    assert all(1 <= seconds(one) <= 60 for one in refused)
    assert all("rate limit" in one.message for one in refused)
    with asks(promising, "modest") as client:
        assert complete(client).usage.completion_tokens == 2


def test_the_client_comes_again_when_told(promising: Cluster) -> None:
    """OpenAI's client heeds Retry-After: its user sees a wait, and no error."""
    with asks(promising, "patient") as client:
        for number in range(AT_ONCE):
            complete(client, f"{number} boats")
        patient = client.with_options(max_retries=2)
        assert complete(patient).usage.completion_tokens == 2


def test_refusals_are_counted_by_class(promising: Cluster) -> None:
    [router] = promising.pods("router")
    samples = parse_metrics(http_get(f"http://{router.ip}:9090/metrics")[1])
    found = {
        dict(labels)["class"]: value
        for labels, value in samples["pdcluster_router_requests_total"].items()
        if dict(labels).get("code", dict(labels).get("status")) == "429"
    }
    assert found["hopeless"] >= 2
    assert found["plain"] >= 3
