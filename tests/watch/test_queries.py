"""Each query of each dashboard on a real Prometheus that scraped a real cluster and a real
operator returns data, and no rule about them fails or fires.

The cluster is made to have everything once: answers, refusals, failures, a worker killed in the
middle of a stream. The operator runs over a fake API server.
"""

import asyncio
import json
import re
import signal
import subprocess
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_operator import alerts, api, web
from pd_operator.metrics import CONTENT_TYPE
from tests import client
from tests.cluster import Cluster, http_get, serving, spec
from tests.collector import collecting
from tests.pd_operator.fake_api import FakeApi
from tests.pd_operator.objects import document
from tests.pd_operator.test_service import operating, until
from tests.ports import free_port
from tests.tiny_model import tiny_model_dir
from tests.watch.conftest import PROMETHEUS
from tests.watched import BOARDS, queries, variables

SCRAPE_S = 1
WINDOW = "30s"  # of rates, where Grafana would choose by its step
DEADLINE_S = 60.0
ROUNDS = 8
CLUSTER = "test"
_LABELS = {"namespace": "default", alerts.CLUSTER_LABEL: CLUSTER}
_VARIABLES = {"$__rate_interval": WINDOW, "$namespace": "default", "$cluster": CLUSTER}
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")
SLO = {"ttft": {"percentile": 50, "target": "60s"}, "tpot": {"percentile": 50, "target": "10s"}}


def pdcluster(name: str, least: int = 1) -> dict[str, Any]:
    """One whose pools the operator sizes."""
    scaling = {"mode": "SLO", "minReplicas": least, "maxReplicas": 3}
    target = {"percentile": 99, "target": "1s"}
    return document(**{
        "metadata.name": name, "metadata.namespace": _LABELS["namespace"],
        "metadata.creationTimestamp": "2026-01-01T00:00:00Z",
        "spec.prefill": {"scaling": scaling}, "spec.decode": {"scaling": scaling},
        "spec.slo": {"ttft": target, "tpot": target},
    })  # fmt: skip


class Operating:
    """The operator over a fake API server in a thread of its own; its metrics on a port."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._run()])

    @contextmanager
    def running(self) -> Iterator[int]:
        self._thread.start()
        assert self._ready.wait(DEADLINE_S)
        try:
            yield self.port
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(DEADLINE_S)
            self._loop.close()

    async def _run(self) -> None:
        fake = FakeApi()
        await fake.put(pdcluster(CLUSTER))
        namespace = _LABELS["namespace"]
        async with operating(fake, resync_s=1.0, namespace=namespace) as (operator, metrics):
            await until(lambda: operator.unready() == "")
            page = {"/metrics": lambda: web.Page(metrics.render(), content_type=CONTENT_TYPE)}
            async with web.serving({("127.0.0.1", 0): page}) as [port]:
                self.port = port
                self._ready.set()
                await self._changing(fake)

    async def _changing(self, fake: FakeApi) -> None:
        """Until told to stop something changes each second: there is always work to count."""
        number = 0
        while not self._stop.is_set():
            number += 1
            name = f"{CLUSTER}-{number % 3}"
            await fake.put(pdcluster(CLUSTER, least=1 + number % 2))
            await fake.put(pdcluster(name))
            await fake.remove("PDCluster", _LABELS["namespace"], name)
            fake.refuse = {"watch": 500} if number % 3 == 0 else {}
            await fake.hang_up()
            try:
                async with asyncio.timeout(1):
                    await self._stop.wait()
            except TimeoutError:
                continue


class Prometheus:
    """A real one, over static targets."""

    def __init__(self, folder: Path, targets: list[str], operator: int, rules: Any) -> None:
        self._folder = folder
        self.port = free_port()
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
        scrapes = [
            {
                "job_name": "pdcluster",
                "static_configs": [{"targets": targets, "labels": _LABELS}],
            },
            {
                "job_name": "operator",
                "static_configs": [{"targets": [f"127.0.0.1:{operator}"]}],
            },
        ]
        config = {
            "global": {
                "scrape_interval": f"{SCRAPE_S}s",
                "evaluation_interval": f"{SCRAPE_S}s",
            },
            "rule_files": ["rules.yaml"],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))

    @contextmanager
    def running(self) -> Iterator["Prometheus"]:
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            self.until(lambda: http_get(self._url("/-/ready"))[0] == 200, "prometheus is ready")
            yield self
        finally:
            process.terminate()
            process.wait(DEADLINE_S)

    def until(self, true: Any, what: str) -> None:
        ends = time.monotonic() + DEADLINE_S
        while time.monotonic() < ends:
            try:
                if true():
                    return
            except (OSError, LookupError):
                pass
            time.sleep(0.2)
        raise AssertionError(f"not within {DEADLINE_S:g} s: {what}")

    def query(self, expression: str) -> list[Any]:
        """Its vector; AssertionError with what is wrong with the query."""
        text = urllib.parse.quote(expression)
        status, body = http_get(self._url(f"/api/v1/query?query={text}"))
        assert status == 200, body
        found: list[Any] = json.loads(body)["data"]["result"]
        return found

    def label_values(self, label: str, selector: str) -> set[str]:
        """As Grafana asks for a variable's choices."""
        match = urllib.parse.quote(selector)
        return set(self.get(f"/api/v1/label/{label}/values?match[]={match}"))

    def get(self, path: str) -> Any:
        return json.loads(http_get(self._url(path))[1])["data"]

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


