"""The operator's flags."""

import argparse
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_operator import rendering
from pd_operator.leadership import Terms
from pd_operator.podparts import Settings
from pd_operator.reconcile import RESYNC_S
from pd_operator.service import RUNNERS, Options

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Flags:
    """Everything that the process is started with. Port 0: any free one."""

    options: Options
    kubeconfig: str
    host: str
    metrics_port: int
    health_port: int
    log_level: str


def parse(arguments: Sequence[str] | None = None) -> Flags:
    """Ends the process with a message when they make no sense."""
    found = _parser().parse_args(arguments)
    lease_namespace = found.lease_namespace or found.namespace or _own_namespace()
    try:
        terms = Terms(duration_s=found.lease_duration_s, deadline_s=found.lease_deadline_s)
    except ValueError as error:
        raise SystemExit(f"pd_operator: {error}") from None
    options = Options(
        identity=found.identity or f"{socket.gethostname()}_{uuid.uuid4()}",
        namespace=found.namespace,
        lease_namespace=lease_namespace,
        lease_name=found.lease_name,
        terms=terms,
        resync_s=found.resync_s,
        runners=found.runners,
        settings=_settings(found),
        record_scaling=found.record_scaling,
    )
    return Flags(
        options, found.kubeconfig, found.host, found.metrics_port, found.health_port,
        found.log_level.upper(),
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pd_operator",
        description="Turns PDClusters into StatefulSets, a router and their surroundings.",
        allow_abbrev=False,
    )
    scope = parser.add_mutually_exclusive_group(required=True)
    scope.add_argument("--namespace", default="", help="look after this namespace only")
    scope.add_argument("--cluster-wide", action="store_true", help="look after every namespace")
    parser.add_argument("--engine-image", default="", help="of workers that name none")
    parser.add_argument("--router-image", default="", help="of routers that name none")
    parser.add_argument("--rendering", default="{}", help="JSON: policies, monitors (the chart's)")
    parser.add_argument("--kubeconfig", default="", help="instead of $KUBECONFIG or the pod's own")
    parser.add_argument("--host", default="0.0.0.0", help="where metrics and health are served")
    parser.add_argument("--metrics-port", type=_port, default=9090)
    parser.add_argument("--health-port", type=_port, default=8081)
    parser.add_argument("--lease-name", default="pdcluster-operator")
    parser.add_argument("--lease-namespace", default="", help="without it: where the operator is")
    parser.add_argument("--lease-duration-s", type=_seconds, default=Terms().duration_s)
    parser.add_argument("--lease-deadline-s", type=_seconds, default=Terms().deadline_s)
    parser.add_argument("--identity", default="", help="the holder's name in the lease")
    parser.add_argument("--resync-s", type=_seconds, default=RESYNC_S, help="look at all again")
    parser.add_argument("--runners", type=_count, default=RUNNERS, help="PDClusters at a time")
    levels = ("debug", "info", "warning", "error")
    parser.add_argument("--record-scaling", default="", help="a file for what sizes come from")
    parser.add_argument("--log-level", choices=levels, default="info")
    return parser


def _settings(found: argparse.Namespace) -> Settings:
    defaults = Settings()
    base = Settings(
        engine_image=found.engine_image or defaults.engine_image,
        router_image=found.router_image or defaults.router_image,
        host_paths=False,  # `restricted` pods can't mount them
        transports=("auto", "tcp", "nixl"),  # pods share no memory
        certificates=False,  # without a word that it may
        tokens=False,
    )
    try:
        return rendering.parse(found.rendering, base)
    except rendering.InvalidRendering as error:
        raise SystemExit(f"pd_operator: --rendering: {error}") from None


def _own_namespace() -> str:
    """Of the pod that this is, if it is one."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return os.environ.get("POD_NAMESPACE", "default")


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 65536:
        raise ValueError(text)
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise ValueError(text)
    return count
