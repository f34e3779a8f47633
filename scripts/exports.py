"""What our programs export to Prometheus: each metric with its kind, labels and words."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry

from pd_engine.metrics import Metrics as EngineMetrics
from pd_operator.kube import Transport
from pd_operator.metrics import Metrics as OperatorMetrics
from pd_operator.service import Operator, Options
from pd_router.histograms import Histogram
from pd_router.metrics import Metrics as RouterMetrics


@dataclass(frozen=True, slots=True)
class Exported:
    """`name` without what a series' name says of its part (`_bucket`, `_total`, …)."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> str:
        """The name as queries begin with it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def exported() -> dict[str, list[Exported]]:
    """By program."""
    operator = OperatorMetrics()
    # Nothing is asked of the API server before the operator runs.
    Operator(cast(Transport, object()), Options(identity="one", namespace="ns"), operator)
    registries = {
        "router": RouterMetrics("m").registry,
        "engine": EngineMetrics("m", "decode", "w").registry,
        "operator": operator.registry,
    }
    found = {program: list(_of(registry)) for program, registry in registries.items()}
    found["operator"] += [Exported(s.name, s.kind, s.labels, s.text) for s in operator.series]
    return {program: sorted(some, key=_name) for program, some in found.items()}


def _name(one: Exported) -> str:
    return one.name


def _of(registry: CollectorRegistry) -> Iterator[Exported]:
    collectors: list[Any] = list(registry._collector_to_names)
    for one in collectors:
        if isinstance(one, Histogram):
            yield Exported(one._name, "histogram", one.labels, one._text)
        else:
            yield Exported(one._name, one._type, tuple(one._labelnames), one._documentation)
