"""PURE. What is recorded of a PDCluster's promises, and what wakes whom.

A promise (`spec.slo`) is a share of requests within a time; what is left of it is the
budget of late ones. Alerts on it ask how fast that budget goes, over a long and a short
window at once: the long one tells that it matters, the short one that it goes on.
"""

from collections.abc import Iterator
from typing import Any

from pd_core import buckets
from pd_operator.api import Cluster, Target

CLUSTER_LABEL = "pdcluster_dev_cluster"
"""As Prometheus' operator makes it of the pods' label."""
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
_FAST = ((14.4, "1h", "5m"), (6.0, "6h", "30m"))
_SLOW = ((3.0, "1d", "2h"), (1.0, "3d", "6h"))
_FEWEST_REQUESTS = 20
_NAMES = {"ttft": "the time to the first token", "tpot": "the time per token"}
Rule = dict[str, Any]


def groups(cluster: Cluster, runbooks: str = "") -> list[dict[str, Any]]:
    """The rules of one PDCluster. `runbooks`: the URL below which their pages are."""
    made = _Maker(cluster, runbooks)
    name = f"pdcluster-{cluster.name}"
    found = [
        {"name": f"{name}.promises", "rules": list(made.promises())},
        {"name": f"{name}.alerts", "rules": list(made.alerts())},
    ]
    return [group for group in found if group["rules"]]


class _Maker:
    def __init__(self, cluster: Cluster, runbooks: str) -> None:
        self._cluster = cluster
        self._runbooks = runbooks
        self._of = f'namespace="{cluster.namespace}",{CLUSTER_LABEL}="{cluster.name}"'
        self._labels = {"namespace": cluster.namespace, "pdcluster": cluster.name}
        self._slo = {"ttft": cluster.slo.ttft, "tpot": cluster.slo.tpot}

    # ---- promises -----------------------------------------------------------------

    def promises(self) -> Iterator[Rule]:
        for metric, target in self._slo.items():
            if target is not None:
                of = {**self._labels, "slo": metric}
                yield _record("pdcluster:slo:target_seconds", f"vector({target.target_s:g})", of)
                objective = f"vector({target.percentile / 100:g})"
                yield _record("pdcluster:slo:objective", objective, of)
                for window in WINDOWS:
                    expression = self._late(metric, target, window)
                    yield _record(_ratio(metric, window), expression, self._labels)

    def _late(self, metric: str, target: Target, window: str) -> str:
        """The share of requests beyond the target; nothing where there are none."""
        name = f"pdcluster_router_{metric}_seconds"
        counts = [
            f'{share:g} * sum(rate({name}_bucket{{{self._of},le="{bound}"}}[{window}]))'
            for share, bound in buckets.shares(target.target_s)
        ]
        return f"1 - ({' + '.join(counts)}) / sum(rate({name}_count{{{self._of}}}[{window}]))"

    # ---- alerts ---------------------------------------------------------------------

    def alerts(self) -> Iterator[Rule]:
        yield self._no_workers()
        yield from self._requests()
        for metric, target in self._slo.items():
            if target is not None:
                yield from self._burns(metric, target)
        yield from self._workers()

    def _no_workers(self) -> Rule:
        ready = f"max({self._router('ready')}) == 0"
        if all(pool.replicas == 0 for pool in self._cluster.pools):
            # Nothing runs on purpose: only somebody who waits makes it a problem.
            ready += f" and sum({self._router('held_requests')}) > 0"
        return self._alert("PDClusterNoWorkers", ready, "5m", "critical", "no usable workers")

    def _requests(self) -> Iterator[Rule]:
        served = f"sum(rate({self._router('requests_total')}[5m]))"
        for name, status, limit, severity, text in (
            ("PDClusterRequestsFail", '5..', 0.05, "critical", "more than 5% of the requests fail"),
            ("PDClusterRequestsRefused", '429', 0.1, "warning",
             "more than 10% of the requests are refused: there is too little room for them"),
        ):  # fmt: skip
            wrong = f"sum(rate({self._router('requests_total', status=status)}[5m]))"
            yield self._alert(name, f"{wrong} / {served} > {limit}", "10m", severity, text)
        retries = f"sum(increase({self._router('retries_total')}[10m]))"
        requests = f"sum(increase({self._router('requests_total')}[10m]))"
        yield self._alert(
            "PDClusterRetriesFrequent", f"{retries} > 5 and {retries} / {requests} > 0.05",
            "10m", "warning", "more than 5% of the requests had to begin again elsewhere",
        )  # fmt: skip

    def _burns(self, metric: str, target: Target) -> Iterator[Rule]:
        budget = 1 - target.percentile / 100
        name = metric.upper()
        promised = f"{target.percentile:g}% within {target.target_s:g} s"
        count = f"pdcluster_router_{metric}_seconds_count{{{self._of}}}"
        for speed, windows, lasting, severity in (
            ("Fast", _FAST, "2m", "critical"),
            ("Slowly", _SLOW, "15m", "warning"),
        ):
            burning = " or ".join(self._burning(metric, budget, *one) for one in windows)
            enough = f"sum(increase({count}[{windows[0][1]}])) >= {_FEWEST_REQUESTS}"
            yield self._alert(
                f"PDCluster{name}Burns{speed}", f"({burning}) and on () ({enough})", lasting,
                severity, f"{_NAMES[metric]} ({promised}) is missed too often",
            )  # fmt: skip

    def _burning(self, metric: str, budget: float, factor: float, long: str, short: str) -> str:
        # A wide budget can't be overspent so many times: then half of what is left decides.
        limit = min(factor * budget, (1 + budget) / 2)
        both = [f"{self._ratio(metric, window)} > {limit:g}" for window in (long, short)]
        return f"({' and '.join(both)})"

    def _workers(self) -> Iterator[Rule]:
        # Each router sees all workers: that of most is right, others may have started since.
        lost = f"max(sum by (instance) (increase({self._router('workers_lost_total')}[30m])))"
        yield self._alert(
            "PDClusterWorkersLost", f"{lost} > 2", "1m", "warning",
            "workers end unasked, again and again",
        )  # fmt: skip
        # Whoever waits may need more than what is free, so how much that is doesn't matter.
        waiting = f"min_over_time(sum({self._engine('waiting_grants')})[5m:])"
        yield self._alert(
            "PDClusterKVFull", f"{waiting} > 0", "10m", "warning",
            "requests wait for room in decode's KV all the time",
        )  # fmt: skip
        if len(self._cluster.pools) > 1:
            exposed = f"sum(rate({self._router('transfer_exposed_seconds_sum')}[10m]))"
            first = f"sum(rate({self._router('ttft_seconds_sum')}[10m]))"
            yield self._alert(
                "PDClusterHandOversSlow", f"{exposed} / {first} > 0.3", "15m", "warning",
                "answers pause after their first token, until their KV has come",
            )  # fmt: skip

    # ---- words ------------------------------------------------------------------------

    def _router(self, name: str, **labels: str) -> str:
        more = "".join(f',{key}=~"{value}"' for key, value in labels.items())
        return f"pdcluster_router_{name}{{{self._of}{more}}}"

    def _engine(self, name: str, **labels: str) -> str:
        """Of workers that decode."""
        more = "".join(f',{key}=~"{value}"' for key, value in labels.items())
        return f'pdcluster_engine_{name}{{{self._of},pool!="prefill"{more}}}'

    def _ratio(self, metric: str, window: str) -> str:
        own = ",".join(f'{name}="{value}"' for name, value in self._labels.items())
        return f"{_ratio(metric, window)}{{{own}}}"

    def _alert(self, name: str, expression: str, lasting: str, severity: str, text: str) -> Rule:
        summary = f"{self._cluster.namespace}/{self._cluster.name}: {text}"
        return alert(name, expression, lasting, severity, summary, self._runbooks, self._labels)


