"""Covers pd_router.settings and __main__: flags, and a router process from start to drain."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pd_core.identity import Identity, Part
from pd_router import settings
from pd_router.settings import Address, Settings, parse
from tests.ports import free_ports

FEW = 200  # descriptors
NEEDED = ["--model=m", "--router-name=r-0", "--http=[::1]:80", "--admin=a:1", "--control=b:0"]


def test_flags() -> None:
    settings = parse([*NEEDED, "--reuse-port", "--drain-timeout-s", "5", "--max-body-bytes=10"])
    assert settings == Settings(
        model="m",
        router_name="r-0",
        http=Address("::1", 80),
        admin=Address("a", 1),
        control=Address("b", 0),
        reuse_port=True,
        drain_timeout_s=5.0,
        max_body_bytes=10,
    )
    assert settings.tls_cluster is None
    settings = parse([*NEEDED, "--tls-dir=/tls", "--tls-cluster=ml/chat"])
    assert settings.tls_cluster == Identity("ml", "chat", Part.ROUTER)
    assert str(settings.http) == "[::1]:80"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--http=80", "give HOST:PORT"),
        ("--http=:80", "give HOST:PORT"),
        ("--http=x:99999", "at most 65535"),
        ("--http=x:-1", "give HOST:PORT"),
        ("--drain-timeout-s=nan", "above 0"),
        ("--drain-timeout-s=x", "above 0"),
        ("--max-requests=0", "above 0"),
        ("--max-requests=²", "above 0"),
        ("--reuse", "unrecognized"),
        ("--trace-endpoint=otel:4317", "is no http:// or https:// URL"),
        ("--trace-endpoint=http://", "is no http:// or https:// URL"),
        ("--trace-ratio=1.1", "between 0 and 1"),
        ("--trace-ratio=x", "between 0 and 1"),
        ("--tls-cluster=ml/chat", "go together"),
        ("--tls-cluster=chat", "give NAMESPACE/NAME"),
    ],
)
def test_wrong_flags_are_told(flag: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([*NEEDED, flag])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@contextmanager
def router(http: int, admin: int, control: int) -> Iterator[subprocess.Popen[str]]:
    at = "127.0.0.1"
    command = ["/bin/sh", "-c", f'ulimit -Sn {FEW}; exec "$@"', "few"]  # as services start
    command += [sys.executable, "-m", "pd_router", "--model=m", "--router-name=r-0"]
    command += [f"--http={at}:{http}", f"--admin={at}:{admin}", f"--control={at}:{control}"]
    root = Path(__file__).parents[2]
    paths = [str(root / "runtime"), str(root / "proto"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until_serving(process: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        try:
            assert get(port, "/health")[0] == 200
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError("the router doesn't serve")


def test_tracing_that_isnt_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _: None)
    with pytest.raises(SystemExit):
        parse([*NEEDED, "--trace-endpoint=http://otel:4318"])
    assert "pip install pdcluster[tracing]" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_serves_and_ends_when_told(number: signal.Signals) -> None:
    http, admin, control = free_ports(3)
    with router(http, admin, control) as process:
        until_serving(process, http)
        status, body = get(http, "/ready")
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_workers")
        assert json.loads(get(admin, "/debug/workers")[1]) == {"workers": []}
        soft, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard > FEW
        process.send_signal(number)
        assert process.wait(10) == 0
        for port in (http, admin, control):
            with socket.create_server(("127.0.0.1", port)):
                pass
        assert process.stderr is not None
        assert "drained finished=True" in process.stderr.read()


@pytest.mark.slow
def test_a_taken_port_ends_the_start_and_is_named() -> None:
    http, admin, control = free_ports(3)
    with socket.create_server(("127.0.0.1", http)), router(http, admin, control) as process:
        assert process.wait(30) == 1
        assert process.stderr is not None
        assert f"127.0.0.1:{http}" in process.stderr.read().splitlines()[-1]
