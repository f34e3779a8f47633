"""Covers pd_router.app's small routes, the admin port, and requests' ids."""

import asyncio
from typing import Any

import openai
import pytest

from tests import client
from tests.pd_router.http_rig import MODEL, go, rig, says

HI: Any = [{"role": "user", "content": "hi"}]


def test_models_health_and_readiness() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            (model,) = (await api.models.list()).data
            assert (model.id, model.owned_by) == (MODEL, "pdcluster")
            assert (await api.models.retrieve(MODEL)).id == MODEL
            with pytest.raises(openai.NotFoundError) as caught:
                await api.models.retrieve("other")
            assert caught.value.code == "model_not_found"
            for is_ready in (True, False):
                r.workers.is_ready = is_ready
                for method in ("GET", "HEAD"):
                    response = await client.request(r.http.host, r.http.port, method, "/health")
                    assert response.status == 200
                    await response.close()
                response = await client.request(r.http.host, r.http.port, "GET", "/ready")
                assert response.status == (200 if is_ready else 503)
                assert ("retry-after" in response.headers) is not is_ready
                await response.close()

    go(scenario())


def test_the_admin_port() -> None:
    async def scenario() -> None:
        async with rig() as r, r.client() as api:

            async def page(path: str, status: int = 200) -> Any:
                response = await client.request(r.admin.host, r.admin.port, "GET", path)
                assert response.status == status
                body = await response.body()
                await response.close()
                return body.decode() if path == "/metrics" else client.json.loads(body)

            r.sessions.script = says(r.tokens("abc"))
            answer = await api.chat.completions.create(
                model=MODEL, messages=HI, extra_headers={"x-request-id": "mine-1"}
            )
            for wanted in ("mine-1", answer.id):
                (entry,) = (await page(f"/debug/requests?id={wanted}"))["requests"]
                assert (entry["request_id"], entry["id"]) == ("mine-1", answer.id)
                assert entry["timelines"][0]["completion_tokens"] == 4
                assert entry["timelines"][0]["ttft_s"] > 0
            assert (await page("/debug/requests?id=none"))["requests"] == []
            assert len((await page("/debug/requests"))["requests"]) == 1
            again = await api.chat.completions.create(model=MODEL, messages=HI)
            (entry,) = (await page("/debug/requests?last=1"))["requests"]
            assert entry["id"] == again.id
            for nonsense in ("0", "x", "-1", "1001", "9" * 5000):
                refused = await page(f"/debug/requests?last={nonsense}", 400)
                assert refused["error"]["code"] == "bad_query"
            assert [w["worker"] for w in (await page("/debug/workers"))["workers"]] == ["p-0"]
            sketches = await page("/sketches")
            assert sketches["router"] == "router-0"
            assert sum(sketches["ttft_s"].values()) == 2
            assert "pdcluster_router_ttft_seconds_bucket" in await page("/metrics")
            assert (await page("/health"))["status"] == "ok"
            assert (await page("/other", 404))["error"]["code"] == "unknown_url"
            response = await client.request(r.http.host, r.http.port, "GET", "/metrics")
            assert response.status == 404  # not for clients
            await response.close()

    go(scenario())


def test_request_ids() -> None:
    async def scenario() -> None:
        async with rig() as r:

            async def id_of(path: str, given: str | None) -> str:
                headers = {} if given is None else {"x-request-id": given}
                response = await client.request(
                    r.http.host, r.http.port, "GET", path, headers=headers
                )
                await response.close()
                return response.headers["x-request-id"]

            assert await id_of("/health", "abc-1.2:3") == "abc-1.2:3"
            assert await id_of("/nowhere", "abc") == "abc"
            minted = {await id_of("/health", given) for given in (None, "a b", "x" * 129, "é")}
            assert len(minted) == 4

    go(scenario())


def test_two_requests_with_one_id_are_two_to_the_workers() -> None:

    async def scenario() -> None:
        async with rig() as r, r.client() as api:
            r.sessions.script = says([70])
            headers = {"x-request-id": "same"}
            asks = [
                api.chat.completions.create(model=MODEL, messages=HI, extra_headers=headers)
                for _ in range(2)
            ]
            await asyncio.gather(*asks)
            ids = {generation.request.request_id for generation in r.sessions.started}
            assert len(ids) == 2
            assert len(r.journal.find("same")) == 2

    go(scenario())
