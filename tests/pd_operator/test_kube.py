"""Calls and watches over real sockets: what goes out, what comes back in odd pieces, deadlines,
refusals, guards, and where the configuration comes from.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_core.identity import Identity
from pd_operator import apierrors, kube
from pd_operator.kube import STATUS_MANAGER, Kube, Request
from pd_operator.resources import DEPLOYMENT, PDCLUSTER, SERVICE
from tests.certificates import Authority

Answer = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]
DOCUMENT = {"metadata": {"namespace": "ns", "name": "x", "uid": "u"}, "spec": {}}


@dataclass
class Server:
    """A server that records requests and answers each with the next answer."""

    answers: list[Answer] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while self.answers:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [
                    int(line.partition(":")[2])
                    for line in head.lower().splitlines()
                    if line.startswith("content-length:")
                ]
                self.bodies.append(await reader.readexactly(length[0] if length else 0))
                self.heads.append(head)
                await self.answers.pop(0)(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answered(body: object, code: int = 200, **headers: str) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        text = json.dumps(body).encode()
        lines = [f"HTTP/1.1 {code} x", f"Content-Length: {len(text)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + text)

    return write


def streamed(*pieces: bytes, pause_s: float = 0.0) -> Answer:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.write(b"0\r\n\r\n")

    return write


async def never(_writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def kubeconfig(folder: Path, port: int, scheme: str = "http") -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"{scheme}://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(document))
    return file


@asynccontextmanager
async def connected(
    folder: Path, *answers: Answer, **options: Any
) -> AsyncIterator[tuple[Kube, Server]]:
    server = Server(list(answers))
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await server.serve(reader, writer)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    made = Kube(await kube.connect(str(kubeconfig(folder, port))), **options)
    try:
        yield made, server
    finally:
        await made.close()
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_an_apply(run, tmp_path: Path):
    async def scenario() -> None:
        async with connected(tmp_path, answered(DOCUMENT, 201)) as (api, server):
            made = await api.apply(
                PDCLUSTER, DOCUMENT, manager=STATUS_MANAGER, subresource="status"
            )
        assert made == DOCUMENT
        [head], [body] = server.heads, server.bodies
        line, *headers = head.splitlines()
        path = "/apis/pdcluster.dev/v1alpha1/namespaces/ns/pdclusters/x/status"
        query = "fieldManager=pdcluster-operator-status&force=true"
        assert line == f"PATCH {path}?{query} HTTP/1.1"
        assert "Content-Type: application/apply-patch+yaml" in headers
        assert "authorization: Bearer secret" in [
            one.replace("Authorization", "authorization") for one in headers
        ]
        assert json.loads(body) == DOCUMENT

    run(scenario())


def test_a_patch_a_delete_a_list(run, tmp_path: Path):
    async def scenario() -> None:
        items = {"metadata": {"resourceVersion": "7"}, "items": None}
        answers = (answered(DOCUMENT), answered({"status": "Success"}), answered(items))
        async with connected(tmp_path, *answers) as (api, server):
            await api.patch(DEPLOYMENT, "ns", "x", {"spec": {"replicas": 2}})
            await api.delete(SERVICE, "ns", "x", uid="u", version="5")
            listed = await api.list(SERVICE, selector="a=b", version="0")
        assert (listed.version, list(listed.items), bool(listed.items)) == ("7", [], False)
        assert "Content-Type: application/merge-patch+json" in server.heads[0]
        assert server.heads[1].startswith("DELETE /api/v1/namespaces/ns/services/x HTTP")
        options = json.loads(server.bodies[1])
        assert options["preconditions"] == {"uid": "u", "resourceVersion": "5"}
        assert options["propagationPolicy"] == "Background"
        assert "GET /api/v1/services?labelSelector=a%3Db&resourceVersion=0" in server.heads[2]

    run(scenario())


@pytest.mark.parametrize(
    "text",
    [
        # as of built-in kinds, and as of custom ones
        '{"kind":"ServiceList","metadata":{"resourceVersion":"7"},"items":[%s]}\n',
        '{"apiVersion":"v1","items":[%s],"kind":"L","metadata":{"resourceVersion":"7"}}\n',
        # as nobody has it yet
        '{ "items": [%s], "metadata": {"resourceVersion": "7"} }',
    ],
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_are_parsed_item_by_item(run, tmp_path: Path, text: str, count: int):
    items = [{"metadata": {"name": f"n{n}"}, "x": ["]", {"items": [n]}]} for n in range(count)]
    body = text % ",".join(json.dumps(item, separators=(",", ":")) for item in items)

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % len(body) + body.encode())

    async def scenario() -> None:
        async with connected(tmp_path, write) as (api, _):
            listed = await api.list(SERVICE)
        assert listed.version == "7"
        assert list(listed.items) == list(listed.items) == items
        assert bool(listed.items) == bool(items)

    run(scenario())


def test_a_list_that_is_cut(run, tmp_path: Path):
    body = b'{"metadata":{"resourceVersion":"7"},"items":[{"a":1},{"b":]}'

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def scenario() -> None:
        async with connected(tmp_path, write) as (api, _):
            with pytest.raises(apierrors.Unavailable, match="no list"):
                await api.list(SERVICE)

    run(scenario())


@pytest.mark.parametrize("kind", [apierrors.Throttled, apierrors.NotFound])
def test_a_refusal(run, tmp_path: Path, kind: type[apierrors.ApiError]):
    code = {apierrors.Throttled: 429, apierrors.NotFound: 404}[kind]

    async def scenario() -> None:
        calls: list[tuple[str, int]] = []

        def observe(request: Request, status: int, _seconds: float) -> None:
            calls.append((request.verb, status))

        refused = answered({"kind": "Status"}, code, Retry_After="3")
        async with connected(tmp_path, refused, observer=observe) as (api, _):
            with pytest.raises(kind) as caught:
                await api.get(SERVICE, "ns", "x")
        assert caught.value.retry_after_s == 3
        assert calls == [("get", code)]

    run(scenario())


def test_no_answer_in_time(run, tmp_path: Path):
    async def scenario() -> None:
        async with connected(tmp_path, never) as (api, _):
            with pytest.raises(apierrors.Unavailable, match=r"no answer within 0\.1 s"):
                await api.get(SERVICE, "ns", "x", timeout_s=0.1)

    run(scenario())


def test_nobody_there(run, tmp_path: Path):
    async def scenario() -> None:
        api = Kube(await kube.connect(str(kubeconfig(tmp_path, 1))))
        with pytest.raises(apierrors.Unavailable, match="Cannot connect"):
            await api.get(SERVICE, "ns", "x")
        with pytest.raises(apierrors.Unavailable):
            async for _ in api.watch(SERVICE, "", version="1", timeout_s=1):
                pass
        await api.close()

    run(scenario())


def test_a_connection_that_is_given_up_is_closed_at_once(run, tmp_path: Path):
    """Whatever TLS's other side does: here it says nothing any more."""
    certificate, key = Authority().issue(Identity("ns", "c", "router"))
    (tmp_path / "tls.pem").write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.pem")

    def serve(listening: socket.socket, asked: Callable[[], object]) -> None:
        accepted, _ = listening.accept()
        accepted.settimeout(10)
        spoken = context.wrap_socket(accepted, server_side=True)
        spoken.recv(1 << 16)
        asked()
        with socket.socket(fileno=spoken.detach()) as silent, suppress(ConnectionError):
            silent.settimeout(10)
            while silent.recv(1 << 16):
                pass

    async def scenario() -> None:
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            file = kubeconfig(tmp_path, listening.getsockname()[1], "https")
            document = yaml.safe_load(file.read_text())
            document["clusters"][0]["cluster"]["insecure-skip-tls-verify"] = True
            file.write_text(yaml.safe_dump(document))
            api = Kube(await kube.connect(str(file)))
            served = asyncio.create_task(
                asyncio.to_thread(serve, listening, lambda: loop.call_soon_threadsafe(asked.set))
            )
            asking = asyncio.create_task(api.get(PDCLUSTER, "ns", "x"))
            await asked.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await served
            await api.close()

    run(scenario())


