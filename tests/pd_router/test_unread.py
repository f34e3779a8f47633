"""Covers pd_router.http and app before clients that read nothing, or ask for nothing: each
has its bound, they make room for others, and ten thousand of them harm nobody."""

import asyncio
import contextlib
import json
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pd_router import http
from tests import client
from tests.crowd import crowd
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "hi"}]
MANY = 10_000
LOOK_S = http.LOOK_S


def posted(**fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HI} | fields).encode()
    return b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body)


class Seen:
    """What became of the server's connections."""

    def __init__(self) -> None:
        self.made: list[http.BoundedProtocol] = []
        self.stuck: list[http.BoundedProtocol] = []
        self.lost: list[http.BoundedProtocol] = []
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        pause, lose = http.BoundedProtocol.pause_writing, http.BoundedProtocol.connection_lost

        make = http.BoundedProtocol.connection_made

        def made(self_: http.BoundedProtocol, transport: asyncio.Transport) -> None:
            self.made.append(self_)
            make(self_, transport)

        def stuck(self_: http.BoundedProtocol) -> None:
            pause(self_)
            self.stuck.append(self_)
            self._changed.set()

        def lost(self_: http.BoundedProtocol, exc: Exception | None) -> None:
            lose(self_, exc)
            self.lost.append(self_)
            self._changed.set()

        patch.setattr(http.BoundedProtocol, "connection_made", made)
        patch.setattr(http.BoundedProtocol, "pause_writing", stuck)
        patch.setattr(http.BoundedProtocol, "connection_lost", lost)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Also: little is enough to fill a connection."""
    monkeypatch.setattr(http, "SEND_BUFFER_BYTES", 4096)
    monkeypatch.setattr(http, "HELD_BYTES", 1024)
    monkeypatch.setattr(http, "LOOK_S", 0.01)
    found = Seen()
    found.watch(monkeypatch)
    return found


@asynccontextmanager
async def silent(r: Rig, request: bytes) -> AsyncIterator[socket.socket]:
    """A client that has asked and doesn't read."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, (r.http.host, r.http.port))
        await loop.sock_sendall(sock, request)
        yield sock
    finally:
        sock.close()


async def read_to_its_end(sock: socket.socket) -> bytes:
    loop, read = asyncio.get_running_loop(), b""
    while b"[DONE]" not in read:
        part = await loop.sock_recv(sock, 65536)
        assert part, read[-200:]
        read += part
    return read


async def fill(r: Rig, seen: Seen, generation: PlayedGeneration) -> http.BoundedProtocol:
    """Emits until its connection takes no more, though far less than is held for a client;
    and until its client's system has said what it took: 0.2 s later at most."""
    before, still, left = len(seen.stuck), 0, 0
    token = r.tokens("a")[0]
    while still < 250:  # what a kernel has on its way makes it go on once or twice
        await asyncio.sleep(0.001)
        stuck = seen.stuck[-1] if len(seen.stuck) > before else None
        if stuck is not None and stuck in stuck.server_state.unread:
            left, was = http.outstanding(stuck.transport), left
            still = still + 1 if left == was else 0
            continue
        still = 0
        for _ in range(10):
            generation.emit(token)
    assert stuck is not None
    return stuck


async def at_rest(stuck: http.BoundedProtocol) -> None:
    """Until nothing is on its way to the client any more."""
    still, left = 0, 0
    while still < 250:
        left, was = http.outstanding(stuck.transport), left
        still = still + 1 if left == was else 0
        await asyncio.sleep(0.001)


def answer_at_length(generation: PlayedGeneration) -> None:
    """More than all buffers take, when logprobs are asked for."""
    for _ in range(200):
        generation.emit(70, logprob=-1.0, top=tuple((t, -1.0) for t in range(20)))
    generation.emit(2, "stop", logprob=-1.0)
    generation.done()


async def asked(r: Rig) -> int:
    """What somebody who asks now hears; whose connection ends with it."""
    ask = {"model": MODEL, "messages": HI}
    response = await client.request(r.http.host, r.http.port, "POST", CHAT, ask)
    await response.close()
    return response.status


async def served(r: Rig) -> None:
    """Somebody who asks now is answered."""
    r.sessions.script = says(r.tokens("yes"))
    ask = {"model": MODEL, "messages": HI}
    response = await client.request(r.http.host, r.http.port, "POST", CHAT, ask)
    answer = await response.json()
    assert answer["choices"][0]["message"]["content"] == "yes", answer
    await response.close()
    r.sessions.script = None


def test_a_stream_that_nobody_reads_ends(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "UNREAD_S", 1.0)
    caplog.set_level("INFO", logger="pd_router.http")

    async def scenario() -> None:
        async with rig() as r, silent(r, posted(stream=True)):
            generation = await r.sessions.generation()
            await fill(r, seen, generation)
            await generation.cancelled.wait()
            await seen.until(lambda: bool(seen.lost))
            (entry,) = r.journal.find(None)
            assert entry["failure"]["kind"] == "client_gone"
            assert "didn't read" in entry["failure"]["message"]
            assert r.app.running == 0

    go(scenario())
    assert "cut client=127.0.0.1" in caplog.text