def operator_groups(runbooks: str = "") -> list[dict[str, Any]]:
    """The rules about the operator itself, which the chart installs."""
    looks = "pdcluster_operator_reconcile_seconds_count"
    waiting = "min_over_time(sum(pdcluster_operator_queue_depth)[10m:])"
    failed = f'sum(rate({looks}{{result!~"ok|conflict"}}[10m]))'
    whose = "{{ $labels.pdcluster_namespace }}/{{ $labels.pdcluster }}"
    rules = [
        alert("PDClusterPoolShort", _short_pools(), "15m", "warning",
              f"{whose}: its pool {{{{ $labels.role }}}} is short of workers most of the time",
              runbooks, {"namespace": "{{ $labels.pdcluster_namespace }}"}),
        alert("PDClusterOperatorAway",
              "absent(pdcluster_operator_lease_held) or sum(pdcluster_operator_lease_held) == 0",
              "10m", "critical",
              "no operator is at work: PDClusters serve on, but nothing is scaled or repaired",
              runbooks),
        alert("PDClusterOperatorUnready", "min(pdcluster_operator_ready) == 0", "15m", "warning",
              "an operator doesn't hear of all objects, or comes too late to them", runbooks),
        alert("PDClusterOperatorBehind", f"{waiting} > 20", "10m", "warning",
              "more than 20 PDClusters wait for the operator all the time", runbooks),
        alert("PDClusterReconcilesFail", f"{failed} / sum(rate({looks}[10m])) > 0.2", "15m",
              "warning", "more than a fifth of the operator's looks at PDClusters fail", runbooks),
        alert("PDClusterCertificatesEnd", "max(pdcluster_operator_certificate_age_share) > 0.9",
              "1h", "critical", "a certificate of a PDCluster should have been renewed long ago:"
              " without it no new connections are made between its pods", runbooks),
    ]  # fmt: skip
    return [{"name": "pdcluster-operator", "rules": rules}]


def _short_pools() -> str:
    """Most of the time, since a worker that dies again and again is ready in between."""
    counts = [
        "max by (pdcluster_namespace, pdcluster, role)"
        f' (pdcluster_operator_pool_replicas{{state="{state}"}})'
        for state in ("desired", "ready")
    ]
    return f"quantile_over_time(0.5, ({' - '.join(counts)})[15m:]) > 0"


def alert(
    name: str,
    expression: str,
    lasting: str,
    severity: str,
    summary: str,
    runbooks: str,
    labels: dict[str, str] | None = None,
) -> Rule:
    page = f"docs/runbooks/{name}.md"
    where = {"runbook_url": f"{runbooks.rstrip('/')}/{name}.md"} if runbooks else {}
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity, **(labels or {})},
        "annotations": {"summary": summary, "runbook": page, **where},
    }


def _ratio(metric: str, window: str) -> str:
    return f"pdcluster:{metric}_late:ratio_rate{window}"


def _record(name: str, expression: str, labels: dict[str, str]) -> Rule:
    return {"record": name, "expr": expression, "labels": labels}
