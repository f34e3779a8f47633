"""Covers pd_router.crew and merged: a router of several processes as clients, workers and
those who measure see it: one port, all processes told of workers, one admin page for all."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_core.sketch import from_json
from pd_router import live, merged, page
from pd_router.crew import Member as Process
from pd_router.metrics import Metrics
from pd_router.settings import Member, parse
from pd_router.signals import Queued
from pd_router.types import Timeline
from tests import client
from tests.pd_router.fake_worker import FakeKv
from tests.pd_router.http_rig import go
from tests.pd_router.test_settings import NEEDED
from tests.pd_router.whole_rig import Tiny
from tests.ports import free_ports

# ---- what several tell as one ------------------------------------------------------------


def worker(name: str, heard_s_ago: float, **fields: Any) -> dict[str, Any]:
    return {
        "worker": name,
        "role": "decode",
        "usable": True,
        "heard_s_ago": heard_s_ago,
        "running": 3,
        "queued": 1,
        "waiting_grants": 1,
        "kv_tokens": 100,
        "kv_used_tokens": 25,
        **fields,
    }


def process(tokens: int, queued: int, workers: list[dict[str, Any]]) -> Metrics:
    metrics = Metrics("m")
    for count in range(1, tokens + 1):
        timeline = Timeline("r", 0.0, prompt_tokens=10, completion_tokens=count, tpot_s=0.02)
        timeline.ttft_s = 0.1
        metrics.first_text(timeline, 0.1)
        metrics.generation_done(timeline)
        metrics.answered("default", [timeline])
        metrics.gap_observer(timeline)(0.01)
    metrics.running.set(tokens)
    metrics.ready.set(1)
    metrics.gateway(workers, Queued(queued, 10 * queued, queued))
    return metrics


def test_counters_add_up_and_workers_are_counted_once() -> None:
    old, new = worker("d-0", 0.9, running=9), worker("d-0", 0.1)
    both = [process(2, 4, [old]), process(3, 5, [new])]
    queued = [Queued(4, 40, 4), Queued(5, 50, 5)]
    documents = [
        {"router": f"r.{i}", "clients": 2} | one.signals_json(queued[i], [old, new][i : i + 1])
        for i, one in enumerate(both)
    ]
    document = json.loads(json.dumps(merged.sketches("r", documents)))
    assert (document["router"], document["model"]) == ("r", "m")
    assert document["counters"]["started_requests"] == 5
    assert document["lengths"] == {"4": [0, 5, 1 + 2 + 1 + 2 + 3]}
    assert document["clients"] == 2
    assert document["queued"] == {"requests": 9, "tokens": 90, "sequences": 9}
    assert document["workers"] == [new]
    assert sum(from_json(document["ttft_s"]).values()) == 5
    other = merged.sketches("r", [documents[0], {**documents[1], "process": "restarted"}])
    assert len({document["process"], other["process"], documents[0]["process"]}) == 3

    text = merged.metrics([one.expose().decode() for one in both], document).decode()
    samples = {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["pdcluster_router_running_requests", ""] == 5
    assert samples["pdcluster_router_goodput_requests_total", ""] == 5
    assert samples["pdcluster_router_ready", ""] == 1
    assert samples["pdcluster_router_completion_tokens_total", ""] == 3 + 6
    assert samples["pdcluster_router_itl_seconds_bucket", "0.01"] == 5
    assert samples["pdcluster_router_itl_seconds_count", ""] == 5
    assert samples["vllm:num_requests_running", ""] == 3
    assert samples["vllm:num_requests_waiting", ""] == 2 + 9
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.25


def test_a_process_knows_its_place() -> None:
    needed = [one for one in NEEDED if not one.startswith("--control")]
    settings = parse([*needed, "--control=a:7000", "--processes=3", "--member=1/3:9"])
    assert settings.member == Member(1, 3, 9)


@pytest.mark.parametrize("extra", ["--processes=33", "--processes=0", "--member=x"])
def test_bad_flags(extra: str) -> None:
    with pytest.raises(SystemExit):
        parse([*NEEDED, extra])


def test_each_process_needs_a_control_port() -> None:
    needed = [one for one in NEEDED if not one.startswith("--control")]
    for port in (0, 65535):
        with pytest.raises(SystemExit):
            parse([*needed, f"--control=a:{port}", "--processes=2"])


ENDS_S = 30.0

# ---- processes -------------------------------------------------------------------------------


class Site:
    """A router of two processes."""

    def __init__(self, running: asyncio.subprocess.Process, http: int, admin: int) -> None:
        self.process = running
        self.http = http
        self.admin = admin

    async def get(self, port: int, path: str, **headers: str) -> tuple[int, bytes]:
        response = await client.request("127.0.0.1", port, "GET", path, headers=headers)
        try:
            return response.status, await response.body()
        finally:
            await response.close()

    async def post(self, port: int, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        response = await client.request("127.0.0.1", port, "POST", path, body, headers)
        try:
            return response.status, json.loads(await response.body())
        finally:
            await response.close()

    async def page(self, path: str) -> Any:
        return json.loads((await self.get(self.admin, path))[1])

    async def until(self, what: Any) -> Any:
        """Asks again until it is so; the scenario has a deadline."""
        while True:
            try:
                if found := await what():
                    return found
            except (OSError, ValueError, KeyError):
                pass
            await asyncio.sleep(0.05)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@asynccontextmanager
async def crew(http: int, admin: int, control: int) -> AsyncIterator[Site]:
    at = "127.0.0.1"
    root = Path(__file__).parents[2]
    paths = [str(root / "runtime"), str(root / "proto"), os.environ.get("PYTHONPATH", "")]
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pd_router", "--model=fake", "--router-name=r", "--processes=2",
        f"--http={at}:{http}", f"--admin={at}:{admin}", f"--control={at}:{control}",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    try:
        yield Site(running, http, admin)
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Site, Tiny]]:
    """A router of two processes that both know a worker."""
    http, admin, control, other_control = free_ports(4)
    both = Tiny("both", "b-0", FakeKv())
    try:
        async with crew(http, admin, control) as site:

            async def serves() -> bool:
                return (await site.get(http, "/health"))[0] == 200 and len(site.children()) == 2

            await site.until(serves)
            await both.start(f"127.0.0.1:{control}")
            both.announce_to(f"127.0.0.1:{other_control}")

            async def known() -> bool:
                workers = (await site.page("/debug/workers"))["workers"]
                return len(workers) == 2 and all(one["usable"] for one in workers)

            await site.until(known)
            yield site, both
    finally:
        await both.die()


@pytest.mark.slow
def test_two_processes_are_one_router() -> None:
    body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}

    async def scenario() -> None:
        async with serving() as (site, both):

            async def ask() -> str:
                status, answer = await site.post(site.http, "/v1/completions", body)
                assert status == 200, answer
                return str(answer["id"])

            ids = [await ask() for _ in range(40)]
            entries = (await site.page("/debug/requests"))["requests"]
            assert {entry["id"] for entry in entries} == set(ids)
            found = (await site.page("/debug/requests?last=2"))["requests"]
            assert [entry["id"] for entry in found] == ids[:-3:-1]
            found = (await site.page(f"/debug/requests?id={ids[0]}"))["requests"]
            assert [entry["id"] for entry in found] == ids[:1]
            assert both.binds == 2  # each process has a work stream of its own
            sketches = await site.page("/sketches")
            assert sketches["counters"]["ended_sequences"] == 40
            assert [one["worker"] for one in sketches["workers"]] == ["b-0"]
            text = (await site.get(site.admin, "/metrics"))[1].decode()
            assert 'completion_tokens_total{model="fake"} 160.0' in text
            state = await site.page("/debug/state")
            assert state["router"] == "r"
            assert len(state["requests"]) == live.RECENT_REQUESTS
            assert sum(state["distributions"]["ttft"]["counts"][-1:]) == 40

    go(scenario(), 100)


@pytest.mark.slow
def test_the_admin_page_of_several() -> None:
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4, "ignore_eos": True, "stream": True}  # fmt: skip

    async def scenario() -> None:
        async with serving() as (site, _):
            for path in ("/debug/requests", "/debug/workers", "/debug/state", "/sketches"):
                assert (await site.get(site.admin, path, host="evil.example"))[0] == 403
            assert (await site.get(site.admin, "/metrics", host="router.example"))[0] == 200
            assert b"<title>PDCluster</title>" in (await site.get(site.admin, "/"))[1]
            status, said = await site.post(site.admin, page.CHAT, chat)  # by one of the processes
            assert (status, said["error"]["type"]) == (400, "invalid_request_error")
            assert "chat template" in said["error"]["message"]
            decision = {"time": "t", "pool": "decode", "to": 2, "reason": "r", "text": "why"}
            status, _ = await site.post(site.admin, "/scaling", {"standing": [decision]})
            assert status == 200
            [told] = (await site.page("/debug/state"))["sizes"]["standing"]
            assert told["text"] == "why"
            status, _ = await site.post(site.admin, page.CHAT, chat, origin="https://evil.example")
            assert status == 403

    go(scenario(), 100)


@pytest.mark.slow
def test_a_process_that_dies_is_started_again_and_all_end_when_told() -> None:
    """Told while the new one is still being started: it ends too, and at once."""

    async def scenario() -> None:
        async with serving() as (site, _):
            killed = site.children()[0]
            killed.kill()

            async def replaced() -> bool:
                alive = [one.pid for one in site.children() if one.status() != "zombie"]
                return len(alive) == 2 and killed.pid not in alive

            await site.until(replaced)
            site.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(ENDS_S):
                assert await site.process.wait() == 0

    go(scenario(), 100)


@pytest.mark.parametrize(("status", "ends"), [(-signal.SIGKILL, 0), (3, 3), (0, 1)])
def test_only_a_process_that_ends_by_itself_cannot_start(
    monkeypatch: pytest.MonkeyPatch, status: int, ends: int
) -> None:
    monkeypatch.setattr("pd_router.crew._PAUSE_S", 0.01)

    async def scenario() -> None:
        [http, admin, control] = free_ports(3)
        given = [f"--http=127.0.0.1:{http}", f"--admin=127.0.0.1:{admin}",
                 f"--control=127.0.0.1:{control}", "--model=m", "--router-name=r"]  # fmt: skip
        member = Process(0, parse([*given, "--processes=2"]), given)
        starts = 0

        async def once() -> int:
            nonlocal starts
            starts += 1
            if starts == 3:
                member.tell(signal.SIGTERM)
            return status

        monkeypatch.setattr(member, "_once", once)
        assert await member.run() == ends
        assert starts == (3 if status < 0 else 1)
        member.close()

    go(scenario())


@pytest.mark.slow
def test_a_process_told_to_end_while_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    real = asyncio.create_subprocess_exec

    async def scenario() -> None:
        http, admin, control = free_ports(3)
        told = [*NEEDED[:2], f"--http=127.0.0.1:{http}", f"--admin=127.0.0.1:{admin}",
                f"--control=127.0.0.1:{control}"]  # fmt: skip
        member = Process(0, parse([*told, "--processes=2"]), [*told, "--processes=2"])

        async def slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:
            process = await real(*command, **options)
            member.tell(signal.SIGTERM)  # there, and not yet known to its member
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
        try:
            assert await member.run() == 0
        finally:
            member.close()

    go(scenario(), ENDS_S)


@pytest.mark.slow
def test_a_router_whose_port_is_taken_ends() -> None:
    async def scenario() -> None:
        http, admin, control, _ = free_ports(4)
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", http)
        try:
            async with crew(http, admin, control) as site:
                assert await site.process.wait() == 1
        finally:
            taken.close()

    go(scenario(), 60)