async def ask(cluster: Cluster, text: str, tokens: int, model: str = "tiny") -> int:
    """One streamed chat to its end; its status."""
    body = {
        "model": model, "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    answer = await client.request("127.0.0.1", cluster.port, "POST", "/v1/chat/completions", body)
    try:
        async for _ in answer.chunks():
            pass
        return answer.status
    finally:
        await answer.close()


async def leave(cluster: Cluster) -> None:
    """A client that hangs up within its answer: a failure at the router and at a worker."""
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "a long one"}],
        "max_tokens": 400, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    answer = await client.request("127.0.0.1", cluster.port, "POST", "/v1/chat/completions", body)
    async for _ in answer.events():
        break
    await answer.close()


@asynccontextmanager
async def killing(cluster: Cluster) -> AsyncIterator[None]:
    """A decode worker dies while something streams: that begins again elsewhere."""
    streams = [asyncio.create_task(ask(cluster, f"stream {n}", 300)) for n in range(6)]
    victim = cluster.pod("decode", 1)
    running = "pdcluster_engine_running_sequences"
    await asyncio.to_thread(
        cluster.until,
        lambda: sum(cluster.metrics(victim)[running].values()) > 0,
        "the victim has a stream",
    )
    cluster.kill(victim.pid, signal.SIGKILL)
    yield
    assert set(await asyncio.gather(*streams)) == {200}


async def live(cluster: Cluster) -> None:
    """Everything that a cluster can go through, and again, so that it has rates."""
    shared = "The river runs down to the sea. " * 12
    async with killing(cluster):
        pass
    for number in range(ROUNDS):
        asked = [ask(cluster, f"{shared}{number % 3}", 12) for _ in range(3)]
        assert set(await asyncio.gather(*asked)) == {200}
        assert await ask(cluster, "x", 1, model="other") == 404
        await leave(cluster)
        await asyncio.sleep(SCRAPE_S)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a cluster, and an operator, with a life behind them."""
    routing = {"routing": {"disaggregate": "always"}}
    kept = {"retention": {"maxShare": 0.0001, "hostMemory": "64Mi"}}
    pools = {"prefill": {"replicas": 1, "engine": kept}, "decode": {"replicas": 2}}
    with ExitStack() as stack:
        tracing = {"endpoint": stack.enter_context(collecting()).url}
        made = spec(tiny_model_dir(), **pools, router=routing, slo=SLO, tracing=tracing)
        rules = [*alerts.groups(api.parse(made)), *alerts.operator_groups()]
        folder = tmp_path_factory.mktemp("prometheus")
        cluster = stack.enter_context(serving(made, tmp_path_factory.mktemp("cluster")))
        at = stack.enter_context(Operating().running())
        targets = [f"{pod.ip}:9090" for pod in cluster.pods()]
        with Prometheus(folder, targets, at, rules).running() as found:
            up = lambda: len(found.query("up == 1")) == len(targets) + 1  # noqa: E731
            found.until(up, "all are scraped")
            asyncio.run(live(cluster))
            yield found


def plain(query: str) -> str:
    """As Grafana asks it, with the variables' values."""
    for name, value in _VARIABLES.items():
        query = query.replace(name, value)
    return query


def test_all_queries_return_data(prometheus: Prometheus) -> None:
    assert BOARDS
    empty = []
    for board in BOARDS:
        for query in queries(board):
            result = prometheus.query(plain(query))
            if not any(one["value"][1] != "NaN" for one in result):
                empty.append(f"{board.stem}: {plain(query)}")
    assert not empty, "\n".join(empty)


def test_variables_offer_what_there_is(prometheus: Prometheus) -> None:
    """And nothing else: each is asked for what the one before it has chosen."""
    asked = 0
    for board in BOARDS:
        for one in variables(board):
            found = _LABEL_VALUES.fullmatch(plain(one.query))
            assert found is not None, one.query
            offered = prometheus.label_values(found["label"], found["selector"])
            assert offered == {_VARIABLES[f"${one.name}"]}, (board.stem, one)
            asked += 1
    assert asked == 4  # two boards are of one PDCluster
    assert prometheus.label_values("namespace", "pdcluster_router_nothing") == set()


def test_no_rule_fails_and_none_fires(prometheus: Prometheus) -> None:
    rules = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = [one for one in prometheus.get("/api/v1/alerts")["alerts"] if one["state"] == "firing"]
    assert firing == []
