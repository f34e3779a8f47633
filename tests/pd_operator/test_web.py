"""The operator's own HTTP: pages, errors, clients that are slow or talk nonsense."""

import asyncio
from contextlib import suppress

import pytest

from pd_operator import httpget, web
from pd_operator.web import Page, serving


def broken() -> Page:
    raise RuntimeError("as told")


PAGES = {
    "/livez": lambda: Page(b"ok\n"),
    "/readyz": lambda: Page(b"the API server doesn't answer\n", 503),
    "/broken": broken,
}


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with suppress(ConnectionError):
        writer.write(request)
        async with asyncio.timeout(10):
            answer = await reader.read()
    writer.close()
    return answer


def test_pages(run):
    async def scenario() -> None:
        async with serving({("127.0.0.1", 0): PAGES}) as [port]:
            found = {}
            for path in ("/livez?verbose", "/readyz", "/broken", "/other"):
                page = await httpget.get("127.0.0.1", port, path, timeout_s=5)
                found[path] = (page.status, page.body)
        assert found == {
            "/livez?verbose": (200, b"ok\n"),
            "/readyz": (503, b"the API server doesn't answer\n"),
            "/broken": (500, b"error\n"),
            "/other": (404, b"not found\n"),
        }

    run(scenario())


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /livez HTTP/1.1\r\n\r\n", b"405"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * 2000 + b"\r\n", b"400"),
    ],
)
def test_requests_that_make_no_sense(run, request_: bytes, status: bytes):
    async def scenario() -> None:
        async with serving({("127.0.0.1", 0): PAGES}) as [port]:
            assert (await raw(port, request_)).split()[1] == status

    run(scenario())


def test_a_head_has_no_body(run):
    async def scenario() -> None:
        async with serving({("127.0.0.1", 0): PAGES}) as [port]:
            answer = await raw(port, b"HEAD /livez HTTP/1.1\r\n\r\n")
        assert answer.endswith(b"\r\n\r\n")
        assert b"Content-Length: 3" in answer

    run(scenario())


def test_slow_and_endless_clients_are_hung_up(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(web, "READ_S", 0.05)

    async def scenario() -> None:
        async with serving({("127.0.0.1", 0): PAGES}) as [port]:
            assert await raw(port, b"GET /livez HT") == b""
            assert await raw(port, b"x" * 200_000) == b""
            page = await httpget.get("127.0.0.1", port, "/livez", timeout_s=5)
            assert page.status == 200

    run(scenario())
