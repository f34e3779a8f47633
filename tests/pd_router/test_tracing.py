"""Covers pd_router.traces and tracing: which requests become spans, what is in them and what
isn't, and a collector that isn't there."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from pd_router import traces, tracing
from pd_router.keys import Keyring
from pd_router.metrics import Metrics
from pd_router.tracing import Tracing
from tests.collector import Collector, Span, collecting
from tests.pd_router.http_rig import MODEL, PlayedGeneration, Rig, go, rig, says
from tests.ports import free_port

SECRET = "the launch code is 7391"
HI: Any = [{"role": "user", "content": SECRET}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
NO_TRACE = {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}
WHOLE = 7  # spans of a request that nothing was handed over for
LINE: dict[str, Any] = {
    "prompt_tokens": 100, "cached_tokens": 32, "completion_tokens": 7, "attempts": 1,
    "tokenize_s": 0.1, "queue_s": 0.2, "grant_wait_s": 0.3, "prefill_queue_s": 0.4,
    "prefill_s": 2.0, "transfer_s": 0.5, "exposed_s": 0.01, "kv_bytes": 4096, "transport": "tcp",
    "ttft_s": 3.1, "tpot_s": 0.05, "prefill_worker": "p-0", "decode_worker": "d-0",
    "reason": "least cost",
}  # fmt: skip


def entry(*lines: dict[str, Any], **more: Any) -> dict[str, Any]:
    made = {
        "request_id": "mine", "id": "chatcmpl-1", "path": "/v1/chat/completions", "status": 200,
        "failure": None, "total_s": 4.0, "timelines": list(lines),
    }  # fmt: skip
    return made | more


def test_who_did_what_and_when() -> None:
    made = {one.name: one for one in traces.children(entry(LINE))}
    assert {name: (one.service, round(one.start_s, 3), round(one.seconds, 3))
            for name, one in made.items()} == {
        "tokenize": ("router", 0.0, 0.1),
        "queue": ("router", 0.1, 0.2),
        "reserve": ("decode", 0.3, 0.3),
        "wait": ("prefill", 0.6, 0.4),
        "prefill": ("prefill", 1.0, 2.0),
        "transfer": ("prefill", 2.5, 0.5),
        "decode": ("decode", 3.1, 0.9),
    }  # fmt: skip
    assert made["prefill"].attributes == {
        "pdcluster.worker": "p-0",
        "pdcluster.computed_tokens": 68,
    }
    assert made["transfer"].attributes == {
        "pdcluster.worker": "p-0",
        "pdcluster.transfer.target": "d-0",
        "pdcluster.transfer.transport": "tcp",
        "pdcluster.transfer.bytes": 4096,
        "pdcluster.transfer.exposed_s": 0.01,
    }


def test_a_copy_of_its_beginning_is_a_span_of_its_own() -> None:
    copy = {
        "pulled_from": "d-0", "pulled_tokens": 32, "pulled_bytes": 2048, "pull_s": 0.25,
    }  # fmt: skip
    made = {one.name: one for one in traces.children(entry(LINE | copy))}
    assert (made["pull"].service, made["pull"].start_s, made["pull"].seconds) == (
        "prefill", pytest.approx(0.6), 0.25,
    )  # fmt: skip
    assert made["pull"].attributes == {
        "pdcluster.worker": "p-0",
        "pdcluster.pull.source": "d-0",
        "pdcluster.pull.tokens": 32,
        "pdcluster.pull.bytes": 2048,
    }
    assert made["wait"].start_s == pytest.approx(0.85)


def test_a_prompt_computed_where_it_is_decoded_is_that_workers() -> None:
    line = LINE | {"prefill_worker": "d-0", "transport": "", "transfer_s": 0.0}
    found = [(one.name, one.service) for one in traces.children(entry(line))]
    assert found[2:] == [
        ("reserve", "decode"),
        ("wait", "decode"),
        ("prefill", "decode"),
        ("decode", "decode"),
    ]


def test_each_prompt_of_a_request_has_its_own() -> None:
    found = list(traces.children(entry(LINE, LINE)))
    assert [one.attributes["pdcluster.prompt"] for one in found] == [0] * 7 + [1] * 7


def test_what_no_worker_did_has_no_span() -> None:
    nowhere = {"prefill_worker": "", "decode_worker": "", "transport": "", "ttft_s": None}
    found = traces.children(entry(LINE | nowhere | {"attempts": 0}, status=503))
    assert [one.name for one in found] == ["tokenize", "queue"]


def soon_given_up(place: str) -> tracing.OTLPSpanExporter:
    return tracing.OTLPSpanExporter(place, timeout=0.5)


@asynccontextmanager
async def traced(url: str, ratio: float = 1.0, **settings: Any) -> AsyncIterator[Rig]:
    """A router whose spans go out at once."""

    made = Tracing(
        url, ratio, MODEL, "router-0", exporter=soon_given_up, processor=SimpleSpanProcessor
    )
    async with rig(spans=made, **settings) as r:
        say = says(r.tokens("abc"))

        async def script(generation: PlayedGeneration) -> None:
            generation.timeline.prefill_worker = "p-0"
            generation.timeline.decode_worker = "d-0"
            await say(generation)

        r.sessions.script = script
        yield r
    await made.close()


async def ask(r: Rig, headers: dict[str, str], **more: Any) -> Any:
    async with r.client() as api:
        return await api.chat.completions.create(
            model=MODEL, messages=HI, extra_headers=headers, **more
        )


def the_root(collector: Collector) -> Span:
    [found] = [one for one in collector.spans(1) if one.service == "pdcluster-router"
               and one.name.startswith(("chat", "POST"))]  # fmt: skip
    return found


def test_a_request_in_its_clients_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.namespace.name=prod")

    async def scenario(collector: Collector) -> None:
        async with traced(collector.url) as r:
            before = time.time()
            answer = await ask(r, SAMPLED, temperature=0.5, max_tokens=9, user="someone")
            after = time.time()
            await asyncio.to_thread(collector.spans, WHOLE)
        spans, root = collector.spans(), the_root(collector)
        assert {one.trace for one in spans} == {TRACE}
        assert {one.parent for one in spans if one is not root} == {root.id}
        assert (root.name, root.parent, root.error) == (f"chat {MODEL}", PARENT, None)
        assert before - 0.1 <= root.start_s <= root.end_s <= after + 0.1
        assert root.resource["service.instance.id"] == "router-0"
        assert {one.resource["k8s.namespace.name"] for one in spans} == {"prod"}
        assert {one.service for one in spans} >= {"pdcluster-router", "pdcluster-decode"}
        assert root.attributes["gen_ai.response.id"] == answer.id
        assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert root.attributes["gen_ai.request.max_tokens"] == 9
        assert root.attributes["gen_ai.request.temperature"] == 0.5
        assert root.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
        assert root.attributes["http.response.status_code"] == 200
        for one in spans:
            assert root.start_s - 0.001 <= one.start_s <= one.end_s <= root.end_s + 0.001
        assert collector.paths == {"/v1/traces"}
        for said in (SECRET, answer.choices[0].message.content, "someone"):
            assert said.encode() not in collector.raw

    with collecting() as collector:
        go(scenario(collector))


@pytest.mark.parametrize(
    ("ratio", "headers", "is_traced"),
    [
        (1.0, {}, True),
        (0.0, {}, False),
        (0.0, SAMPLED, True),
        (1.0, NOT_SAMPLED, False),
        (1.0, {"traceparent": "nonsense"}, True),
        (0.0, NO_TRACE, False),
    ],
)
def test_the_client_decides_where_it_does(
    ratio: float, headers: dict[str, str], is_traced: bool
) -> None:
    async def scenario(collector: Collector) -> None:
        async with traced(collector.url, ratio) as r:
            await ask(r, headers)
            await ask(r, SAMPLED | {"x-request-id": "last"})  # what came before has been sent
            await asyncio.to_thread(collector.spans, WHOLE)
        roots = [one for one in collector.spans() if one.name.startswith("chat")]
        assert len(roots) == 1 + is_traced
        assert roots[-1].attributes["pdcluster.request_id"] == "last"

    with collecting() as collector:
        go(scenario(collector))


def test_a_failure_is_one_in_its_span() -> None:
    async def scenario(collector: Collector) -> None:
        async with traced(collector.url) as r:
            with pytest.raises(openai.NotFoundError):
                async with r.client() as api:
                    await api.chat.completions.create(model="other", messages=HI)
            root = await asyncio.to_thread(the_root, collector)
        assert root.error
        assert root.attributes["error.type"] == root.error
        assert root.attributes["http.response.status_code"] == 404

    with collecting() as collector:
        go(scenario(collector))


def test_what_clients_write_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """A model that isn't there names no span; numbers are those that the wire can tell; a
    tracestate isn't passed on beyond what W3C asks for, and never logged."""

    async def scenario(collector: Collector) -> None:
        async with traced(collector.url) as r, r.client() as api:
            state = {"tracestate": ",".join(["junk"] * 50)}
            for headers in (state, {"tracestate": "a=" + "b" * 600}):
                with pytest.raises(openai.NotFoundError):
                    await api.chat.completions.create(
                        model="m" * 10_000, messages=HI, extra_headers=SAMPLED | headers,
                        extra_body={"top_k": 10**30}, user="x",
                    )  # fmt: skip
            await asyncio.to_thread(collector.spans, 2)
        for root in collector.spans():
            assert root.name == "chat"
            assert root.attributes["gen_ai.request.model"] == "m" * 200
            assert root.attributes["gen_ai.request.top_k"] == 2**63 - 1
        assert b"b" * 600 not in collector.raw
        assert "junk" not in caplog.text

    with collecting() as collector:
        go(scenario(collector))


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
def test_an_endpoint_may_have_the_path_of_traces(path: str) -> None:
    places: list[str] = []

    def noted(place: str) -> tracing.OTLPSpanExporter:
        places.append(place)
        return tracing.OTLPSpanExporter(place)

    Tracing(f"http://otel:4318{path}", 1.0, MODEL, "router-0", exporter=noted)
    assert places == ["http://otel:4318/v1/traces"]