@pytest.mark.parametrize("body", [b"<html>", b"[]", b""])
def test_an_answer_that_is_no_object(run, tmp_path: Path, body: bytes):
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def scenario() -> None:
        async with connected(tmp_path, write) as (api, _):
            with pytest.raises(apierrors.Unavailable):
                await api.get(SERVICE, "ns", "x")

    run(scenario())


def event(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": kind, "object": fields}).encode() + b"\n"


def test_a_watch_in_odd_pieces(run, tmp_path: Path):
    """Lines that are cut anywhere, several at once, empty ones, and one of three megabytes."""
    large = event("MODIFIED", data="x" * 3_000_000)
    text = event("ADDED", n=1) + event("ADDED", n=2) + b"\n" + large + event("BOOKMARK", n=3)
    pieces = [text[:7], text[7:40], text[40:1000], text[1000:2_000_000], text[2_000_000:]]

    async def scenario() -> None:
        async with connected(tmp_path, streamed(*pieces)) as (api, server):
            found = [one async for one in api.watch(SERVICE, "ns", version="9", timeout_s=300)]
        assert [one.kind for one in found] == ["ADDED", "ADDED", "MODIFIED", "BOOKMARK"]
        assert len(found[2].object["data"]) == 3_000_000
        assert "watch=true&allowWatchBookmarks=true&resourceVersion=9" in server.heads[0]
        assert "timeoutSeconds=300" in server.heads[0]

    run(scenario())


def test_a_watch_that_ends_by_an_error(run, tmp_path: Path):
    async def scenario() -> None:
        lines = (event("ADDED", n=1), event("ERROR", code=410, reason="Expired"))
        async with connected(tmp_path, streamed(*lines)) as (api, _):
            found: list[str] = []

            async def watch() -> None:
                async for one in api.watch(SERVICE, "ns", version="9", timeout_s=300):
                    found.append(one.kind)

            with pytest.raises(apierrors.Gone):
                await watch()
        assert found == ["ADDED"]

    run(scenario())


def test_a_watch_that_says_nothing(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kube, "SILENCE_S", 0.1)

    async def scenario() -> None:
        async with connected(tmp_path, streamed(event("ADDED"), pause_s=30)) as (api, _):
            with pytest.raises(apierrors.Unavailable, match="nothing heard"):
                async for _ in api.watch(SERVICE, "ns", version="9", timeout_s=300):
                    pass

    run(scenario())


def test_a_guard_is_asked_before_each_write(run, tmp_path: Path):
    class No(Exception):
        pass

    def guard(request: Request) -> None:
        assert request.namespace == "ns"
        raise No

    async def scenario() -> None:
        async with connected(tmp_path, answered(DOCUMENT), guard=guard) as (api, server):
            await api.get(SERVICE, "ns", "x")
            for write in (
                api.apply(SERVICE, DOCUMENT),
                api.patch(SERVICE, "ns", "x", {}),
                api.create(SERVICE, DOCUMENT),
                api.replace(SERVICE, DOCUMENT),
                api.delete(SERVICE, "ns", "x", uid="u"),
            ):
                with pytest.raises(No):
                    await write
        assert len(server.heads) == 1

    run(scenario())


def test_where_the_configuration_comes_from(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def host() -> str:
        transport = await kube.connect()
        await transport.close()
        return str(transport._client.configuration.host)

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, 1234)))
    assert run(host()) == "http://127.0.0.1:1234"
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".kube").mkdir(parents=True)
    kubeconfig(tmp_path, 99).rename(tmp_path / "home" / ".kube" / "config")
    assert run(host()) == "http://127.0.0.1:99"
