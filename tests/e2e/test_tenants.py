"""Two clients with keys of their own: how long an answer takes says nothing of whether the other
one has sent the same prompt. A statistical test, with one beside it that shows what it could see.
"""

import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster import http_get
from tests.ports import free_port

ROUNDS = 40
PROMPT_CHARACTERS = 1500
SURE = 4.0
"""Standard deviations: by chance, once in 16,000 times."""
READY_S = 60.0
KEYS = {"alice": "sk-alice-0123456789abcdef", "bob": "sk-bob-0123456789abcdef"}


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router with both keys and a worker that does both: `up` has no Secrets."""
    keys = tmp_path_factory.mktemp("keys")
    for name, key in KEYS.items():
        (keys / name).write_text(key)
    http, admin, control = (f"127.0.0.1:{free_port()}" for _ in range(3))
    router = [
        "pd_router", "--model=tiny", "--router-name=router", f"--http={http}", f"--admin={admin}",
        f"--control={control}", f"--api-keys={keys}",
    ]  # fmt: skip
    worker = [
        "pd_engine", "--role=both", f"--model={model}", "--served-name=tiny", "--host=127.0.0.1",
        "--worker-name=worker", "--work-port=0", "--kv-port=0", f"--health-port={free_port()}",
        f"--routers={control}", "--threads=1", "--kv-cache-tokens=65536", "--draft-tokens=0",
    ]  # fmt: skip
    with ExitStack() as processes:
        for command in (router, worker):
            process = subprocess.Popen([sys.executable, "-m", *command])
            processes.callback(process.wait, 60)
            processes.callback(process.terminate)
        until_ready(f"http://{http}/ready")
        yield f"http://{http}/v1/completions"


def until_ready(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            if http_get(url)[0] == 200:
                return
        except OSError:
            pass
        assert time.monotonic() < deadline, "it doesn't get ready"
        time.sleep(0.05)


def ask(url: str, client: str, prompt: str) -> tuple[float, int]:
    """Seconds to the only token, and how much of the prompt was cached."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[client]}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=30) as response:
        usage = json.load(response)["usage"]
    return time.perf_counter() - began, usage["prompt_tokens_details"]["cached_tokens"]


def ranked(some: list[float], others: list[float]) -> float:
    """By the rank-sum test, how many standard deviations `some` come before `others`."""
    before = sum((a < b) + 0.5 * (a == b) for a in some for b in others)
    n, m = len(some), len(others)
    return float((before - n * m / 2) / (n * m * (n + m + 1) / 12) ** 0.5)


def smallest_effect_s(some: list[float], others: list[float]) -> float:
    """How much sooner all of `some` would have to come for the test to see it."""
    low, high = 0.0, max(some + others)
    while high - low > 1e-6:
        middle = (low + high) / 2
        seen = ranked([one - middle for one in some], others) > SURE
        low, high = (low, middle) if seen else (middle, high)
    return high


@pytest.mark.timeout(300)
def test_timing_tells_nothing_across_tenants(url: str) -> None:
    chance = random.Random(5)
    times: dict[str, list[float]] = {"own": [], "other": [], "new": []}
    cached: dict[str, list[int]] = {kind: [] for kind in times}
    plan = [kind for kind in times for _ in range(ROUNDS)]
    chance.shuffle(plan)
    for number, kind in enumerate(["new", *plan]):  # the first one finds nothing warm
        letters = chance.choices("abcdefghij klmnop", k=PROMPT_CHARACTERS)
        prompt = f"{number} {''.join(letters)}"
        before = {"own": "bob", "other": "alice"}.get(kind)
        if before is not None:
            ask(url, before, prompt)
        taken_s, hit = ask(url, "bob", prompt)
        if number:
            times[kind].append(taken_s)
            cached[kind].append(hit)
    assert max(cached["other"]) == max(cached["new"]) == 0
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    assert ranked(times["own"], times["new"]) > SURE, f"it would see nothing: {medians}"
    assert abs(ranked(times["other"], times["new"])) < SURE, medians
    smallest_s = smallest_effect_s(times["other"], times["new"])
    saved_s = medians["new"] - medians["own"]
    print(
        f"a cached prompt saves {saved_s * 1000:.2f} ms; seen would be {smallest_s * 1000:.2f} ms "
        f"or more, by {ROUNDS} prompts each"
    )
    assert smallest_s < saved_s, "a prefix that is shared would be seen"


def test_the_test_itself() -> None:
    low, high = [1.0, 2, 3, 4, 5, 6, 7, 8], [9.0, 10, 11, 12, 13, 14, 15, 16]
    assert ranked(low, high) == pytest.approx(3.36, abs=0.01)
    assert ranked(high, low) == pytest.approx(-3.36, abs=0.01)
    assert ranked(low, low) == 0
    many = [float(one) for one in range(40)]
    assert smallest_effect_s(many, many) == pytest.approx(12.5, abs=1)
