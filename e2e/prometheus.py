"""A real Prometheus (Debian's) that watches PDClusters of a real cluster by their own objects:
PodMonitors say what is scraped, PrometheusRules what is alerted on.

It asks pods through the API server, as whoever is outside of the cluster's network must. Tests
can't wait for hours: in the rules all spans of time are `SPEED` times shorter.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.api import Manifest
from e2e.site import Site
from tests.prometheus import Prometheus, running

MONITORING = "monitoring.coreos.com/v1"
SPEED = 20
_WINDOW = re.compile(r"\[[^]]+\]")
_SPAN = re.compile(r"\b(\d+)([smhd])\b")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def hastened(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules with every window and every `for` so many times shorter."""

    made = []
    for rule in rules:
        windows = _WINDOW.sub(lambda one: _shorter(one[0]), rule["expr"])
        lasting = {"for": _shorter(rule["for"])} if "for" in rule else {}
        made.append({**rule, "expr": windows, **lasting})
    return made


def _shorter(text: str) -> str:
    def one(found: "re.Match[str]") -> str:
        return f"{max(1, int(found[1]) * _SECONDS[found[2]] // SPEED)}s"

    return _SPAN.sub(one, text)


@contextmanager
def watching(site: Site, namespace: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus over all that the namespace's PodMonitors and PrometheusRules name."""
    monitors = site.api.items(MONITORING, "PodMonitor", namespace)
    groups = [
        {**group, "rules": hastened(group["rules"])}
        for one in site.api.items(MONITORING, "PrometheusRule", namespace)
        for group in one["spec"]["groups"]
    ]
    scrapes = [_scrape(site, one, folder) for one in monitors]
    with running(folder, scrapes, groups) as found:
        yield found


def follow(site: Site, namespace: str, folder: Path) -> None:
    """The pods that are there now are what is scraped from now on."""
    for one in site.api.items(MONITORING, "PodMonitor", namespace):
        _write_targets(site, one, folder)


def _scrape(site: Site, monitor: Manifest, folder: Path) -> dict[str, Any]:
    """What Prometheus' operator makes of a PodMonitor, for the pods that are in its file (Debian's
    Prometheus finds none itself); by the API server's proxy, which knows them by name."""
    namespace = monitor["metadata"]["namespace"]
    proxy = {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}
    kubeconfig = site.kube.service_account(namespace, "prometheus", rules=[proxy])
    user = yaml.safe_load(kubeconfig.read_text())
    file = _write_targets(site, monitor, folder)
    return {
        "job_name": monitor["metadata"]["name"],
        "scheme": "https",
        "tls_config": {"insecure_skip_verify": True},  # on loopback, and ours
        "authorization": {"credentials": user["users"][0]["user"]["token"]},
        "file_sd_configs": [{"files": [str(file)]}],
    }


def _write_targets(site: Site, monitor: Manifest, folder: Path) -> Path:
    """Where the targets of a PodMonitor stand, at the API server's proxy."""
    namespace, spec = monitor["metadata"]["namespace"], monitor["spec"]
    admin = yaml.safe_load(site.kube.kubeconfig.read_text())
    server = admin["clusters"][0]["cluster"]["server"].removeprefix("https://")
    selector = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
    targets = [
        {"targets": [server], "labels": _labels(spec, pod, port, endpoint["path"])}
        for pod in site.api.items("v1", "Pod", namespace, selector)
        for endpoint in spec["podMetricsEndpoints"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
        if port["name"] == endpoint["port"]
    ]
    file = folder / f"targets-{monitor['metadata']['name']}.json"
    beside = file.with_suffix(".next")
    beside.write_text(json.dumps(targets))
    return beside.replace(file)


def _labels(spec: Manifest, pod: Manifest, port: Manifest, path: str) -> dict[str, str]:
    about = pod["metadata"]
    asked = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}:{port['containerPort']}"
    own = {name: about["labels"].get(name, "") for name in spec["podTargetLabels"]}
    return {
        "__metrics_path__": f"{asked}/proxy{path}",
        "namespace": about["namespace"],
        "pod": about["name"],
        **{_label(name): value for name, value in own.items()},
    }


def _label(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
