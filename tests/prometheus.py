"""A real Prometheus (Debian's) on this machine, over targets that a test names."""

import json
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import packages
from tests.cluster import http_get
from tests.ports import free_port

PROGRAM, PROMTOOL = "/usr/bin/prometheus", "/usr/bin/promtool"
SCRAPE_S = 1
DEADLINE_S = 60.0


def need_programs() -> None:
    packages.need({PROGRAM: "prometheus", PROMTOOL: "prometheus"})


class Prometheus:
    """What it says."""

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
            time.sleep(0.2)
        raise AssertionError(f"not within {deadline_s:g} s: {what}")

    def ready(self) -> bool:
        return http_get(self._url("/-/ready"))[0] == 200

    def up(self) -> int:
        """How many targets answer."""
        return len(self.query("up == 1"))

    def query(self, expression: str) -> list[Any]:
        """Its vector; AssertionError with what is wrong with the query."""
        text = urllib.parse.quote(expression)
        status, body = http_get(self._url(f"/api/v1/query?query={text}"))
        assert status == 200, body
        found: list[Any] = json.loads(body)["data"]["result"]
        return found

    def label_values(self, label: str, selector: str) -> set[str]:
        """As Grafana asks for a variable's choices."""
        match = urllib.parse.quote(selector)
        return set(self.get(f"/api/v1/label/{label}/values?match[]={match}"))

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def fired(self, seconds: float) -> set[str]:
        """Those that fired at any time in the last so many seconds."""
        found = self.query(f'max_over_time(ALERTS{{alertstate="firing"}}[{int(seconds) + 1}s])')
        return {one["metric"]["alertname"] for one in found}

    def get(self, path: str) -> Any:
        status, body = http_get(self._url(path))
        if status != 200:
            raise LookupError(body)
        return json.loads(body)["data"]

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"


@contextmanager
def running(
    folder: Path, scrapes: Sequence[dict[str, Any]], groups: Sequence[dict[str, Any]]
) -> Iterator[Prometheus]:
    """Over these scrape configurations and groups of rules, each looked at every second."""
    need_programs()
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": list(groups)}))
    times = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = {"global": times, "rule_files": ["rules.yaml"], "scrape_configs": list(scrapes)}
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
        found.until(found.ready, "it is ready")
        yield found
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