def test_a_client_that_reads_again_has_its_stream(seen: Seen) -> None:
    async def scenario() -> None:
        async with rig() as r, silent(r, posted(stream=True)) as sock:
            generation = await r.sessions.generation()
            stuck = await fill(r, seen, generation)
            generation.emit(2, "stop")
            generation.done()
            await read_to_its_end(sock)
            assert not stuck.server_state.unread
            assert stuck._unread_timer is None
            assert not generation.cancelled.is_set()

    go(scenario())


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
def test_a_whole_answer_that_nobody_reads_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, connection: bytes
) -> None:
    """A connection that is closed waits for what it is still to send: not for ever."""
    monkeypatch.setattr(http, "UNREAD_S", 0.05)
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 0)

    async def scenario() -> None:
        async with rig() as r:
            request = posted(logprobs=True, top_logprobs=20)
            request = request.replace(b"\r\n", b"\r\nconnection: %s\r\n" % connection, 1)
            async with silent(r, request):
                generation = await r.sessions.generation()
                answer_at_length(generation)
                await seen.until(lambda: bool(seen.stuck))
                assert r.app.running == 0
                await seen.until(lambda: bool(seen.lost))

    go(scenario())


async def read_some(sock: socket.socket, stuck: http.BoundedProtocol) -> None:
    """Until the server's system has heard of it."""
    before = http.outstanding(stuck.transport)
    while http.outstanding(stuck.transport) >= before:
        with contextlib.suppress(BlockingIOError):
            assert sock.recv(512)
        await asyncio.sleep(0.001)


def test_a_slow_client_has_its_whole_answer(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """It's cut when it reads next to nothing, not when much is left; and though the kernel,
    which holds far more than it reads, takes nothing from us meanwhile."""
    monkeypatch.setattr(http, "SEND_BUFFER_BYTES", 64 * 1024)
    monkeypatch.setattr(http, "LOOK_S", 1000.0)  # the test looks, at times of its own

    async def scenario() -> None:
        async with rig() as r, silent(r, posted(stream=True)) as sock:
            generation = await r.sessions.generation()
            stuck = await fill(r, seen, generation)
            now, held = stuck.loop.time(), stuck.transport.get_write_buffer_size()
            for _ in range(6):
                await read_some(sock, stuck)
                now += http.UNREAD_S / 3
                stuck._look(now)
                assert stuck._reading is not None, "it was cut"
                assert stuck.transport.get_write_buffer_size() == held
            stuck._look(now + http.UNREAD_S)  # it read nothing more
            await seen.until(lambda: bool(seen.lost))
            await generation.cancelled.wait()

    go(scenario())


def test_where_the_system_does_not_tell_what_we_hold_counts(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    def refuses(*_: Any) -> bytes:
        raise OSError

    async def scenario() -> None:
        async with rig() as r, silent(r, posted(stream=True)):
            stuck = await fill(r, seen, await r.sessions.generation())
            held = stuck.transport.get_write_buffer_size()
            assert http.outstanding(stuck.transport) > held
            monkeypatch.setattr(http.fcntl, "ioctl", refuses)
            assert http.outstanding(stuck.transport) == held

    go(scenario())


def test_streams_that_nobody_reads_make_room(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 0.0)

    async def scenario() -> None:
        async with rig() as r, silent(r, posted(stream=True)) as reads:
            ask = posted(stream=True)
            async with silent(r, ask), silent(r, ask):
                first, *others = [await r.sessions.generation(i) for i in range(3)]
                for generation in others:
                    await fill(r, seen, generation)
                await served(r)
                assert [one.cancelled.is_set() for one in others] == [True, False]
                first.emit(r.tokens("b")[0])
                first.emit(2, "stop")
                first.done()
                assert b'"content":"b"' in await read_to_its_end(reads)

    go(scenario())


def test_a_short_stall_makes_no_room(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)

    async def scenario() -> None:
        async with rig() as r, silent(r, posted(stream=True)):
            generation = await r.sessions.generation()
            await fill(r, seen, generation)
            with pytest.raises(ConnectionError):
                await served(r)
            assert not generation.cancelled.is_set()

    monkeypatch.setattr(http, "UNREAD_GRACE_S", 1000.0)
    go(scenario())


def test_who_reads_is_not_refused_for_who_does_not(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    """All the requests that there may be are streams that nobody reads."""
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 0.0)

    async def scenario() -> None:
        async with rig(max_requests=1) as r, silent(r, posted(stream=True)):
            generation = await r.sessions.generation()
            await fill(r, seen, generation)
            await served(r)
            assert generation.cancelled.is_set()

    go(scenario())


def test_who_is_merely_behind_makes_no_room(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    """Its stream has stood still for long by now, but it has read since anybody looked."""
    monkeypatch.setattr(http, "SEND_BUFFER_BYTES", 64 * 1024)
    monkeypatch.setattr(http, "LOOK_S", 1000.0)
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 500.0)

    async def scenario() -> None:
        async with rig(max_requests=1) as r, silent(r, posted(stream=True)) as sock:
            generation = await r.sessions.generation()
            stuck = await fill(r, seen, generation)
            unread = stuck.server_state.unread
            stuck._look(stuck.loop.time())
            await read_some(sock, stuck)
            unread[stuck] -= 1000.0
            assert await asked(r) == 429
            assert stuck.loop.time() - unread[stuck] < 500.0
            assert await asked(r) == 429, "not yet"
            assert not generation.cancelled.is_set()
            await at_rest(stuck)
            stuck._look(stuck.loop.time())
            unread[stuck] -= 1000.0
            await served(r)
            assert generation.cancelled.is_set()

    go(scenario())


def test_an_answer_that_is_over_leaves_no_place(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    """Nobody reads it, and it's cut for no request: that would let in one too many."""
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 0.0)
    long = posted(logprobs=True, top_logprobs=20)

    async def scenario() -> None:
        async with rig(max_requests=1) as r, silent(r, long):
            answer_at_length(await r.sessions.generation())
            await seen.until(lambda: bool(seen.stuck))
            async with silent(r, posted(stream=True)) as reads:
                running = await r.sessions.generation(1)
                assert await asked(r) == 429
                assert r.app.running == 1
                assert seen.stuck[0] in seen.stuck[0].server_state.unread
                running.emit(2, "stop")
                running.done()
                await read_to_its_end(reads)

    go(scenario())


@pytest.mark.parametrize("held", [1024, 1 << 24], ids=["behind", "not far behind"])
def test_who_still_reads_an_answer_is_not_idle(
    monkeypatch: pytest.MonkeyPatch, seen: Seen, held: int
) -> None:
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http, "HELD_BYTES", held)
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 1000.0)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with rig() as r, silent(r, posted(logprobs=True, top_logprobs=20)) as sock:
            answer_at_length(await r.sessions.generation())
            [reads] = seen.made
            while not reads.cycle.response_complete:
                await asyncio.sleep(0.001)
            with pytest.raises(ConnectionError):
                await served(r)
            assert reads.transport.get_write_buffer_size(), "or there's nothing to see here"
            read = b""
            while reads not in reads.server_state.idlers:
                with contextlib.suppress(BlockingIOError):
                    read += sock.recv(65536)
                await asyncio.sleep(0.001)
            while reads.transport.get_write_buffer_size():
                read += await loop.sock_recv(sock, 65536)
            await served(r)  # now it makes room
            while part := await loop.sock_recv(sock, 65536):
                read += part
            head, _, body = read.partition(b"\r\n\r\n")
            assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"

    go(scenario())


