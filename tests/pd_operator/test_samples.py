"""Reading routers' sketches: merged over routers; whoever is silent, slow or garbled has no
data, which is not zero. And the bounded GET underneath.
"""

import json

import pytest

from pd_core.sketch import WindowSketch
from pd_operator import httpget, measured, samples
from pd_operator.measured import Samples
from tests.pd_operator.http_server import serving


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
    assert measured.parse(body) == Samples()


def test_routers_that_do_not_answer_have_no_data(run) -> None:
    async def scenario() -> tuple[Samples, Samples]:
        async with serving({"/sketches": (500, sketches([0.1]))}) as pages:
            failing = await samples.read(["127.0.0.1"], pages.port)
        return failing, await samples.read(["127.0.0.1"], pages.port)

    assert run(scenario()) == (Samples(), Samples())


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


def test_get_of_nobody(run) -> None:
    with pytest.raises(httpget.GetFailed, match=r"refused|Connect"):
        run(httpget.get("127.0.0.1", 1, "/", timeout_s=1.0))
