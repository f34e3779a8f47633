"""PURE. What Prometheus's operator is told: what to scrape, and when to alert.

Where its resources aren't there, nobody applies these.
"""

from typing import Any

from pd_operator.api import Cluster, Target
from pd_operator.manifests import (
    CLUSTER_LABEL,
    ROLE_LABEL,
    owned,
    router_name,
    selector,
)
from pd_operator.podparts import Manifest, Settings

_VERSION = "monitoring.coreos.com/v1"
_LABEL = CLUSTER_LABEL.replace(".", "_").replace("/", "_")


def monitors(cluster: Cluster, settings: Settings) -> list[Manifest]:
    if not settings.monitors:
        return []
    labels = {**settings.monitor_labels, **selector(cluster)}
    return [
        owned(cluster, _VERSION, "PodMonitor", cluster.name, labels, {"spec": _scrapes(cluster)}),
        owned(
            cluster, _VERSION, "PrometheusRule", cluster.name, labels,
            {"spec": {"groups": [{"name": router_name(cluster.name), "rules": _rules(cluster)}]}},
        ),
    ]  # fmt: skip


def _scrapes(cluster: Cluster) -> Manifest:
    """A pod has one of the two ports: routers admin, workers health."""
    return {
        "selector": {"matchLabels": {CLUSTER_LABEL: cluster.name}},
        "podTargetLabels": [CLUSTER_LABEL, ROLE_LABEL],
        "podMetricsEndpoints": [
            {"port": port, "path": "/metrics", "interval": "15s"} for port in ("admin", "health")
        ],
    }


def _rules(cluster: Cluster) -> list[Manifest]:
    own = f'namespace="{cluster.namespace}",{_LABEL}="{cluster.name}"'
    ready = f"max(pdcluster_router_ready{{{own}}}) == 0"
    if all(pool.replicas == 0 for pool in cluster.pools):
        # Nothing runs on purpose: only somebody who waits makes it a problem.
        ready += f" and sum(pdcluster_router_held_requests{{{own}}}) > 0"
    failed = f'sum(rate(pdcluster_router_requests_total{{{own},status=~"5.."}}[5m]))'
    served = f"sum(rate(pdcluster_router_requests_total{{{own}}}[5m]))"
    name = f"{cluster.namespace}/{cluster.name}"
    rules = [
        _alert("PDClusterNoWorkers", ready, "5m", "critical", f"{name}: no usable workers"),
        _alert(
            "PDClusterRequestsFail", f"{failed} / {served} > 0.05", "10m", "critical",
            f"{name}: more than 5% of the requests fail",
        ),
    ]  # fmt: skip
    for metric, target in (("ttft", cluster.slo.ttft), ("tpot", cluster.slo.tpot)):
        if target is not None:
            rules.append(_missed(metric, target, own, name))
    return rules


def _missed(metric: str, target: Target, own: str, name: str) -> Manifest:
    buckets = f"sum by (le) (rate(pdcluster_router_{metric}_seconds_bucket{{{own}}}[5m]))"
    quantile = f"histogram_quantile({target.percentile / 100:g}, {buckets})"
    text = f"{name}: p{target.percentile:g} {metric.upper()} misses its target"
    return _alert(
        f"PDCluster{metric.upper()}Missed", f"{quantile} > {target.target_s:g}", "15m",
        "warning", text,
    )  # fmt: skip


def _alert(name: str, expression: str, lasting: str, severity: str, text: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": text},
    }
