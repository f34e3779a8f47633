"""Bad requests and bad PDCluster files: said in the right form, and what runs goes on."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.client import request
from tests.cluster import Cluster, pdcluster
from tests.e2e.asking import CHAT, COMPLETIONS, ask, body, text, text_of

HELLO = [{"role": "user", "content": "Hello"}]
CONTEXT = 2048


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "max_tokens": 4, **fields}


BAD: dict[str, tuple[str, Any, int, str | None]] = {
    # name: (path, body, status, part of the message or parameter)
    "unknown model": (CHAT, chat(model="gpt-9"), 404, "gpt-9"),
    "model missing": (CHAT, {"messages": HELLO}, 400, "model"),
    "messages missing": (CHAT, {"model": "tiny"}, 400, "messages"),
    "messages empty": (CHAT, chat(messages=[]), 400, "messages"),
    "messages a string": (CHAT, chat(messages="hello"), 400, "messages"),
    "content a number": (CHAT, chat(messages=[{"role": "user", "content": 3}]), 400, "content"),
    "role unknown": (CHAT, chat(messages=[{"role": "king", "content": "x"}]), 400, "role"),
    "prompt missing": (COMPLETIONS, {"model": "tiny"}, 400, "prompt"),
    "prompt empty array": (COMPLETIONS, body("x", 4) | {"prompt": []}, 400, "prompt"),
    "prompt no text": (COMPLETIONS, body("x", 4) | {"prompt": {"a": 1}}, 400, "prompt"),
    "token out of range": (COMPLETIONS, body("x", 4) | {"prompt": [1, 99999999]}, 400, "prompt"),
    "token negative": (COMPLETIONS, body("x", 4) | {"prompt": [-1]}, 400, "prompt"),
    "max_tokens negative": (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    "max_tokens a string": (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    "max_tokens huge": (CHAT, chat(max_tokens=10**30), 400, "max_tokens"),
    "temperature too high": (CHAT, chat(temperature=9), 400, "temperature"),
    "temperature a string": (CHAT, chat(temperature="hot"), 400, "temperature"),
    "top_p negative": (CHAT, chat(top_p=-0.1), 400, "top_p"),
    "n zero": (CHAT, chat(n=0), 400, "n"),
    "n huge": (CHAT, chat(n=10**6), 400, "n"),
    "stop a number": (CHAT, chat(stop=7), 400, "stop"),
    "stop empty": (CHAT, chat(stop=""), 400, "stop"),
    "stream a string": (CHAT, chat(stream="yes"), 400, "stream"),
    "unknown field": (CHAT, chat(temprature=1), 400, "temprature"),
    "NaN": (CHAT, b'{"model":"tiny","messages":[],"temperature":NaN}', 400, None),
    "Infinity": (CHAT, b'{"model":"tiny","messages":[],"temperature":1e999}', 400, None),
    "broken JSON": (CHAT, b'{"model": "tiny", "messages": [', 400, None),
    "no JSON": (CHAT, b"hello", 400, None),
    "an array": (CHAT, b"[]", 400, None),
    "null": (CHAT, b"null", 400, None),
    "empty body": (CHAT, b"", 400, None),
    "invalid UTF-8": (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\xff"}]}', 400,
                      None),
    "lone surrogate": (CHAT, b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
                       400, None),
    "deeply nested": (CHAT, b'{"model":"tiny","messages":' + b"[" * 100_000, 400, None),
}  # fmt: skip


def raw(cluster: Cluster, path: str, content: Any, method: str = "POST") -> tuple[int, Any]:
    async def bounded() -> tuple[int, Any]:
        async with asyncio.timeout(60):
            response = await request("127.0.0.1", cluster.port, method, path, content)
            try:
                return response.status, await response.json()
            finally:
                await response.close()

    return asyncio.run(bounded())


def assert_openai_error(answer: Any) -> None:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert answer["error"]["type"]


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(cluster: Cluster, name: str):
    path, content, status, part = BAD[name]
    got, answer = raw(cluster, path, content)
    assert got == status, answer
    assert_openai_error(answer)
    if part is not None:
        error = answer["error"]
        assert part in (error["param"] or "") or part in error["message"]


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(cluster: Cluster):
    status, answer = ask(cluster, body(text_of(6000), 4))
    assert status == 400
    assert_openai_error(answer)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert str(CONTEXT) in answer["error"]["message"]


def test_a_body_of_50_mb_is_refused(cluster: Cluster):
    content = json.dumps(chat(messages=[{"role": "user", "content": "x" * 50_000_000}])).encode()
    status, answer = raw(cluster, CHAT, content)
    assert status == 413
    assert_openai_error(answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("GET", "/", 404),
    ],
)
def test_wrong_routes(cluster: Cluster, method: str, path: str, status: int):
    got, answer = raw(cluster, path, b"", method)
    assert got == status
    assert_openai_error(answer)


def test_internals_are_not_on_the_client_port(cluster: Cluster):
    for path in ("/metrics", "/debug/workers", "/debug/requests", "/sketches"):
        assert raw(cluster, path, b"", "GET")[0] == 404


def test_what_is_no_http_does_no_harm(cluster: Cluster):
    async def scenario() -> None:
        for rubbish in (b"\0" * 1000, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n" * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
            writer.write(rubbish)
            writer.write_eof()
            async with asyncio.timeout(10):
                await reader.read()
            writer.close()

    asyncio.run(scenario())


def test_the_server_goes_on(cluster: Cluster):
    assert text(cluster, body("hello", 8))
    cluster.until_settled()


# ---- PDCluster files ----------------------------------------------------------------------


def bad_file(folder: Path, good: str, change: Any) -> Path:
    document = yaml.safe_load(good)
    change(document)
    file = folder / "bad.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


CHANGES: dict[str, tuple[Any, str]] = {
    "unknown field": (lambda d: d["spec"]["prefill"].update(replica=2), "spec.prefill.replica"),
    "wrong type": (lambda d: d["spec"]["decode"].update(replicas="two"), "spec.decode.replicas"),
    "no pools": (lambda d: (d["spec"].pop("prefill"), d["spec"].pop("decode")), "spec"),
    "both shapes": (lambda d: d["spec"].update(colocated={}), "spec.colocated"),
    "no source": (lambda d: d["spec"]["model"].pop("source"), "spec.model.source"),
    "bad name": (lambda d: d["metadata"].update(name="Not A Name"), "metadata.name"),
    "other kind": (lambda d: d.update(kind="Pod"), "kind"),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("command", ["validate", "up"])
def test_a_bad_file_is_refused_with_its_path(
    cluster: Cluster, tmp_path: Path, name: str, command: str
):
    change, path = CHANGES[name]
    file = bad_file(tmp_path, cluster.file.read_text(), change)
    done = pdcluster(command, "-f", str(file), env=cluster.env)
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert f"{path}:" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("content", ["", "[1, 2", "a: b: c", "\0", "just text"])
def test_what_is_no_yaml_mapping_is_refused(cluster: Cluster, tmp_path: Path, content: str):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    done = pdcluster("validate", "-f", str(file), env=cluster.env)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr


def test_a_file_that_is_not_there(cluster: Cluster, tmp_path: Path):
    done = pdcluster("validate", "-f", str(tmp_path / "none.yaml"), env=cluster.env)
    assert done.returncode == 2
    assert "none.yaml" in done.stdout + done.stderr


def test_a_good_file_is_accepted(cluster: Cluster):
    assert pdcluster("validate", "-f", str(cluster.file), env=cluster.env).returncode == 0


def test_what_runs_still_runs(cluster: Cluster):
    assert text(cluster, body("hello", 8))
