"""Story: a PDCluster that names a collector; its pods' spans get there, past NetworkPolicies and
from images that hold nothing but what they need."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import network
from e2e.load import Question
from e2e.site import CLAIMED_MODEL, Site, document, pool
from tests import client
from tests.collector import collecting

NAME = "traced"
TRACE, PARENT = "7bd651916cd43dd8448eb211c8031c11", "a7ad6b7169203331"

pytestmark = pytest.mark.timeout(600)


def test_one_trace_through_all_pods(site: Site, model: Path, questions: list[Question]) -> None:
    enter = partial(network.enter, site.layout.namespace_file)
    node = site.kubectl(
        "get", "nodes", "-o",
        'jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}',
    ).strip()  # fmt: skip
    with collecting("0.0.0.0", enter) as collector, site.namespace(model) as namespace:
        spec: dict[str, Any] = document(NAME, CLAIMED_MODEL)["spec"]
        router = spec["router"] | {"routing": {"disaggregate": "always"}}
        tracing = {"endpoint": f"http://{node}:{collector.port}"}
        made = document(
            NAME, CLAIMED_MODEL, prefill=pool(1), decode=pool(1), router=router, tracing=tracing
        )
        site.kubectl("apply", "-n", namespace, "-f", "-", input=yaml.safe_dump(made))
        site.wait_ready(namespace, NAME)
        host, port = site.address(namespace, NAME)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

        async def ask() -> int:
            answer = await client.request(
                host, port, "POST", "/v1/completions", questions[0].body, headers=headers
            )
            await answer.body()
            await answer.close()
            return answer.status

        assert network.start(site.layout.namespace_file, ask).result(120) == 200
        root, parts = collector.trace(TRACE, PARENT, 8)
        pods = {role: site.pods(namespace, role)[0] for role in ("prefill", "decode")}
        for role, pod in pods.items():
            assert parts[role].service == f"pdcluster-{role}"
            assert parts[role].attributes["pdcluster.worker"] == pod["metadata"]["name"]
        routers = {one["metadata"]["name"] for one in site.pods(namespace, "router")}
        assert root.resource["service.instance.id"] in routers
        assert parts["transfer"].attributes["pdcluster.transfer.transport"] == "tcp"
