"""Two routers before the same workers, as processes started by hand: one is killed, and what a
client may ask and learn of the choice of workers, through real ones."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.client import Streamed, follow, request
from tests.cluster import http_get, parse_metrics
from tests.e2e.asking import COMPLETIONS, body, expected, text_of
from tests.ports import free_ports
from tests.reference import Reference

READY_S = 90.0
DEADLINE_S = 60.0
STREAMS = 8
TOKENS = 200
PREFILLS = ("prefill-0", "prefill-1")
DECODES = ("decode-0", "decode-1")
WORKERS = (*PREFILLS, *DECODES)
TALKS = 12


@dataclass
class Site:
    """Ports of both routers, and of each worker's metrics."""

    clients: list[int] = field(default_factory=list)
    admins: list[int] = field(default_factory=list)
    routers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    metrics: dict[str, int] = field(default_factory=dict)

    def workers_known(self, router: int) -> int:
        page = json.loads(http_get(f"http://127.0.0.1:{self.admins[router]}/debug/workers")[1])
        return sum(one["usable"] for one in page["workers"])

    def held(self, worker: str) -> float:
        """KV blocks that belong to somebody."""
        text = http_get(f"http://127.0.0.1:{self.metrics[worker]}/metrics")[1]
        samples = parse_metrics(text)["pdcluster_engine_kv_blocks"]
        states = {dict(labels)["state"]: value for labels, value in samples.items()}
        return states["active"] + states["granted"] + states["quarantined"]


def until(condition: Callable[[], Any], what: str, deadline_s: float) -> None:
    ends = time.monotonic() + deadline_s
    while True:
        try:
            if condition():
                return
        except (OSError, LookupError):
            pass
        assert time.monotonic() < ends, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def site(model: Path) -> Iterator[Site]:
    found = Site()
    with ExitStack() as processes:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-m", *command])
            processes.callback(process.wait, 60)
            processes.callback(process.kill)
            return process

        controls = []
        for number in range(2):
            http, admin, control = free_ports(3)
            found.clients.append(http)
            found.admins.append(admin)
            controls.append(f"127.0.0.1:{control}")
            found.routers.append(
                start(
                    "pd_router", "--model=tiny", f"--router-name=router-{number}",
                    f"--http=127.0.0.1:{http}", f"--admin=127.0.0.1:{admin}",
                    f"--control={controls[-1]}", "--allow-trace", "--disaggregate=always",
                )
            )  # fmt: skip
        for name in WORKERS:
            [found.metrics[name]] = free_ports(1)
            start(
                "pd_engine", f"--role={name.partition('-')[0]}", f"--model={model}",
                "--served-name=tiny", "--host=127.0.0.1", f"--worker-name={name}", "--work-port=0",
                "--kv-port=0", f"--health-port={found.metrics[name]}", "--threads=1",
                f"--routers={','.join(controls)}", "--dtype=float32", "--draft-tokens=0",
            )  # fmt: skip
        for number in range(2):
            until(lambda n=number: found.workers_known(n) == len(WORKERS), "workers", READY_S)
        yield found


async def ask(
    site: Site, content: dict[str, Any], router: int = 1, **headers: str
) -> tuple[dict[str, str], dict[str, Any]]:
    place = ("127.0.0.1", site.clients[router])
    response = await request(*place, "POST", COMPLETIONS, content, headers)
    answer = await response.json()
    await response.close()
    assert response.status == 200, answer
    return response.headers, answer


async def traced(site: Site, content: dict[str, Any], router: int = 1) -> dict[str, Any]:
    headers, _ = await ask(site, content, router, **{"x-pdcluster-trace": "1"})
    (trace,) = json.loads(headers["x-pdcluster-trace"])
    assert isinstance(trace, dict)
    return trace


