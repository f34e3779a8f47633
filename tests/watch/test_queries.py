"""Each query of each dashboard on a real Prometheus that scraped a real cluster and a real
operator returns data, and no rule about them fails or fires.

The cluster is made to have everything once: answers, refusals, failures, a worker killed in the
middle of a stream. The operator runs over a fake API server.
"""

import asyncio
import json
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest

from pd_operator import alerts, api, web
from pd_operator.metrics import CONTENT_TYPE
from tests import client
from tests.cluster import Cluster, serving, spec
from tests.collector import collecting
from tests.pd_operator.fake_api import FakeApi
from tests.pd_operator.objects import document
from tests.pd_operator.test_service import operating, until
from tests.prometheus import DEADLINE_S, SCRAPE_S, Prometheus, running
from tests.tiny_model import tiny_model_dir
from tests.watched import BOARDS, queries, variables

WINDOW = "30s"  # of rates, where Grafana would choose by its step
ROUNDS = 8
HEARTBEAT_S = 1.0  # pd_router.workers
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


async def talk(cluster: Cluster, number: int) -> None:
    """Two turns: of the first one's long answer only decode has the KV, and prefill copies it."""
    prompt = [5 + (number * 61 + i * 7) % 300 for i in range(40)]
    for tokens in (1200, 4):
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": tokens,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answer = await client.request("127.0.0.1", cluster.port, "POST", "/v1/completions", body)
        said = json.loads(await answer.body())
        await answer.close()
        prompt += said["choices"][0]["token_ids"]
        await asyncio.sleep(2 * HEARTBEAT_S)  # until decode has told what it holds


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
        if number % 2:
            await talk(cluster, number)
        await asyncio.sleep(SCRAPE_S)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a cluster, and an operator, with a life behind them."""
    routing = {"routing": {"disaggregate": "always"}}
    kept = {"retention": {"maxShare": 0.0001, "hostMemory": "64Mi"}}
    pools = {"prefill": {"replicas": 1, "engine": kept}, "decode": {"replicas": 2}}
    with ExitStack() as stack:
        tracing = {"endpoint": stack.enter_context(collecting()).url}
        made = spec(tiny_model_dir(layers=16), **pools, router=routing, slo=SLO, tracing=tracing)
        rules = [*alerts.groups(api.parse(made)), *alerts.operator_groups()]
        folder = tmp_path_factory.mktemp("prometheus")
        cluster = stack.enter_context(serving(made, tmp_path_factory.mktemp("cluster")))
        at = stack.enter_context(Operating().running())
        targets = [f"{pod.ip}:9090" for pod in cluster.pods()]
        scrapes = [
            {
                "job_name": "pdcluster",
                "static_configs": [{"targets": targets, "labels": _LABELS}],
            },
            {"job_name": "operator", "static_configs": [{"targets": [f"127.0.0.1:{at}"]}]},
        ]
        with running(folder, scrapes, rules) as found:
            found.until(lambda: found.up() == len(targets) + 1, "all are scraped")
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