def test_whoever_has_no_key_makes_no_spans(tmp_path: Path) -> None:
    (tmp_path / "alice").write_text("sk-alice-0123456789")
    keyring = Keyring(tmp_path, lambda: None)
    keyring.load()

    async def scenario(collector: Collector) -> None:
        async with traced(collector.url, keyring=keyring) as r:
            with pytest.raises(openai.AuthenticationError):
                await ask(r, SAMPLED)
            key = {"authorization": "Bearer sk-alice-0123456789", "x-request-id": "known"}
            await ask(r, SAMPLED | key)
            await asyncio.to_thread(collector.spans, WHOLE)
        assert the_root(collector).attributes["pdcluster.request_id"] == "known"

    with collecting() as collector:
        go(scenario(collector))


def test_spans_that_fail_are_nobodys_trouble(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def record(self, *_: object) -> None:
            raise ValueError("cannot convert float NaN to integer")

    async def scenario() -> None:
        async with rig(spans=Broken()) as r:
            r.sessions.script = says(r.tokens("abc"))
            assert (await ask(r, {})).usage.completion_tokens == 4
        assert "has no spans" in caplog.text

    go(scenario())


class Stuck(SpanExporter):
    """A collector that takes nothing until it is let."""

    def __init__(self, result: SpanExportResult | None) -> None:
        self.let, self.result = threading.Event(), result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        del spans
        self.let.wait(30)
        if self.result is None:
            raise ValueError("not even an answer")
        return self.result


@pytest.mark.parametrize(
    ("result", "sent"),
    [(SpanExportResult.SUCCESS, 10), (SpanExportResult.FAILURE, 0), (None, 0)],
)
def test_what_becomes_of_spans_is_counted(
    result: SpanExportResult | None, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that wait for the collector, and of those that there are too many of."""
    for name, value in (("MAX_QUEUE_SIZE", 8), ("MAX_EXPORT_BATCH_SIZE", 2)):
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    metrics, exporter = Metrics(MODEL), Stuck(result)

    def counted() -> list[float | None]:
        labels = [{"model": MODEL, "result": one} for one in (tracing.SENT, tracing.LOST)]
        name = "pdcluster_router_trace_spans_total"
        return [metrics.registry.get_sample_value(name, one) for one in labels]

    processor = tracing.Counted(exporter, metrics.spans)
    assert counted() == [0, 0]
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    for number in range(15):
        tracer.start_span("one").end()
        if number == 1:  # a batch, which the exporter now has
            until(lambda: processor._waiting == 0)
    assert counted() == [0, 5]
    exporter.let.set()
    processor.shutdown()
    assert counted() == [sent, 15 - sent]


def until(true: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < 20
        time.sleep(0.01)


def test_a_collector_that_is_not_there_is_counted() -> None:
    lost: list[int] = []

    def told(result: str, spans: int) -> None:
        if result == tracing.LOST:
            lost.append(spans)

    async def scenario() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        made = Tracing(url, 1.0, MODEL, "router-0", told, soon_given_up, SimpleSpanProcessor)
        async with rig(spans=made) as r:
            r.sessions.script = says(r.tokens("abc"))
            await ask(r, {})
        await made.close()
        assert sum(lost) > 1

    go(scenario())


def test_no_collector_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be sent is given up, within a bound, when the router ends."""
    monkeypatch.setattr(tracing, "CLOSE_S", 0.2)

    async def scenario() -> None:
        made = Tracing(f"http://127.0.0.1:{free_port()}", 1.0, MODEL, "router-0")
        async with rig(spans=made) as r:
            r.sessions.script = says(r.tokens("abc"))
            for _ in range(3):
                assert (await ask(r, {})).usage.completion_tokens == 4
        began = time.monotonic()
        await made.close()
        assert time.monotonic() - began < tracing.CLOSE_S + 2

    go(scenario())
