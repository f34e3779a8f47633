"""Covers pd_router.http and exchange on raw sockets: bodies too large, too slow or cut off,
heads without an end, rubbish, pipelining, keep-alive, and that each wait has its bound."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest

from pd_router import exchange, http
from tests import client
from tests.pd_router.http_rig import MODEL, Rig, go, rig, says

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()


@asynccontextmanager
async def connected(r: Rig) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(r.http.host, r.http.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def head(path: str = CHAT, method: str = "POST", *lines: str, length: int | None = None) -> bytes:
    more = list(lines) + ([] if length is None else [f"content-length: {length}"])
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *more, "", ""]).encode()


async def answered(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, dict[str, str], Any]:
    response = await client.read_head(reader, writer)
    return response.status, response.headers, json.loads(await response.body())


# ---- bodies -----------------------------------------------------------------------------


def test_a_compressed_body_is_refused() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(head(CHAT, "POST", "content-encoding: gzip", length=len(BODY)) + BODY)
            status, _, body = await answered(reader, writer)
            assert (status, body["error"]["code"]) == (415, "unsupported_encoding")

    go(scenario())


def test_a_huge_body_is_refused_by_its_length_and_the_client_hears_it() -> None:
    """50 MB by a client that sends all of it before it listens; the connection lives on."""

    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            size = 50_000_000
            writer.write(head(length=size))
            for _ in range(50):
                writer.write(b"x" * (size // 50))
                await writer.drain()
            status, headers, body = await answered(reader, writer)
            assert status == 413
            assert body["error"]["code"] == "body_too_large"
            assert str(8 * 1024 * 1024) in body["error"]["message"]
            assert "x-request-id" in headers
            r.sessions.script = says([])
            writer.write(head(length=len(BODY)) + BODY)
            assert (await answered(reader, writer))[0] == 200

    go(scenario())


def test_a_huge_body_in_chunks_is_refused_while_it_comes() -> None:
    async def scenario() -> None:
        async with rig(max_body_bytes=100_000) as r, connected(r) as (reader, writer):
            writer.write(head(CHAT, "POST", "transfer-encoding: chunked"))
            for _ in range(20):
                writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
                await writer.drain()
            assert (await answered(reader, writer))[0] == 413
            writer.write(b"0\r\n\r\n" + head("/health", "GET"))
            assert (await answered(reader, writer))[0] == 200

    go(scenario())


def test_a_body_of_just_the_limit_in_chunks_is_taken() -> None:
    async def scenario() -> None:
        async with rig(max_body_bytes=len(BODY)) as r, connected(r) as (reader, writer):
            r.sessions.script = says([])
            writer.write(head(CHAT, "POST", "transfer-encoding: chunked"))
            for byte in BODY:
                writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
            writer.write(b"0\r\n\r\n")
            assert (await answered(reader, writer))[0] == 200

    go(scenario())


def test_trailers_are_no_headers() -> None:
    async def body() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            r.sessions.script = says(r.tokens("yes"))
            writer.write(head(CHAT, "POST", "transfer-encoding: chunked"))
            writer.write(b"%x\r\n%s\r\n0\r\nx-request-id: late\r\n\r\n" % (len(BODY), BODY))
            status, headers, _ = await answered(reader, writer)
            assert status == 200
            assert headers["x-request-id"] != "late"

    go(body())


@pytest.mark.parametrize("what", [b"0\r\nx-t: %s", b"1;%s"])
def test_trailers_and_chunks_heads_are_bounded(what: bytes) -> None:
    """The parser puts them together piece by piece: each costs more than the one before."""

    async def body() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(head(CHAT, "POST", "transfer-encoding: chunked"))
            writer.write(b"%x\r\n%s\r\n" % (len(BODY), BODY))
            writer.write(what % (b"a" * 4 * http.MAX_HEAD_BYTES))
            status, _, error = await answered(reader, writer)
            assert (status, error["error"]["code"]) == (431, "headers_too_large")
            assert await reader.read() == b""

    go(body())


def test_a_client_that_waits_for_leave_to_send() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            r.sessions.script = says([])
            writer.write(head(CHAT, "POST", "expect: 100-continue", length=len(BODY)))
            assert b"100 Continue" in await reader.readline()
            await reader.readline()
            writer.write(BODY)
            assert (await answered(reader, writer))[0] == 200
            writer.write(head(CHAT, "POST", "expect: 100-continue", length=50_000_000))
            assert (await answered(reader, writer))[0] == 413

    go(scenario())


def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_DEADLINE_S", 0.05)

    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(head(length=100) + b"{")
            status, headers, body = await answered(reader, writer)
            assert (status, headers["connection"]) == (408, "close")
            assert body["error"]["code"] == "request_timeout"
            assert await reader.read() == b""

    go(scenario())


def test_a_body_whose_end_never_comes_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LINGER_S", 0.05)

    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(head("/nowhere", length=100) + b"{")
            assert (await answered(reader, writer))[0] == 404
            assert await reader.read() == b""

    go(scenario())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_the_content_type_does_not_matter(kind: str) -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            r.sessions.script = says([])
            writer.write(head(CHAT, "POST", f"content-type: {kind}", length=len(BODY)) + BODY)
            assert (await answered(reader, writer))[0] == 200

    go(scenario())


# ---- routes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/v1/chat/completions/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/%00%0a%ff", 404),
        ("GET", "/v1/models/a%2Fb", 404),
        ("GET", "//health", 404),
        ("OPTIONS", CHAT, 405),
    ],
)
def test_wrong_routes(method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(head(path, method))
            got, headers, body = await answered(reader, writer)
            assert got == status
            assert body["error"]["type"] == "invalid_request_error"
            assert ("allow" in headers) == (status == 405)
            writer.write(head("/health", "GET"))  # the same connection goes on
            assert (await answered(reader, writer))[0] == 200

    go(scenario())


# ---- what is no HTTP ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\0" * 100,
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"POST /health HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /health HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST /health HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    ],
)
def test_rubbish_is_a_400_and_the_end(rubbish: bytes) -> None:
    async def scenario() -> None:
        async with rig() as r:
            async with connected(r) as (reader, writer):
                writer.write(rubbish)
                status, headers, body = await answered(reader, writer)
                assert (status, headers["connection"]) == (400, "close")
                assert body["error"]["type"] == "invalid_request_error"
                assert await reader.read() == b""
            async with connected(r) as (reader, writer):
                writer.write(head("/health", "GET"))
                assert (await answered(reader, writer))[0] == 200

    go(scenario())


def test_a_body_that_breaks_off_its_chunks() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(head(CHAT, "POST", "transfer-encoding: chunked") + b"zz\r\n")
            assert (await answered(reader, writer))[0] == 400
            assert await reader.read() == b""
            while r.app.running:
                await asyncio.sleep(0.005)

    go(scenario())


@pytest.mark.parametrize("whole", [True, False])
def test_heads_are_bounded(whole: bool) -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\n")
            lines = b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(70))
            writer.write(lines if not whole else b"x: " + b"y" * 70_000)
            status, headers, body = await answered(reader, writer)
            assert (status, headers["connection"]) == (431, "close")
            assert body["error"]["code"] == "headers_too_large"
            assert "headers" in body["error"]["message"]

    go(scenario())


@pytest.mark.parametrize("sent", [b"", b"GET /heal", b"GET /health HTTP/1.1\r\nx: y\r\n", b"\r\n"])
def test_a_head_has_a_deadline(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http, "HEAD_DEADLINE_S", 0.05)

    async def scenario() -> None:
        async with rig() as r:
            async with connected(r) as (reader, writer):
                writer.write(sent)
                assert await reader.read() == b""
            async with connected(r) as (reader, writer):  # the second of a connection too
                writer.write(head("/health", "GET"))
                assert (await answered(reader, writer))[0] == 200
                if sent:
                    writer.write(sent)
                    assert await reader.read() == b""

    go(scenario())


def test_an_upgrade_is_not_taken() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            lines = ["connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"]
            writer.write(head("/health", "GET", *lines))
            assert (await answered(reader, writer))[0] == 200

    go(scenario())


# ---- connections ----------------------------------------------------------------------------


def test_a_kept_connection_serves_request_after_request() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            r.sessions.script = says(r.tokens("ok"))
            for _ in range(5):
                writer.write(head(length=len(BODY)) + BODY)
                status, _, body = await answered(reader, writer)
                assert status == 200
                assert body["choices"][0]["message"]["content"] == "ok"

    go(scenario())


def test_a_pipelined_request_is_left_and_the_first_answered() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (reader, writer):
            one = head(length=len(BODY)) + BODY
            writer.write(one + one + one[:50])
            generation = await r.sessions.generation()
            writer.write(b"more rubbish" * 1000)
            generation.emit(2, "stop")
            generation.done()
            status, headers, _ = await answered(reader, writer)
            assert (status, headers["connection"]) == (200, "close")
            assert await reader.read() == b""
            assert len(r.sessions.started) == 1

    go(scenario())


def test_a_client_that_goes_is_noticed_behind_a_pipelined_request() -> None:
    async def scenario() -> None:
        async with rig() as r, connected(r) as (_, writer):
            one = head(length=len(BODY)) + BODY
            writer.write(one + one)
            generation = await r.sessions.generation()
            writer.write(one)
            writer.transport.abort()
            async with asyncio.timeout(1):
                await generation.cancelled.wait()

    go(scenario())


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 2)

    async def scenario() -> None:
        async with rig() as r, connected(r) as first, connected(r) as second:
            for _, writer in (first, second):
                writer.write(head(length=len(BODY)) + BODY)
                await r.sessions.generation()
            with pytest.raises(ConnectionError):
                await _health(r)
            first[1].transport.abort()
            async with asyncio.timeout(5):
                while True:
                    try:
                        assert await _health(r) == 200
                        break
                    except ConnectionError:
                        await asyncio.sleep(0.01)

    go(scenario())


def test_who_asks_for_nothing_makes_room_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)

    async def scenario() -> None:
        async with rig() as r, connected(r) as first, connected(r) as half, connected(r) as busy:
            busy[1].write(head(length=len(BODY)) + BODY)
            generation = await r.sessions.generation()
            half[1].write(b"GET /health HT")
            first[1].write(head("/health", "GET"))
            assert (await answered(*first))[0] == 200
            assert await _health(r) == 200
            with contextlib.suppress(ConnectionError):  # it has been at it for longest
                assert await half[0].read(1) == b""
            first[1].write(head("/health", "GET"))
            assert (await answered(*first))[0] == 200
            assert not generation.cancelled.is_set()

    go(scenario())


async def _health(r: Rig) -> int:
    response = await client.request(r.http.host, r.http.port, "GET", "/health")
    await response.close()
    return response.status


def test_sockets_do_not_wait_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Sequence[tuple[int, int]] = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY),
        (socket.SOL_SOCKET, socket.SO_SNDBUF),
    )
    seen: list[list[int]] = []
    made = http.BoundedProtocol.connection_made

    def note(self: http.BoundedProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        accepted = transport.get_extra_info("socket")
        seen.append([accepted.getsockopt(*option) for option in options])

    monkeypatch.setattr(http.BoundedProtocol, "connection_made", note)

    async def scenario() -> None:
        async with rig() as r:
            assert await _health(r) == 200

    go(scenario())
    ((no_delay, send_buffer),) = seen
    assert no_delay
    assert send_buffer <= 2 * http.SEND_BUFFER_BYTES


def test_a_taken_port_is_told_by_name() -> None:
    with http.bind(http.Address("127.0.0.1", 0)) as first:
        first.listen()
        taken = http.Address("127.0.0.1", first.getsockname()[1])
        with pytest.raises(OSError, match=str(taken)):
            http.bind(taken)


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.7", ["127.0.0.7"]),
        ("0.0.0.0", ["0.0.0.0"]),
        ("10.1.2.3", ["10.1.2.3", "127.0.0.1"]),
        ("fd00::7", ["fd00::7", "::1"]),
    ],
)
def test_a_pod_listens_on_its_loopback_too(
    monkeypatch: pytest.MonkeyPatch, host: str, bound: list[str]
) -> None:
    """`kubectl port-forward` comes from inside of the pod."""

    class Bound:
        def __init__(self, address: http.Address, *, reuse_port: bool) -> None:
            self.address, self.reuse_port = address, reuse_port

        def getsockname(self) -> tuple[str, int]:
            return self.address.host, self.address.port

    monkeypatch.setattr(http, "bind", Bound)
    sockets = http.listen(http.Address(host, 8000), reuse_port=True)

    assert [one.getsockname() for one in sockets] == [(host, 8000) for host in bound]
    assert all(one.reuse_port for one in sockets)


def test_a_pod_whose_loopback_is_taken_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bind, asked = http.bind, []

    def taken(address: http.Address, *, reuse_port: bool) -> socket.socket:
        asked.append(address.host)
        if len(asked) > 1:
            raise OSError(98, f"can't listen on {address}: taken")
        return bind(http.Address("127.0.0.1", 0), reuse_port=reuse_port)

    monkeypatch.setattr(http, "bind", taken)
    monkeypatch.setattr(http.ipaddress, "ip_address", lambda _: ip_address("10.1.2.3"))
    [only] = http.listen(http.Address("10.1.2.3", 8000))
    only.close()

    assert asked == ["10.1.2.3", "127.0.0.1"]
    assert "not served on loopback" in caplog.text


def test_two_processes_may_share_a_port() -> None:
    with http.bind(http.Address("127.0.0.1", 0), reuse_port=True) as first:
        first.listen()
        address = http.Address("127.0.0.1", first.getsockname()[1])
        with http.bind(address, reuse_port=True) as second:
            assert second.getsockname() == first.getsockname()
