"""Story: what goes wrong on the real cluster fires the alert about it, and no other; when it is
over, all is quiet. Times of the rules are shorter here (see `e2e.prometheus`), thresholds as
they are."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from e2e.cluster.api import wait_for
from e2e.load import Load, Question
from e2e.prometheus import MONITORING, watching
from e2e.site import BUILTIN_MODEL, Site, document, pool
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


@pytest.fixture(scope="module")
def prometheus(
    site: Site, namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    def there() -> bool:
        kinds = ("PodMonitor", "PrometheusRule")
        return all(site.api.items(MONITORING, kind, namespace) for kind in kinds)

    wait_for("the operator's objects", there, DEADLINE_S)
    with watching(site, namespace, tmp_path_factory.mktemp("prometheus")) as found:
        found.until(lambda: found.up() == 4, "two prefill, a decode worker, a router")
        yield found


@contextmanager
def loaded(
    site: Site, namespace: str, streams: int, prompt_tokens: int, max_tokens: int
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
    address = site.address(namespace, NAME)
    with Load(site.layout.namespace_file, address, asked, streams=streams) as load:
        yield load


def fires_alone(prometheus: Prometheus, alert: str, since: float) -> None:
    """It fires in time, and nothing else has fired since."""
    prometheus.until(lambda: alert in prometheus.firing(), f"{alert} fires", DEADLINE_S)
    assert prometheus.fired(time.monotonic() - since) == {alert}


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
        fires_alone(prometheus, "PDClusterKVFull", since)
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
        fires_alone(prometheus, "PDClusterHandOversSlow", since)
    quiet(prometheus)
