"""Covers pd_router.metrics and journal: what is measured, under which names and labels, what
the sketches say, and that what is remembered stays bounded."""

import asyncio
import itertools
import logging
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_core.failures import Failure, FailureKind
from pd_core.sketch import from_json, quantile
from pd_router import journal
from pd_router.classes import Goals, Promises, SlaClass
from pd_router.metrics import Metrics
from pd_router.signals import Queued
from pd_router.types import Timeline
from tests import client
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says

HI: Any = [{"role": "user", "content": "hi"}]


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.expose().decode())
    return {
        (s.name.removeprefix("pdcluster_router_"), frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return samples(metrics).get((name, frozenset({"model": MODEL, **labels}.items())))


def a_timeline(**fields: Any) -> Timeline:
    return Timeline(request_id="r", accepted=0.0, **fields)


SERVED: dict[str, Any] = {
    "prompt_tokens": 100,
    "completion_tokens": 10,
    "cached_tokens": 32,
    "queue_s": 0.002,
    "grant_wait_s": 0.003,
    "prefill_worker": "p-0",
    "prefill_queue_s": 0.004,
    "prefill_s": 0.5,
    "kv_bytes": 1000,
    "transfer_s": 0.04,
    "transport": "tcp",
    "decode_worker": "d-0",
    "attempts": 1,
    "ttft_s": 0.6,
    "tpot_s": 0.02,
}


def test_a_served_request_in_all_its_stages() -> None:
    metrics = Metrics(MODEL)
    metrics.generation_done(a_timeline(**SERVED))
    stages = {
        ("prefill_seconds_sum", "prefill"): 0.5,
        ("prefill_queue_seconds_sum", "prefill"): 0.004,
        ("grant_wait_seconds_sum", "decode"): 0.003,
        ("transfer_seconds_sum", "decode"): 0.04,
    }
    for (name, pool), expected in stages.items():
        assert value(metrics, name, pool=pool) == pytest.approx(expected)
    of_class = {("tpot_seconds_sum", "decode"): 0.02, ("queue_seconds_sum", "router"): 0.002}
    for (name, pool), expected in of_class.items():
        found = value(metrics, name, pool=pool, **{"class": ""})
        assert found == pytest.approx(expected)
    assert value(metrics, "kv_bytes_total", transport="tcp") == 1000
    assert value(metrics, "prompt_tokens_total") == 100
    assert value(metrics, "cached_tokens_total") == 32
    assert value(metrics, "completion_tokens_total") == 10


def test_copies_by_what_became_of_them() -> None:
    metrics = Metrics(MODEL)
    copy = {"pulled_from": "d-0", "pulled_tokens": 32, "pulled_bytes": 2048, "pull_s": 0.25}
    metrics.generation_done(a_timeline(**SERVED | copy))
    metrics.generation_done(a_timeline(**SERVED | copy | {"pulled_tokens": 0, "pulls_failed": 1}))
    metrics.generation_done(a_timeline(**SERVED))
    metrics.generation_done(a_timeline(pulls_cancelled=1))  # its client left meanwhile
    assert value(metrics, "pulls_total", outcome="cancelled") == 1
    assert value(metrics, "pulls_total", outcome="done") == 1
    assert value(metrics, "pulls_total", outcome="computed") == 1
    assert value(metrics, "pulled_tokens_total") == 32
    assert value(metrics, "pull_seconds_sum", pool="prefill") == pytest.approx(0.5)
    assert value(metrics, "pull_seconds_count", pool="prefill") == 2


def test_one_worker_that_does_both_is_a_pool_of_its_own() -> None:
    metrics = Metrics(MODEL)
    together = {"prefill_worker": "c-0", "decode_worker": "c-0", "kv_bytes": 0}
    metrics.generation_done(a_timeline(**SERVED | together))
    assert value(metrics, "prefill_seconds_count", pool="both") == 1
    assert value(metrics, "tpot_seconds_count", pool="both", **{"class": ""}) == 1
    assert value(metrics, "transfer_seconds_count", pool="decode") is None


def test_a_request_that_never_got_anywhere_counts_no_stages() -> None:
    metrics = Metrics(MODEL)
    metrics.generation_done(a_timeline(prompt_tokens=5, queue_s=1.0))
    metrics.failed(FailureKind.NO_CAPACITY)
    metrics.on_retry(Failure(FailureKind.WORKER_LOST, ""))
    names = {name for name, _ in samples(metrics)}
    assert "prefill_seconds_count" not in names
    assert value(metrics, "failures_total", kind="no_capacity") == 1
    assert value(metrics, "retries_total", kind="worker_lost") == 1


def test_the_first_failure_and_the_first_retry_are_an_increase() -> None:
    """Each kind that there can be begins at 0."""
    metrics = Metrics(MODEL)
    for kind in FailureKind:
        assert value(metrics, "failures_total", kind=kind.value) == 0
        retried = value(metrics, "retries_total", kind=kind.value)
        assert retried == (0 if Failure(kind, "").traits.retryable else None)
    for outcome in ("won", "lost"):
        assert value(metrics, "hedges_total", outcome=outcome) == 0
    metrics.on_retry(Failure(FailureKind.WORKER_LOST, ""))
    assert value(metrics, "retries_total", kind="worker_lost") == 1


def test_buckets_go_from_a_millisecond_to_two_minutes() -> None:
    metrics = Metrics(MODEL)
    metrics.generation_done(a_timeline(**SERVED))
    bounds = sorted(
        float(dict(labels)["le"])
        for name, labels in samples(metrics)
        if name == "prefill_seconds_bucket"
    )
    assert (bounds[0], bounds[-2], bounds[-1]) == (0.001, 120.0, float("inf"))
    assert all(b / a <= 2 for a, b in itertools.pairwise(bounds[:-1]))


def test_sketches_hold_the_last_minute() -> None:
    now = 1000.0
    metrics = Metrics(MODEL, clock=lambda: now)
    for ttft in (0.1, 0.2, 0.3):
        metrics.first_text(a_timeline(**SERVED), ttft)
    metrics.generation_done(a_timeline(**SERVED))
    told = metrics.signals_json()
    assert (told["model"], told["window_s"]) == (MODEL, 60.0)
    assert quantile(from_json(told["ttft_s"]), 0.5) == pytest.approx(0.2, rel=0.03)
    assert quantile(from_json(told["tpot_s"]), 0.5) == pytest.approx(0.02, rel=0.03)
    now += 100
    later = metrics.signals_json()
    assert (later["ttft_s"], later["tpot_s"]) == ({}, {})


async def _ask(r: Rig, **fields: Any) -> client.Response:
    body = {"model": MODEL, "messages": HI} | fields
    return await client.request(r.http.host, r.http.port, "POST", "/v1/chat/completions", body)


def test_what_a_request_over_http_leaves_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with rig() as r:
            tokens = r.tokens("abcd")

            async def script(generation: PlayedGeneration) -> None:
                for key in ("prefill_worker", "decode_worker", "attempts", "cached_tokens"):
                    setattr(generation.timeline, key, SERVED[key])
                for token in tokens:
                    generation.emit(token)
                    await asyncio.sleep(0.01)
                generation.emit(2, "stop")
                generation.done()

            r.sessions.script = script
            with caplog.at_level(logging.INFO, "pd_router.access"):
                for stream in (False, True):
                    response = await _ask(r, stream=stream)
                    assert response.status == 200
                    await response.body()
                    await response.close()
                response = await _ask(r, n=0)
                await response.close()
            path = "/v1/chat/completions"
            default = {"class": "default"}

            def requests(status: str) -> float | None:
                sla = default if status == "200" else {"class": ""}
                return value(r.metrics, "requests_total", status=status, endpoint=path, **sla)

            assert requests("200") == 2
            assert requests("400") == 1
            assert value(r.metrics, "failures_total", kind="invalid_request") == 1
            assert value(r.metrics, "itl_seconds_count", pool="decode", **default) == 8
            assert value(r.metrics, "ttft_seconds_count", pool="prefill", **default) == 2
            tpot_s = value(r.metrics, "tpot_seconds_sum", pool="decode", **default)
            assert tpot_s is not None
            assert 2 * 0.009 < tpot_s < 1
            assert value(r.metrics, "running_requests") == 0
            entry = r.journal.find(None)[1]
            assert entry["timelines"][0]["tpot_s"] == pytest.approx(tpot_s / 2, rel=0.9)

    go(scenario())
    lines = [record.getMessage() for record in caplog.records if record.name == "pd_router.access"]
    assert len(lines) == 3
    words = dict(word.split("=", 1) for word in lines[1].split(" "))
    assert words["status"] == "200"
    assert words["stream"] == "true"
    assert words["completion_tokens"] == "5"
    assert (words["prefill"], words["decode"]) == ("p-0", "d-0")
    assert float(words["ttft_ms"]) <= float(words["total_ms"])
    assert "failure=invalid_request" in lines[2]


PROMISES = Promises(
    (SlaClass("std"), SlaClass("vip", ttft_s=0.5), SlaClass("batch", ttft_s=60, tpot_s=1.0)),
    slo=Goals(ttft_s=2.0, tpot_s=0.03),
)


@pytest.mark.parametrize(
    ("sla", "ttft_s", "tpot_s", "kept"),
    [
        ("std", 2.0, 0.03, True),  # as the PDCluster promises
        ("std", 2.1, 0.03, False),
        ("vip", 0.6, 0.02, False),  # its own TTFT
        ("vip", 0.5, 0.04, False),  # and the PDCluster's TPOT
        ("batch", 59.0, 0.9, True),
        ("batch", 59.0, 1.1, False),
        ("std", 1.0, None, True),  # one token
        ("std", None, None, False),  # no text at all
    ],
)
def test_goodput_is_what_kept_its_class_promise(
    sla: str, ttft_s: float | None, tpot_s: float | None, kept: bool
) -> None:
    metrics = Metrics(MODEL, promises=PROMISES)
    early = a_timeline(ttft_s=0.1, tpot_s=0.01)
    metrics.answered(sla, [early, a_timeline(ttft_s=ttft_s, tpot_s=tpot_s)])
    known = {
        one: value(metrics, "goodput_requests_total", **{"class": one})
        for one in ("std", "vip", "batch")
    }
    assert known == {"std": 0, "vip": 0, "batch": 0} | {sla: float(kept)}


def test_without_a_promise_every_answer_is_goodput() -> None:
    metrics = Metrics(MODEL)
    metrics.answered("default", [a_timeline(ttft_s=100.0, tpot_s=9.0)])
    assert value(metrics, "goodput_requests_total", **{"class": "default"}) == 1


def test_a_request_counts_to_its_class_and_made_up_ones_make_no_series() -> None:
    async def ask(r: Rig, name: str) -> int:
        body = {"model": MODEL, "messages": HI}
        where = (r.http.host, r.http.port, "POST", "/v1/chat/completions")
        response = await client.request(*where, body, headers={"x-pdcluster-class": name})
        await response.close()
        return response.status

    async def scenario() -> None:
        async with rig(promises=PROMISES, class_header=True) as r:
            r.sessions.script = says(r.tokens("abc"))
            assert [await ask(r, name) for name in ("vip", "batch", "")] == [200, 200, 200]
            for number in range(5):
                await ask(r, f"x{number}")

            async def full(generation: PlayedGeneration) -> None:
                generation.fail(FailureKind.NO_CAPACITY)

            r.sessions.script = full
            assert await ask(r, "vip") == 503
            found = samples(r.metrics)
            known = [dict(labels).get("class") for _, labels in found if "class" in dict(labels)]
            assert set(known) == {"", "std", "vip", "batch"}
            path = "/v1/chat/completions"
            answers = {
                name: value(
                    r.metrics, "requests_total", status="200", endpoint=path, **{"class": name}
                )
                for name in set(known)
            }
            assert answers == {"": 5, "std": 1, "vip": 1, "batch": 1}
            assert value(
                r.metrics, "requests_total", status="503", endpoint=path, **{"class": "vip"}
            ) == 1  # fmt: skip
            assert value(r.metrics, "ttft_seconds_count", pool="both", **{"class": "vip"}) == 1
            assert r.journal.find(None)[-1]["timelines"][0]["sla"] == "vip"

    go(scenario())


def test_an_answer_that_breaks_off_is_no_goodput() -> None:
    async def scenario() -> None:
        async with rig() as r:

            async def script(generation: PlayedGeneration) -> None:
                generation.emit(r.tokens("a")[0])
                generation.fail(FailureKind.WORKER_LOST)

            r.sessions.script = script
            response = await _ask(r, stream=True)
            assert response.status == 200
            await response.body()
            await response.close()
            assert value(r.metrics, "goodput_requests_total", **{"class": "default"}) == 0

    go(scenario())


def test_a_token_without_text_is_not_the_first_text() -> None:
    async def scenario() -> None:
        async with rig() as r:
            half, *rest = r.tokens("🙂")
            waited_s = 0.0

            async def script(generation: PlayedGeneration) -> None:
                nonlocal waited_s
                came = time.monotonic()
                generation.emit(half)
                await asyncio.sleep(0.05)
                waited_s = time.monotonic() - came  # a timer may be early by its resolution
                for token in rest:
                    generation.emit(token)
                generation.emit(2, "stop")
                generation.done()

            r.sessions.script = script
            await (await _ask(r)).close()
            ttft_s = value(r.metrics, "ttft_seconds_sum", pool="both", **{"class": "default"})
            assert ttft_s is not None
            assert ttft_s >= waited_s > 0

    go(scenario())


def test_the_ring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "RING_REQUESTS", 3)

    async def scenario() -> None:
        async with rig() as r:
            r.sessions.script = says([])
            for _ in range(5):
                await (await _ask(r)).close()
            assert len(r.journal.find(None)) == 3
            response = await client.request(
                r.http.host,
                r.http.port,
                "POST",
                "/v1/completions",
                {"model": MODEL, "prompt": ["x"] * 40},
            )
            await response.close()
            assert len(r.journal.find(None)[0]["timelines"]) == journal.RING_TIMELINES

    go(scenario())


def test_gateways_find_the_names_that_they_know() -> None:
    metrics = Metrics("m")
    worker = {
        "usable": True,
        "role": "decode",
        "running": 3,
        "queued": 1,
        "waiting_grants": 2,
        "kv_tokens": 1000,
        "kv_used_tokens": 250,
    }
    prefill = worker | {"role": "prefill", "running": 0, "queued": 4, "waiting_grants": 0}
    metrics.gateway([worker, prefill, worker | {"usable": False}], Queued(5, 100, 5))
    text = metrics.expose().decode()
    assert 'vllm:num_requests_running{model_name="m"} 3.0' in text
    assert 'vllm:num_requests_waiting{model_name="m"} 12.0' in text
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.25' in text
