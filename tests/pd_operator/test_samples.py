"""Reading routers' sketches: merged over routers; whoever is silent, slow or garbled has no
data, which is not zero. And the bounded GET underneath.
"""

import json

import pytest

from pd_core.sketch import WindowSketch
from pd_operator import httpget, measured, samples, teller
from pd_operator.measured import Samples
from pd_router.signals import Queued, Signals
from tests.pd_operator.http_server import serving
from tests.pd_router.http_rig import rig as router
from tests.pd_router.rig import rig


def sketches(ttft_s: list[float]) -> bytes:
    sketch = WindowSketch()
    for value in ttft_s:
        sketch.add(value, 0.0)
    return json.dumps({"router": "r", "ttft_s": sketch.to_json(0.0), "tpot_s": {}}).encode()


def test_samples_of_a_router(run) -> None:
    async def scenario() -> Samples:
        async with serving({"/sketches": (200, sketches([0.1, 0.2, 0.3]))}) as pages:
            return await samples.read(["127.0.0.1", "127.0.0.1"], pages.port)

    found = run(scenario())
    assert found.ttft_s(50) == pytest.approx(0.2, rel=0.03)
    assert sum(found.ttft.values()) == 6
    assert found.tpot_s(99) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"ttft_s": {}}',
        b'{"ttft_s": {"a": 1}, "tpot_s": {}}',
        b'{"ttft_s": {"1": -1}, "tpot_s": {}}',
        b'{"ttft_s": 3, "tpot_s": {}}',
        b"\xff",
    ],
)
def test_garbage_is_no_data(body: bytes) -> None:
    assert measured.parse(body) == Samples(silent=1)


def test_routers_that_do_not_answer_have_no_data(run) -> None:
    async def scenario() -> tuple[Samples, Samples]:
        async with serving({"/sketches": (500, sketches([0.1]))}) as pages:
            failing = await samples.read(["127.0.0.1"], pages.port)
        return failing, await samples.read(["127.0.0.1"], pages.port)

    assert run(scenario()) == (Samples(silent=1), Samples(silent=1))


def test_no_routers_no_data(run) -> None:
    assert run(samples.read([])).ttft_s(99) is None


def get(run, pages: dict[str, tuple[int, bytes]], path: str, raw: bytes = b"") -> httpget.Response:
    async def scenario() -> httpget.Response:
        async with serving(pages, raw) as server:
            return await httpget.get("127.0.0.1", server.port, path, timeout_s=0.3, max_bytes=1000)

    found: httpget.Response = run(scenario())
    return found


def test_get(run) -> None:
    response = get(run, {"/a?b=c": (302, b"body")}, "/a?b=c")
    assert (response.status, response.body, response.ok) == (302, b"body", True)
    assert not get(run, {"/": (503, b"")}, "/").ok


@pytest.mark.parametrize(
    ("path", "raw", "message"),
    [
        ("/silent", b"", "no answer within 0.3 s"),
        ("/", b"SSH-2.0-x\r\n\r\n", "the answer is not HTTP"),
        ("/", b"HTTP/1.1 200 OK\r\n", "the answer is not HTTP"),
        ("/", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 2000, "answer is larger than 1000 bytes"),
    ],
)
def test_get_fails_within_bounds(run, path: str, raw: bytes, message: str) -> None:
    with pytest.raises(httpget.GetFailed, match=message):
        get(run, {}, path, raw)


def test_post_to_a_router(run) -> None:
    """As the operator tells routers; over an address of each kind."""
    decision = {"time": "2026-01-01T00:00:00Z", "pool": "decode", "to": 2, "reason": "Burst",
                "text": "decode from 1 to 2: why", "details": [], "of_tomorrow": 1}  # fmt: skip
    body = json.dumps({"standing": [decision], "changes": [decision] * 8}).encode()

    async def scenario() -> None:
        async with router() as r:
            assert await teller.post(r.admin.host, body, r.admin.port)
            page = await httpget.get(r.admin.host, r.admin.port, "/debug/state", timeout_s=5.0)
            told = json.loads(page.body)["sizes"]
            assert [one["text"] for one in told["standing"]] == ["decode from 1 to 2: why"]
            assert len(told["changes"]) == 8
            assert not await teller.post(r.admin.host, body, 1)  # nobody

    run(scenario())


