"""What several processes of one router tell, as if it were one.

Counters and histograms add up; of what all of them hear from the same workers, one is right.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from pd_core import sketch
from pd_router.metrics import Metrics
from pd_router.signals import Queued

Document = dict[str, Any]
_OLDEST = "_created"  # of a counter: when it began
_SAME = "pdcluster_router_ready"  # about the workers, so each process says the same
_GATEWAY = "vllm:"


class _Kept(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def metrics(texts: Iterable[str], document: Document) -> bytes:
    """Prometheus' text of all processes; `document` is their merged `/sketches`."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(_GATEWAY):
                families.setdefault(family.name, family)
                known = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    known[key] = _together(sample.name, known.get(key), sample.value)
    merged = []
    for name, family in families.items():
        metric = Metric(name, family.documentation, family.type)
        for (sample_name, labels), value in values[name].items():
            metric.add_sample(sample_name, dict(labels), value)
        merged.append(metric)
    registry = CollectorRegistry()
    registry.register(_Kept([*merged, *_gateway(document)]))
    return generate_latest(registry)


def _together(name: str, known: float | None, value: float) -> float:
    if known is None:
        return value
    if name.endswith(_OLDEST):
        return min(known, value)
    return max(known, value) if name == _SAME else known + value


def _gateway(document: Document) -> list[Metric]:
    """What gateways read, from the workers as whoever heard them last has them."""
    own = Metrics(document["model"])
    own.gateway(document["workers"], Queued(**document["queued"]))
    return [family for family in own.registry.collect() if family.name.startswith(_GATEWAY)]


def sketches(router: str, documents: Sequence[Document]) -> Document:
    """The `/sketches` of all processes; there is at least one. Another process among them is
    to those who read as if the whole had restarted: its counters begin anew."""
    first = documents[0]
    newest: dict[str, Document] = {}
    for worker in (worker for one in documents for worker in one["workers"]):
        known = newest.get(worker["worker"])
        if known is None or worker["heard_s_ago"] < known["heard_s_ago"]:
            newest[worker["worker"]] = worker
    names = "".join(sorted(one["process"] for one in documents))
    merged = {
        "router": router,
        "model": first["model"],
        "clients": first.get("clients"),  # each process follows the same folder
        "process": hashlib.sha256(names.encode()).hexdigest()[:32],
        "uptime_s": min(one["uptime_s"] for one in documents),
        "window_s": first["window_s"],
        "counters": _sums(one["counters"] for one in documents),
        "lengths": _lengths(one["lengths"] for one in documents),
        "queued": _sums(one["queued"] for one in documents),
        "held_requests": sum(one["held_requests"] for one in documents),
        "workers": [newest[name] for name in sorted(newest)],
    }
    for name in first.keys() - merged.keys():  # all others are sketches
        total = sketch.merge(sketch.from_json(one[name]) for one in documents)
        merged[name] = {str(bucket): count for bucket, count in total.items()}
    return merged


def _sums(many: Iterable[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for one in many:
        for name, value in one.items():
            total[name] = total.get(name, 0) + value
    return total


def _lengths(many: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for one in many:
        for which, counts in one.items():
            known = total.get(which, [0] * len(counts))
            total[which] = [a + b for a, b in zip(known, counts, strict=True)]
    return total
