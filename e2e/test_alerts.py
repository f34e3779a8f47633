"""Story: what goes wrong on the real cluster fires the alert about it, and no other; when it is
over, all is quiet. Times of the rules are shorter here (see `e2e.prometheus`), thresholds as
they are."""

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import yaml

from e2e.cluster.api import wait_for
from e2e.load import Load, Question
from e2e.prometheus import MONITORING, watching
from e2e.site import BUILTIN_MODEL, Site, document, is_ready, pool
from tests.foreign import MONITORING as KINDS
from tests.prometheus import Prometheus

NAME = "watched"
DEADLINE_S = 480.0
SLO = {
    # What these faults cost is not what is promised: only their own alerts are asked for.
    "ttft": {"percentile": 50, "target": "60s"},
    "tpot": {"percentile": 50, "target": "20s"},
}
KV_TOKENS = 2048
_NUMBERS = itertools.count()

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def namespace(site: Site) -> Iterator[str]:
    """With a PDCluster that hands every prompt over, and whose decode has little room."""
    for kind in KINDS:
        site.api.apply(kind)
    with site.namespace() as name:
        made = document(
            NAME,
            BUILTIN_MODEL,
            model={"name": "smollm2", "source": BUILTIN_MODEL, "dtype": "float32"},
            slo=SLO,
            prefill=pool(2),
            decode=pool(1, engine={"kvCacheTokens": KV_TOKENS}),
        )
        made["spec"]["router"] |= {"replicas": 1, "routing": {"disaggregate": "always"}}
        site.kubectl("apply", "-n", name, "-f", "-", input=yaml.safe_dump(made))
        site.wait_ready(name, NAME)
        yield name
    for kind in KINDS:
        site.kubectl("delete", "crd", kind["metadata"]["name"])


def until_monitored(site: Site, namespace: str) -> None:
    def there() -> bool:
        kinds = ("PodMonitor", "PrometheusRule")
        return all(site.api.items(MONITORING, kind, namespace) for kind in kinds)

    wait_for("the operator's objects", there, DEADLINE_S)


@pytest.fixture(scope="module")
def prometheus(
    site: Site, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    until_monitored(site, namespace)
    with watching(site, namespace, tmp_path_factory.mktemp("prometheus")) as found:
        found.until(lambda: found.up() == 4, "two prefill, a decode worker, a router")
        yield found


@contextmanager
def loaded(
    site: Site, namespace: str, streams: int, prompt_tokens: int, max_tokens: int, name: str = NAME
) -> Iterator[Load]:
    """Streams without end; what they say isn't compared, no prompt begins like another."""
    first = next(_NUMBERS)
    asked = [
        Question(
            {
                "model": "smollm2",
                "prompt": f"{first} {number}" + " boat" * prompt_tokens,
                "max_tokens": max_tokens,
                "ignore_eos": True,
            },
            "",
        )
        for number in range(1000)
    ]
    address = site.address(namespace, name)
    with Load(site.layout.namespace_file, address, asked, streams=streams) as load:
        yield load


def fires_alone(prometheus: Prometheus, since: float, *alerts: str) -> None:
    """They fire in time, and nothing else has fired since."""
    wanted = set(alerts)
    prometheus.until(lambda: wanted <= prometheus.firing(), f"{wanted} fire", DEADLINE_S)
    assert prometheus.fired(time.monotonic() - since) == wanted


def quiet(prometheus: Prometheus) -> None:
    prometheus.until(lambda: not prometheus.firing(), "nothing fires any more", DEADLINE_S)


def test_well_and_loaded_nothing_fires(site: Site, namespace: str, prometheus: Prometheus) -> None:
    since = time.monotonic()
    with loaded(site, namespace, streams=2, prompt_tokens=200, max_tokens=20) as load:
        load.until_more(20)
    assert not load.outcome.failed
    assert prometheus.fired(time.monotonic() - since) == set()


def test_decode_without_room(site: Site, namespace: str, prometheus: Prometheus) -> None:
    """More answers than its KV holds, all of them long: the rest wait for room."""
    since = time.monotonic()
    with loaded(site, namespace, streams=8, prompt_tokens=500, max_tokens=400):
        fires_alone(prometheus, since, "PDClusterKVFull")
    quiet(prometheus)


@contextmanager
def slow_link(site: Site, namespace: str) -> Iterator[None]:
    """What leaves prefill's pods goes as over a slow line."""
    inside = [
        ["nsenter", "--target", str(site.processes(pod)[0].pid), "--net", "tc", "qdisc"]
        for pod in site.pods(namespace, "prefill")
    ]
    try:
        for command in inside:
            shaped = ["tbf", "rate", "40mbit", "burst", "64kb", "latency", "1s"]
            site.enter(*command, "replace", "dev", "eth0", "root", *shaped)
        yield
    finally:
        for command in inside:
            site.enter(*command, "del", "dev", "eth0", "root")


def test_slow_hand_overs(site: Site, namespace: str, prometheus: Prometheus) -> None:
    since = time.monotonic()
    with (
        slow_link(site, namespace),
        loaded(site, namespace, streams=2, prompt_tokens=200, max_tokens=4),
    ):
        fires_alone(prometheus, since, "PDClusterHandOversSlow")
    quiet(prometheus)


def test_prefill_workers_that_are_killed(
    site: Site, namespace: str, prometheus: Prometheus
) -> None:
    """Twice each, under a load so light that hardly a request notices."""
    since = time.monotonic()

    def restarts() -> int:
        """Of those that are ready again."""
        found = [pod for pod in site.pods(namespace, "prefill") if is_ready(pod)]
        return sum(pod["status"]["containerStatuses"][0]["restartCount"] for pod in found)

    def back(least: int) -> bool:
        return restarts() >= least

    with loaded(site, namespace, streams=1, prompt_tokens=20, max_tokens=4):
        for _ in range(2):
            wanted = restarts() + 2
            for pod in site.pods(namespace, "prefill"):
                site.signal(pod, signal.SIGKILL)
            wait_for("prefill is back", partial(back, wanted), DEADLINE_S)
        fires_alone(prometheus, since, "PDClusterWorkersLost")
    quiet(prometheus)


@pytest.mark.usefixtures("namespace")  # monitoring's kinds are there as long as it is
def test_a_promise_that_cannot_be_kept(site: Site, tmp_path: Path) -> None:
    """Nobody computes a prompt within a millisecond: the budget burns, fast and slowly."""
    name = "promised"
    made = document(
        name, BUILTIN_MODEL, model={"name": "smollm2", "source": BUILTIN_MODEL, "dtype": "float32"},
        slo={"ttft": {"percentile": 90, "target": "1ms"}}, colocated=pool(1),
    )  # fmt: skip
    for one in ("prefill", "decode"):
        made["spec"].pop(one, None)
    with site.namespace() as other:
        site.kubectl("apply", "-n", other, "-f", "-", input=yaml.safe_dump(made))
        site.wait_ready(other, name)
        until_monitored(site, other)
        with watching(site, other, tmp_path) as watched:
            watched.until(lambda: watched.up() == 1 + len(site.pods(other, "router")), "all")
            since = time.monotonic()
            with loaded(site, other, streams=2, prompt_tokens=20, max_tokens=2, name=name):
                fires_alone(watched, since, "PDClusterTTFTBurnsFast", "PDClusterTTFTBurnsSlowly")
