"""Clients by their keys, through a router and a worker as processes: who is let in, whose class
and limit count whatever a header says, and a key that is taken away."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.cluster import http_get
from tests.e2e.asking import text_of
from tests.ports import free_ports

READY_S = 90.0
ALICE, BOB, EVE = "sk-alice-0001", "sk-bob-000001", "sk-eve-000001"
ADMISSION = {
    "classes": [{"name": "plain"}, {"name": "hopeless", "ttft": 0.001}],
    "clients": {
        "alice": {"limits": {"requestsPerMinute": 2, "burstSeconds": 60}},
        "bob": {"class": "hopeless"},
    },
}


@dataclass
class Keyed:
    port: int
    keys: Path

    def asks(self, key: str) -> OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        return OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


def until(condition: Callable[[], Any], what: str) -> None:
    ends = time.monotonic() + READY_S
    while not condition():
        assert time.monotonic() < ends, f"not within {READY_S:g} s: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    http, admin, control, health = free_ports(4)
    folder = tmp_path_factory.mktemp("keys")
    for name, key in (("alice", ALICE), ("bob", BOB)):
        (folder / name).write_text(f"{key}\n")
    commands = (
        (
            "pd_router", "--model=tiny", "--router-name=router-0", f"--http=127.0.0.1:{http}",
            f"--admin=127.0.0.1:{admin}", f"--control=127.0.0.1:{control}", "--class-header",
            f"--api-keys={folder}", f"--admission={json.dumps(ADMISSION)}",
        ),
        (
            "pd_engine", "--role=both", f"--model={model}", "--served-name=tiny",
            "--host=127.0.0.1", "--worker-name=both-0", "--work-port=0", "--kv-port=0",
            f"--health-port={health}", "--threads=1", f"--routers=127.0.0.1:{control}",
            "--dtype=float32", "--draft-tokens=0",
        ),
    )  # fmt: skip

    def ready() -> bool:
        try:
            return http_get(f"http://127.0.0.1:{http}/ready")[0] == 200
        except OSError:
            return False

    with ExitStack() as processes:
        for command in commands:
            process = subprocess.Popen([sys.executable, "-m", *command])
            processes.callback(process.wait, 60)
            processes.callback(process.kill)
        until(ready, "a worker is there")
        yield Keyed(http, folder)


def complete(client: OpenAI, prompt: str = "How far?", **headers: str) -> Any:
    return client.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, extra_headers=headers
    )


def test_who_has_no_key_is_not_let_in(keyed: Keyed) -> None:
    for ask in (complete, lambda client: client.models.list()):
        with keyed.asks(EVE) as client, pytest.raises(openai.AuthenticationError) as refused:
            ask(client)
        assert EVE not in refused.value.message
    with keyed.asks(ALICE) as client:
        assert [one.id for one in client.models.list()] == ["tiny"]


def test_a_limit_goes_by_the_key(keyed: Keyed) -> None:
    with keyed.asks(ALICE) as client:
        for _ in range(2):
            assert complete(client).usage.completion_tokens == 2
        with pytest.raises(openai.RateLimitError) as refused:
            complete(client)
        assert int(refused.value.response.headers["retry-after"]) >= 1


def test_a_client_that_has_a_class_keeps_to_it(keyed: Keyed) -> None:
    """Whatever header it sends, where headers are allowed."""
    with keyed.asks(BOB) as client:
        for headers in ({}, {"x-pdcluster-class": "plain"}):
            with pytest.raises(openai.RateLimitError) as refused:
                complete(client, text_of(1200), **headers)
            assert "class 'hopeless' promises 0.001 s" in refused.value.message


def test_keys_come_and_go_without_a_restart(keyed: Keyed) -> None:
    def let_in(key: str) -> bool:
        with keyed.asks(key) as client:
            try:
                client.models.list()
            except openai.AuthenticationError:
                return False
        return True

    (keyed.keys / "eve").write_text(EVE)
    until(lambda: let_in(EVE), "the new key is known")
    (keyed.keys / "eve").unlink()
    until(lambda: not let_in(EVE), "the key that was taken away opens nothing")
    assert let_in(ALICE)