def test_who_never_reads_a_small_rest_locks_nobody_out(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    """Its answer is over, and what is left of it fills no buffer."""
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(http, "HELD_BYTES", 1 << 24)
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 0.0)

    async def scenario() -> None:
        async with rig() as r, silent(r, posted(logprobs=True, top_logprobs=20)):
            answer_at_length(await r.sessions.generation())
            while True:
                with contextlib.suppress(ConnectionError):
                    await served(r)
                    break
            assert seen.made[0] in seen.lost
            assert not seen.stuck

    go(scenario())


@pytest.mark.parametrize(
    ("limit", "most"),
    [(1024, 512), (600, 300), (20_000, 8192), (resource.RLIM_INFINITY, 8192)],
)
def test_descriptors_are_left_for_workers(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(http.resource, "getrlimit", lambda _: (limit, limit))
    assert http.most_connections() == most


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost:"], ids=["nothing", "half"])
def test_ten_thousand_that_ask_for_nothing_harm_nobody(sent: bytes) -> None:
    async def scenario() -> None:
        async with rig() as r, crowd(r.http.host, r.http.port, MANY, sent):
            for _ in range(20):
                await served(r)

    http.raise_descriptor_limit()
    go(scenario(), 60)


@pytest.mark.slow
def test_ten_thousand_that_read_nothing_harm_nobody(
    monkeypatch: pytest.MonkeyPatch, seen: Seen
) -> None:
    """Each has asked for a stream with far more text than all buffers take."""
    monkeypatch.setattr(http, "UNREAD_GRACE_S", 0.0)
    monkeypatch.setattr(http, "LOOK_S", LOOK_S)  # at thousands: as often as elsewhere

    async def long(generation: PlayedGeneration) -> None:
        for _ in range(100):
            generation.emit(70)
            await asyncio.sleep(0)

    async def scenario() -> None:
        async with rig(max_requests=MANY) as r:
            r.sessions.script = long
            async with crowd(r.http.host, r.http.port, MANY, posted(stream=True)):
                await r.sessions.generation(MANY - 1)
                await seen.until(lambda: len(seen.stuck) >= MANY // 2)
                for _ in range(20):
                    await served(r)
                # They made room for each other, too: nobody was turned away.
                assert len(seen.lost) >= MANY - http.MAX_CONNECTIONS

    http.raise_descriptor_limit()
    go(scenario(), 120)
