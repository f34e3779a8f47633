"""Covers pd_router.signals: what a router tells those who scale, from a request's timeline to
the document on the admin port. Demand is counted at the door, also what finds no room."""

import asyncio
import json
from typing import Any

import pytest

from pd_core.failures import FailureKind, RequestFailure
from pd_core.sketch import from_json, quantile
from pd_router.admission import AdmissionConfig
from pd_router.signals import Queued, Signals
from pd_router.types import Timeline
from tests import client
from tests.pd_router.http_rig import MODEL, go
from tests.pd_router.http_rig import rig as http_rig
from tests.pd_router.rig import rig, until


def timeline(**fields: Any) -> Timeline:
    made = {"request_id": "r", "accepted": 0.0, "prompt_tokens": 100, "cached_tokens": 36}
    return Timeline(**made | fields)


def test_arrivals_are_counted_whatever_becomes_of_them() -> None:
    signals = Signals("p", 10.0)
    signals.arrived(100, 1)
    signals.arrived(50, 3)
    signals.unread()
    told = signals.document(13.0, Queued(1, 50, 3), [])
    counters = told["counters"]
    assert (counters["arrived_requests"], counters["arrived_sequences"]) == (2, 4)
    assert (counters["arrived_tokens"], counters["unread_requests"]) == (150, 1)
    assert (told["process"], told["uptime_s"]) == ("p", 3.0)
    assert told["queued"] == {"requests": 1, "tokens": 50, "sequences": 3}


def test_ttft_is_told_with_and_without_the_wait_for_decode() -> None:
    signals = Signals("p", 0.0)
    waits = {"queue_s": 0.1, "prefill_queue_s": 0.2, "prefill_s": 0.5, "grant_wait_s": 2.0}
    signals.first_text(timeline(**waits), 3.0, 1.0)
    told = signals.document(1.0, Queued(), [])
    assert quantile(from_json(told["ttft_s"]), 0.99) == pytest.approx(3.0, rel=0.03)
    assert quantile(from_json(told["own_ttft_s"]), 0.99) == pytest.approx(1.0, rel=0.03)
    assert quantile(from_json(told["uncached_tokens"]), 0.5) == pytest.approx(64, rel=0.03)
    assert told["counters"]["uncached_tokens"] == 64
    assert told["counters"]["overhead_s"] == pytest.approx(0.2)


def test_lengths_come_from_whoever_put_something_out() -> None:
    signals = Signals("p", 0.0)
    signals.ended(timeline(completion_tokens=0), 1.0)
    signals.ended(timeline(completion_tokens=30, choices=3, tpot_s=0.02), 1.0)
    counters = signals.document(1.0, Queued(), [])["counters"]
    assert (counters["ended_sequences"], counters["ended_tokens"]) == (3, 30)


def test_answers_are_told_by_the_length_of_their_prompts() -> None:
    signals = Signals("p", 0.0)
    for tokens in (64, 127, 128):
        signals.arrived(tokens, 2)
    signals.ended(timeline(prompt_tokens=100, completion_tokens=0), 1.0)
    signals.ended(timeline(prompt_tokens=100, completion_tokens=30, choices=2), 1.0)
    told = signals.document(1.0, Queued(), [])
    assert told["lengths"] == {"7": [4, 2, 30], "8": [2, 0, 0]}


def test_sketches_forget_after_a_minute_and_counters_never() -> None:
    signals = Signals("p", 0.0)
    signals.first_text(timeline(), 1.0, 1.0)
    told = signals.document(100.0, Queued(), [])
    assert told["ttft_s"] == told["own_ttft_s"] == {}
    assert told["counters"]["started_requests"] == 1


def test_sessions_count_at_the_door(run) -> None:
    async def scenario() -> None:
        async with rig(admission=AdmissionConfig(max_running=1)) as r:
            with pytest.raises(RequestFailure) as refused:
                r.start()
            assert refused.value.failure.kind is FailureKind.NO_WORKERS
            assert len(r.hooks.arrivals) == 1
            decode = await r.add("decode", "d-0", max_model_tokens=100)
            decode.gates["grant"] = asyncio.Event()
            _, _, running = r.start()
            _, _, waiting = r.start(prompt=tuple(range(7)), choices=2)
            assert len(r.hooks.arrivals) == 3
            await until(lambda: running.started, "the first has its turn")
            assert r.sessions.queued() == Queued(1, 7, 2)
            with pytest.raises(RequestFailure):
                r.start(prompt=tuple(range(200)))
            assert len(r.hooks.arrivals) == 3  # no worker could ever serve that one
            (told,) = r.workers.signals()
            assert (told["worker"], told["epoch"]) == ("d-0", decode.epoch)
            assert told["kv_tokens"] == decode.kv_blocks * 4
            json.dumps(told)
            waiting.cancel()
            running.cancel()

    run(scenario())


def test_the_document_on_the_admin_port() -> None:
    async def scenario() -> dict[str, Any]:
        async with http_rig(max_requests=0) as r:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
            answer = await client.request(
                r.http.host, r.http.port, "POST", "/v1/chat/completions", body
            )
            assert answer.status == 429
            await answer.close()
            page = await client.request(r.admin.host, r.admin.port, "GET", "/sketches")
            found: dict[str, Any] = await page.json()
            await page.close()
            return found

    told = go(scenario())
    assert told["router"] == "router-0"
    assert told["counters"]["unread_requests"] == 1
    assert told["workers"] == [{"worker": "p-0", "epoch": "e", "running": 3}]
    assert told["queued"]["requests"] == told["held_requests"] == 0
