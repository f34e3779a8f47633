"""A request's trace through real processes: a PDCluster that names a collector, a client that
names its trace, and spans of the router, of prefill and of decode."""

from pathlib import Path

from tests.client import request
from tests.cluster import serving, spec
from tests.collector import collecting
from tests.e2e.asking import COMPLETIONS, body, text_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NAMES = {"tokenize", "queue", "reserve", "wait", "prefill", "transfer", "decode"}


def test_one_trace_through_all(model: Path, tmp_path: Path, run) -> None:
    with collecting() as collector:
        document = spec(model)
        document["spec"]["router"] = {"routing": {"disaggregate": "always"}}
        document["spec"]["tracing"] = {"endpoint": collector.url}
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
        with serving(document, tmp_path, environment) as cluster:
            prompt = text_of(300)
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

            async def ask() -> int:
                content = body(prompt, 8)
                response = await request(
                    "127.0.0.1", cluster.port, "POST", COMPLETIONS, content, headers=headers
                )
                await response.body()
                await response.close()
                return response.status

            assert run(ask()) == 200
            root, parts = collector.trace(TRACE, PARENT, len(NAMES) + 1)
            counted = cluster.metrics(cluster.pod("router"))["pdcluster_router_trace_spans_total"]
            assert {dict(labels)["result"] for labels in counted} == {"sent", "lost"}
            workers = {pod.pool: pod.name for pod in cluster.workers()}
        assert {one.trace for one in collector.spans()} == {TRACE}
        assert parts.keys() == NAMES
        assert root.name == "text_completion tiny"
        assert root.attributes["gen_ai.usage.output_tokens"] == 8
        for role in ("prefill", "decode"):
            assert parts[role].service == f"pdcluster-{role}"
            assert parts[role].attributes["pdcluster.worker"] == workers[role]
        assert parts["transfer"].attributes["pdcluster.transfer.bytes"] > 0
        assert parts["prefill"].end_s <= parts["decode"].end_s <= root.end_s + 0.001
        assert prompt.encode() not in collector.raw
