"""Licences and known vulnerabilities: what is allowed, what is found, and that nobody answering is
said too."""

import importlib.metadata
import json
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from scripts import audit
from scripts.check_repo import pins


class Package(importlib.metadata.Distribution):
    def __init__(self, name: str, **fields: str) -> None:
        self._message = Message()
        self._message["Name"], self._message["Version"] = name, "1.0"
        for field, value in fields.items():
            self._message[field.replace("_", "-")] = value

    @property
    def metadata(self) -> Any:
        return self._message

    def read_text(self, filename: str) -> str | None:
        raise NotImplementedError

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


MIT = "License :: OSI Approved :: MIT License"
FINE = [
    {"License_Expression": "Apache-2.0 AND MIT"},
    {"License_Expression": "(GPL-3.0-only OR MIT) AND BSD-3-Clause"},
    {"Classifier": MIT},
    {"License": "Apache 2.0 License"},
]
NOT_FINE = [
    {"License_Expression": "AGPL-3.0-only"},
    {"License_Expression": "MIT AND GPL-3.0-only"},
    {"License": "see LICENSE"},
    {},
]


@pytest.fixture
def no_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "EXCEPTIONS", {})


@pytest.mark.usefixtures("no_exceptions")
@pytest.mark.parametrize("fields", FINE)
def test_what_goes_with_ours(fields: dict[str, str]) -> None:
    assert audit.licences([Package("a", **fields)], ["a"]) == []


@pytest.mark.usefixtures("no_exceptions")
@pytest.mark.parametrize("fields", NOT_FINE)
def test_what_does_not(fields: dict[str, str]) -> None:
    [found] = audit.licences([Package("A.b", **fields)], ["a-b"])
    assert found.startswith("a-b 1.0: its licence is ")
    assert audit.licences([Package("A.b", **fields)], ["other"]) == [], "no lock has it"


def test_exceptions_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "EXCEPTIONS", {"a": "its file says MIT", "b-*": "as a"})
    [found] = audit.licences([Package("a")], ["a"])
    assert "no package needs the exception 'b-*'" in found


def test_ours() -> None:
    assert audit.licences(importlib.metadata.distributions(), audit._locked()) == []


@contextmanager
def database(answer: Any) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_known_vulnerabilities() -> None:
    locked = pins("a==1.0\nb==2.0 ; sys_platform == 'linux'\n")
    with database({"results": [{}, {"vulns": [{"id": "GHSA-1"}, {"id": "PYSEC-2"}]}]}) as (
        url,
        said,
    ):
        assert audit.vulnerabilities(locked, url) == ["b 2.0: GHSA-1, PYSEC-2; run: make lock"]
    [one] = said
    assert one["queries"][0] == {"package": {"name": "a", "ecosystem": "PyPI"}, "version": "1.0"}


def test_half_an_answer_is_none() -> None:
    with database({"results": [{}]}) as (url, _), pytest.raises(ValueError, match="1 answers to 2"):
        audit.vulnerabilities(pins("a==1.0\nb==2.0\n"), url)


def test_nobody_answers() -> None:
    with database({}) as (url, _):
        pass
    with pytest.raises(OSError, match="refused"):
        audit.vulnerabilities(pins("a==1.0\n"), url)
