"""Faults that users of such systems have met, through the whole system: 1, 3 to 7, 10, 13 to 16,
19 and 20 of the list in tests/README.md, which names the tests of the others.
"""

import asyncio
import json
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.client import Response, request
from tests.cluster import Cluster, Pod, serving, spec
from tests.e2e.asking import (
    COMPLETIONS,
    Streams,
    ask,
    assert_right_or_typed,
    body,
    exactly,
    expected,
    text,
    text_of,
)
from tests.reference import Reference

BLOCK = 16
SMALL_POOL = 512  # tokens; one request of the tests below, and little more


@pytest.fixture(scope="module", params=["shm", "tcp", "nixl"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each of these faults, whichever way KV goes."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tight(
    model: Path, transport: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Decode has room for one request at a time."""
    pools = {
        "prefill": {"replicas": 1, "engine": {"chunkTokens": 32}},
        "decode": {"replicas": 1, "engine": {"kvCacheTokens": SMALL_POOL}},
    }
    made = spec(model, **pools, kvTransfer={"transport": transport})
    with serving(made, tmp_path_factory.mktemp("tight")) as running:
        yield running


@pytest.fixture(scope="module")
def flip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, decode's next push has a bit that is another."""
    return tmp_path_factory.mktemp("flip") / "asked"


@pytest.fixture(scope="module")
def cluster(
    model: Path, root: Path, transport: str, flip: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """One prefill and one decode worker; prompts always go from one to the other."""
    # What begins like a path is looked for among the pod's mounts.
    path = f":{root / 'tests' / 'e2e' / 'flipping'}:{root}"
    values = {"PYTHONPATH": path, "PD_TEST_FLIP": f"/./{flip}"}
    env = [{"name": name, "value": value} for name, value in values.items()]
    decode = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    made = spec(
        model,
        prefill={"replicas": 1},
        decode={"replicas": 1, "template": decode},
        router={"routing": {"disaggregate": "always"}},
        kvTransfer={"transport": transport},
    )
    with serving(made, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def counter(cluster: Cluster, pod: Pod, name: str) -> float:
    return sum(cluster.metrics(pod).get(f"pdcluster_engine_{name}_total", {}).values())


def restart(cluster: Cluster, pool: str) -> Pod:
    """Kills the pool's worker and waits until its successor is ready. The old one."""
    old = cluster.pod(pool)
    cluster.kill(old.pid, signal.SIGKILL)

    def back() -> bool:
        pods = cluster.pods(pool)
        return len(pods) == 1 and pods[0].pid != old.pid and cluster.all_ready()

    cluster.until(back, f"{pool} restarted", 60)
    return old


def cached_tokens(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# ---- 1: decode refuses before it admits ------------------------------------------------------


def test_what_decode_refuses_costs_prefill_nothing(tight: Cluster):
    prefill = tight.pod("prefill")
    before = counter(tight, prefill, "prompts"), counter(tight, prefill, "step_tokens")
    status, answer = ask(tight, body(text_of(900), 8))
    assert status == 400
    assert answer["error"]["code"] == "kv_pool_too_small"
    assert str(SMALL_POOL) in answer["error"]["message"]
    assert (counter(tight, prefill, "prompts"), counter(tight, prefill, "step_tokens")) == before
    tight.until_settled()


# ---- 3: prefill is idle after its last request -----------------------------------------------


def test_prefill_frees_its_blocks_without_further_work(tight: Cluster):
    """Acknowledgements are processed although no step follows."""
    assert text(tight, body(text_of(100, number=3), 4))
    tight.until_settled(2.0)


# ---- 4 and 14: pools that are full -----------------------------------------------------------


def test_a_queue_before_a_pool_of_one_request_moves(tight: Cluster, reference: Reference):
    contents = [body(text_of(250, number=40 + i), 150) for i in range(6)]

    async def scenario() -> list[Any]:
        return await Streams(tight, contents).end(100)

    results = asyncio.run(scenario())
    assert [r.error for r in results] == [None] * 6
    assert [r.text for r in results] == [expected(reference, c) for c in contents]
    tight.until_settled()


def test_two_requests_that_outgrow_the_pool_both_end_right(tight: Cluster, reference: Reference):
    """Each fits alone; together they run out of blocks while they decode."""
    contents = [body(text_of(30, number=60 + i), 440) for i in range(2)]

    async def scenario() -> list[Any]:
        return await Streams(tight, contents).end(100)

    results = asyncio.run(scenario())
    assert [r.error for r in results] == [None] * 2
    assert [r.text for r in results] == [expected(reference, c) for c in contents]
    tight.until_settled()


# ---- 7: an aborted transfer ------------------------------------------------------------------


def test_no_request_sees_the_bytes_of_an_aborted_transfer(tight: Cluster, reference: Reference):
    """Requests are cancelled while their KV arrives; those that follow reuse the blocks."""

    async def scenario() -> list[Any]:
        for number in range(8):
            content = {**body(text_of(400, number=700 + number), 8), "stream": True}
            sending = asyncio.create_task(
                request("127.0.0.1", tight.port, "POST", COMPLETIONS, content)
            )
            await asyncio.sleep(0.01 + 0.02 * number)
            sending.cancel()
            [head] = await asyncio.gather(sending, return_exceptions=True)
            if isinstance(head, Response):  # it was quick: its first token is here already
                head.hang_up()
        return await Streams(tight, contents).end(60)

    contents = [body(text_of(380, number=800 + i), 16) for i in range(3)]
    results = asyncio.run(scenario())
    assert [r.text for r in results] == [expected(reference, c) for c in contents]
    tight.until_settled()


# ---- 5, 13: restarts and what is cached ------------------------------------------------------


@pytest.mark.timeout(240)
def test_prefill_restarts_on_the_same_address(cluster: Cluster, reference: Reference):
    """Decode keeps its old session to it and must not mind."""
    content = body(text_of(64, number=5), 8)
    want = expected(reference, content)
    assert text(cluster, content) == want
    decode = cluster.pod("decode")
    old = restart(cluster, "prefill")
    assert cluster.pod("prefill").ip == old.ip
    assert text(cluster, content) == want
    assert cluster.pod("decode").pid == decode.pid
    cluster.until_settled()


@pytest.mark.timeout(240)
def test_cached_tokens_count_what_prefill_did_not_compute(cluster: Cluster):
    """A worker that restarts has an empty cache. What decode has already doesn't count."""
    content = body(text_of(200, number=13), 4)
    ask(cluster, content)
    whole = cached_tokens(ask(cluster, content)[1])
    assert whole >= 8 * BLOCK

    restart(cluster, "decode")
    assert cached_tokens(ask(cluster, content)[1]) == whole

    restart(cluster, "prefill")
    assert cached_tokens(ask(cluster, content)[1]) == 0
    cluster.until_settled()


# ---- 6: decode restarts in the middle of transfers -------------------------------------------


@pytest.mark.timeout(240)
def test_decode_restarts_in_the_middle_of_transfers(cluster: Cluster, reference: Reference):
    """Prefill's blocks come free, and what it holds for those who come anew is theirs alone."""
    contents = [body(text_of(600, number=600 + i), 8) for i in range(6)]
    decode = cluster.pod("decode")

    async def scenario() -> list[Any]:
        streams = Streams(cluster, contents)
        await streams.until_any_has(1)  # the others' prompts wait, are computed or on their way
        cluster.kill(decode.pid, signal.SIGKILL)
        return await streams.end(100)

    for result, content in zip(asyncio.run(scenario()), contents, strict=True):
        assert_right_or_typed(result, expected(reference, content))
    cluster.until(
        lambda: cluster.all_ready() and cluster.pod("decode").pid != decode.pid,
        "decode is back",
        60,
    )
    assert [text(cluster, c) for c in contents] == [expected(reference, c) for c in contents]
    cluster.until_settled()


# ---- 10 and 15: token 0 is prefill's ---------------------------------------------------------


def test_a_prompt_that_is_cached_to_its_end(cluster: Cluster, reference: Reference):
    """Its last part is computed again: something has to give token 0."""
    content = body(exactly(reference, 6 * BLOCK), 8)
    answers = [ask(cluster, content)[1] for _ in range(2)]
    assert [a["choices"][0]["text"] for a in answers] == [expected(reference, content)] * 2
    assert cached_tokens(answers[1]) in (5 * BLOCK, 6 * BLOCK - 1)


def test_logprobs_of_the_first_token_survive_the_hand_over(cluster: Cluster, reference: Reference):
    content = body(text_of(33, number=15), 6, logprobs=2)
    status, answer = ask(cluster, content)
    assert status == 200, answer
    new = reference.generate(content["prompt"], 6, ignore_eos=True)
    found = answer["choices"][0]["logprobs"]
    want = reference.logprobs(content["prompt"], new)
    assert found["token_logprobs"] == pytest.approx(want, abs=1e-3)
    assert all(found["top_logprobs"])


# ---- 16: a bit on its way ----------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 300])
def test_a_flipped_bit_is_detected_retried_and_counted(
    cluster: Cluster, reference: Reference, flip: Path, at: int
):
    """In a prompt of one push, and among the pushes of a long one."""

    def failures() -> float:
        samples = cluster.metrics(cluster.pod("decode"))["pdcluster_engine_failures_total"]
        return sum(n for labels, n in samples.items() if ("kind", "transfer_failed") in labels)

    def retries() -> float:
        router = cluster.metrics(cluster.pod("router"))
        return sum(router["pdcluster_router_retries_total"].values())

    before = failures(), retries()
    content = body(text_of(10 + at, number=1600 + at), 16)
    flip.touch()
    assert text(cluster, content) == expected(reference, content)
    assert not flip.exists()
    assert (failures(), retries()) == (before[0] + 1, before[1] + 1)
    cluster.until_settled()


# ---- 19: a burst that gives up ---------------------------------------------------------------

ABORTED = 1000
AT_ONCE = 50


@pytest.mark.timeout(240)
def test_a_burst_of_aborted_requests_costs_those_that_stay_nothing(
    cluster: Cluster, reference: Reference
):
    """What is computed for them is next to nothing, so nobody can be slow for it."""
    contents = [body(text_of(60 + 20 * i, number=1900 + i), 400) for i in range(4)]
    turns = asyncio.Semaphore(AT_ONCE)

    async def give_up(number: int) -> None:
        content = body(text_of(60, number=20_000 + 10 * number), 400)
        async with turns:
            _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
            data = json.dumps(content).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\ncontent-length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
            writer.transport.abort()

    async def scenario() -> list[Any]:
        streams = Streams(cluster, contents)
        await streams.until_each_has(5)
        await asyncio.gather(*(give_up(number) for number in range(ABORTED)))
        return await streams.end(100)

    decode = cluster.pod("decode")
    before = counter(cluster, decode, "generated_tokens")
    results = asyncio.run(scenario())
    assert [r.error for r in results] == [None] * len(contents)
    assert [r.text for r in results] == [expected(reference, c) for c in contents]
    cluster.until_settled()
    for_others = counter(cluster, decode, "generated_tokens") - before - 400 * len(contents)
    assert for_others < 0.02 * 400 * ABORTED


# ---- 20: keep-alive --------------------------------------------------------------------------


def test_a_kept_connection_does_not_stall_the_first_token(cluster: Cluster):
    """Nagle's algorithm against delayed acknowledgements costs 40 ms, at either side."""

    def first_token_s(client: OpenAI) -> float:
        started = time.perf_counter()
        events = client.completions.create(
            model="tiny", prompt="hello", max_tokens=3, temperature=0, stream=True
        )
        next(iter(events))
        took = time.perf_counter() - started
        events.close()
        return took

    options: dict[str, Any] = {"base_url": cluster.base_url, "api_key": "none", "max_retries": 0}
    fresh = []
    for _ in range(15):
        with OpenAI(**options) as client:
            fresh.append(first_token_s(client))
    with OpenAI(**options) as client:
        kept = [first_token_s(client) for _ in range(15)]
    assert statistics.median(kept) < statistics.median(fresh) + 0.02
