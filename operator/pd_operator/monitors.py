"""PURE. What Prometheus's operator is told: what to scrape, and when to alert.

Where its resources aren't there, nobody applies these.
"""

from pd_operator import alerts
from pd_operator.api import Cluster
from pd_operator.manifests import (
    CLUSTER_LABEL,
    ROLE_LABEL,
    owned,
    selector,
)
from pd_operator.podparts import Manifest, Settings

_VERSION = "monitoring.coreos.com/v1"


def monitors(cluster: Cluster, settings: Settings) -> list[Manifest]:
    if not settings.monitors:
        return []
    labels = {**settings.monitor_labels, **selector(cluster)}
    wanted: dict[str, Manifest] = {}
    if settings.pod_monitor:
        wanted["PodMonitor"] = _scrapes(cluster)
    if settings.rules:
        wanted["PrometheusRule"] = {"groups": alerts.groups(cluster, settings.runbooks)}
    return [
        owned(cluster, _VERSION, kind, cluster.name, labels, {"spec": spec})
        for kind, spec in wanted.items()
    ]


def _scrapes(cluster: Cluster) -> Manifest:
    """A pod has one of the two ports: routers admin, workers health."""
    return {
        "selector": {"matchLabels": {CLUSTER_LABEL: cluster.name}},
        "podTargetLabels": [CLUSTER_LABEL, ROLE_LABEL],
        "podMetricsEndpoints": [
            {"port": port, "path": "/metrics", "interval": "15s"} for port in ("admin", "health")
        ],
    }