def test_what_a_router_refuses_is_in_the_log(run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> bool:
        async with router() as r:
            return await teller.post(r.admin.host, b'{"standing": 1}', r.admin.port)

    assert run(scenario()), "the same would be refused again"
    [record] = [one for one in caplog.records if one.name == "pd_operator.teller"]
    assert "refuses POST /scaling: 400" in record.getMessage()
    assert "standing" in record.getMessage()


def test_an_older_router_is_not_asked_again(run) -> None:
    async def scenario() -> tuple[bool, bool]:
        async with serving({teller.PATH: (404, b"")}) as pages:
            older = await teller.post("127.0.0.1", b"{}", pages.port)
        async with serving({teller.PATH: (503, b"")}) as pages:
            return older, await teller.post("127.0.0.1", b"{}", pages.port)

    assert run(scenario()) == (True, False)


def test_ipv6_hosts_stand_in_brackets(run) -> None:
    async def scenario() -> httpget.Response:
        async with router(host="::1") as r:
            return await httpget.get("::1", r.admin.port, "/sketches", timeout_s=5.0)

    assert run(scenario()).status == 200


def test_get_of_nobody(run) -> None:
    with pytest.raises(httpget.GetFailed, match=r"refused|Connect"):
        run(httpget.get("127.0.0.1", 1, "/", timeout_s=1.0))


def whole(**changes: object) -> dict[str, object]:
    """A document as a router makes it, from the router's own code."""
    signals = Signals("process", 100.0)
    signals.arrived(50, 2)
    document = signals.document(130.0, Queued(1, 20, 1), [worker()])
    return json.loads(json.dumps({"router": "r", "model": "m"} | document | changes))


def worker(**changes: object) -> dict[str, object]:
    made: dict[str, object] = {
        "worker": "p-0", "epoch": "e", "role": "prefill", "revision": "r", "heard_s_ago": 0.5,
        "heartbeats": 9, "draining": False, "usable": True, "kv_tokens": 1000,
        "kv_used_tokens": 100, "max_running": 64, "prefill_tokens_per_s": 5000.0, "queued": 1,
        "running": 2, "waiting_grants": 3, "pending_tokens": 400, "steps": 7, "busy_s": 1.5,
        "computed_tokens": 900,
    }  # fmt: skip
    return made | changes


def test_a_routers_document_becomes_a_reading() -> None:
    found = measured.parse(json.dumps(whole()).encode(), read_at=7.0)
    (router,), (told,) = found.routers, found.workers
    assert (router.process, router.uptime_s, router.read_at) == ("process", 30.0, 7.0)
    assert (router.counters.arrived_tokens, router.counters.arrived_sequences) == (50, 2)
    assert router.counters.lengths == {6: (2, 0, 0)}
    assert (router.queued_requests, router.queued_tokens) == (1, 20)
    assert (told.worker, told.running, told.busy_s, told.heard_at) == ("p-0", 2, 1.5, 6.5)
    assert found.silent == 0
    assert found.read_at == 7.0


@pytest.mark.parametrize(
    ("clients", "locked"),
    [((None,), None), ((2,), False), ((0,), True), ((0, 3), False), ((0, None), True)],
)
def test_nobody_has_a_key_where_no_router_knows_one(
    clients: tuple[int | None, ...], locked: bool | None
) -> None:
    """A router that was just started, or is an older one, may not know or tell yet."""
    bodies = [json.dumps(whole(clients=one)).encode() for one in clients]
    assert measured.merge([measured.parse(body) for body in bodies]).locked is locked
    assert measured.parse(json.dumps(whole()).encode()).locked is None


def test_an_older_router_tells_no_lengths() -> None:
    document = whole()
    del document["lengths"]
    (router,) = measured.parse(json.dumps(document).encode()).routers
    assert router.counters.lengths == {}


def test_the_workers_signals_are_what_a_router_tells(run) -> None:
    """The field names that both sides use are the same ones."""

    async def scenario() -> set[str]:
        async with rig() as r:
            await r.add("decode", "d-0")
            return set(r.workers.signals()[0])

    assert run(scenario()) == set(worker())


@pytest.mark.parametrize(
    "changes",
    [
        {"counters": {}},
        {"counters": {"arrived_tokens": 1}},
        {"process": ""},
        {"uptime_s": float("nan")},
        {"uptime_s": float("inf")},
        {"uptime_s": -1},
        {"uptime_s": True},
        {"queued": 3},
        {"workers": [worker(busy_s=float("nan"))]},
        {"workers": [worker(running="2")]},
        {"workers": [{}]},
        {"held_requests": None},
        {"lengths": 3},
        {"lengths": {"6": [1, -1, 2]}},
        {"lengths": {"6": [1, 2, 3, 4]}},
        {"lengths": {"64": [1, 1, 2]}},
        {"lengths": {"long": [1, 1, 2]}},
    ],
)
def test_half_a_document_is_no_reading_but_latencies_count(changes: dict[str, object]) -> None:
    body = json.dumps(whole(ttft_s={"3": 2}) | changes).encode()
    found = measured.parse(body)
    assert (found.routers, found.workers, found.silent) == ((), (), 1)
    assert dict(found.ttft) == {3: 2}


def test_of_a_worker_the_router_that_heard_it_last_is_right() -> None:
    old = measured.parse(json.dumps(whole()).encode(), read_at=10.0)
    fresh = worker(heard_s_ago=0.1, running=5)
    new = measured.parse(json.dumps(whole(workers=[fresh])).encode(), read_at=10.0)
    for many in ([old, new], [new, old]):
        merged = measured.merge(many)
        assert [one.running for one in merged.workers] == [5]
        assert len(merged.routers) == 2
