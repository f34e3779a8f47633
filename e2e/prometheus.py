"""A real Prometheus (Debian's) that watches PDClusters of a real cluster by their own objects:
PodMonitors say what is scraped, PrometheusRules what is alerted on.

It asks pods through the API server, as whoever is outside of the cluster's network must. Tests
can't wait for hours: in the rules all spans of time are `SPEED` times shorter.
"""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import packages
from e2e.cluster.api import Manifest
from e2e.site import Site
from tests.cluster import http_get
from tests.ports import free_port

PROGRAM = "/usr/bin/prometheus"
MONITORING = "monitoring.coreos.com/v1"
SPEED = 20
SCRAPE_S = 1
DEADLINE_S = 60.0
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


class Prometheus:
    """It runs on this machine; `alerts` is what it says."""

    def __init__(self, port: int) -> None:
        self._port = port

    def until(self, true: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        ends = time.monotonic() + deadline_s
        while time.monotonic() < ends:
            try:
                if true():
                    return
            except (OSError, LookupError):
                pass
            time.sleep(0.3)
        raise AssertionError(f"not within {deadline_s:g} s: {what}")

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def fired(self, seconds: float) -> set[str]:
        """Those that fired at any time in the last so many seconds."""
        query = f'max_over_time(ALERTS%7Balertstate="firing"%7D[{int(seconds) + 1}s])'
        found = self.get(f"/api/v1/query?query={query}")["result"]
        return {one["metric"]["alertname"] for one in found}

    def up(self) -> int:
        """How many targets answer."""
        return len(self.get("/api/v1/query?query=up==1")["result"])

    def get(self, path: str) -> Any:
        status, body = http_get(f"http://127.0.0.1:{self._port}{path}")
        if status != 200:
            raise LookupError(body)
        return json.loads(body)["data"]


@contextmanager
def watching(site: Site, namespace: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus over all that the namespace's PodMonitors and PrometheusRules name."""
    packages.need({PROGRAM: "prometheus"})
    monitors = site.api.items(MONITORING, "PodMonitor", namespace)
    rules = [
        {**group, "interval": f"{SCRAPE_S}s", "rules": hastened(group["rules"])}
        for one in site.api.items(MONITORING, "PrometheusRule", namespace)
        for group in one["spec"]["groups"]
    ]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rules}))
    scrapes = [scrape for one in monitors for scrape in _scrapes(site, one)]
    times = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": scrapes}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        PROGRAM,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        found = Prometheus(port)
        found.until(lambda: http_get(f"http://127.0.0.1:{port}/-/ready")[0] == 200, "it is ready")
        yield found
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _scrapes(site: Site, monitor: Manifest) -> Iterator[dict[str, Any]]:
    """What Prometheus' operator makes of a PodMonitor, for the pods that are there now (Debian's
    Prometheus finds none itself); by the API server's proxy, which knows them by name."""
    namespace, spec = monitor["metadata"]["namespace"], monitor["spec"]
    proxy = {"apiGroups": [""], "resources": ["pods/proxy"], "verbs": ["get"]}
    kubeconfig = site.kube.service_account(namespace, "prometheus", rules=[proxy])
    user = yaml.safe_load(kubeconfig.read_text())
    server = user["clusters"][0]["cluster"]["server"].removeprefix("https://")
    selector = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
    targets = [
        {"targets": [server], "labels": _labels(spec, pod, port, endpoint["path"])}
        for pod in site.api.items("v1", "Pod", namespace, selector)
        for endpoint in spec["podMetricsEndpoints"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", ())
        if port["name"] == endpoint["port"]
    ]
    yield {
        "job_name": monitor["metadata"]["name"],
        "scheme": "https",
        "tls_config": {"insecure_skip_verify": True},  # on loopback, and ours
        "authorization": {"credentials": user["users"][0]["user"]["token"]},
        "static_configs": targets,
    }


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