def test_the_trace_has_what_the_policy_weighed(site: Site) -> None:
    trace = asyncio.run(traced(site, body(text_of(80), 4)))
    assert trace["prefill"] in PREFILLS
    assert trace["attempts"] == 1
    ways = {(one["prefill"], one["decode"]): one for one in trace["considered"]}
    assert ways.keys() <= set(product(PREFILLS, DECODES))
    chosen = ways[trace["prefill"], trace["decode"]]
    assert chosen["compute_tokens"] > 0
    assert 0 < chosen["ttft_s"] <= chosen["total_s"]
    assert trace["decode"] in trace["reason"]
    assert f"prefill {trace['prefill']}: " in trace["reason"]
    plain, _ = asyncio.run(ask(site, body("three boats", 4)))
    assert "x-pdcluster-trace" not in plain


def test_sessions_stay_where_they_are_and_priorities_are_taken(
    site: Site, reference: Reference
) -> None:
    homes = set()
    for number in range(8):
        turns = [body(f"{number} boats, turn {turn}", 4) for turn in range(2)]
        traces = [
            asyncio.run(traced(site, turn | {"session_id": f"talk-{number}", "priority": number}))
            for turn in turns
        ]
        first, second = (trace["decode"] for trace in traces)
        assert first == second
        assert "its session is there" in traces[1]["reason"]
        homes.add(first)
        _, answer = asyncio.run(ask(site, turns[1] | {"session_id": "x", "priority": -number}))
        assert answer["choices"][0]["text"] == expected(reference, turns[1])
    assert homes == {"decode-0", "decode-1"}


def test_what_belongs_together_goes_to_the_same_workers_from_either_router(site: Site) -> None:
    """They tell each other nothing. Each asks first in half of the cases."""
    prompts = [text_of(90, number=1000 + 97 * n) for n in range(TALKS)]

    async def asked(number: int, router: int) -> dict[str, Any]:
        content = body(prompts[number], 2) | {"session_id": f"shared-{number}"}
        return await traced(site, content, router)

    async def scenario() -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return [(await asked(n, n % 2), await asked(n, 1 - n % 2)) for n in range(TALKS)]

    pairs = asyncio.run(scenario())
    assert all(first["decode"] == second["decode"] for first, second in pairs)
    assert {first["decode"] for first, _ in pairs} == set(DECODES)
    # Prompts may leave their home where another worker is sooner by far.
    same = [first["prefill"] == second["prefill"] for first, second in pairs]
    assert sum(same) >= TALKS - 2, pairs


@pytest.mark.timeout(180)
def test_a_killed_router_takes_only_its_own_streams_along(site: Site, reference: Reference) -> None:
    """The last test here: that router stays dead."""
    contents = [body(text_of(40 + 10 * i, number=100 * i), TOKENS) for i in range(2 * STREAMS)]
    results = [Streamed() for _ in contents]

    async def stream(port: int, number: int) -> None:
        try:
            async for _ in follow(
                "127.0.0.1", port, COMPLETIONS, contents[number], results[number]
            ):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            results[number].error = {"message": "the connection broke", "code": "broken"}

    talks = [body(f"{n} sails", 2) | {"session_id": f"moves-{n}"} for n in range(TALKS)]

    async def scenario() -> None:
        homes.extend([(await traced(site, talk, 0))["decode"] for talk in talks])
        tasks = [asyncio.create_task(stream(site.clients[i % 2], i)) for i in range(2 * STREAMS)]
        async with asyncio.timeout(DEADLINE_S):
            while any(len(r.times) < 10 for r in results):
                await asyncio.sleep(0.002)
            os.kill(site.routers[0].pid, signal.SIGKILL)
            await asyncio.gather(*tasks)

    homes: list[str] = []
    asyncio.run(scenario())
    lost, kept = results[::2], results[1::2]
    assert not any(r.done for r in lost), "one had ended before"
    for result, content in zip(lost, contents[::2], strict=True):
        assert expected(reference, content).startswith(result.text)
    assert all(r.done for r in kept)
    assert [r.text for r in kept] == [expected(reference, one) for one in contents[1::2]]
    moved = [asyncio.run(traced(site, talk))["decode"] for talk in talks]
    assert moved == homes, "sessions of the dead router have their KV where they had it"
    until(lambda: not any(map(site.held, WORKERS)), "nothing is held for the dead router", 10)
