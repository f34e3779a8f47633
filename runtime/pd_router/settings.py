"""The router's flags."""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pd_core.estimate import Link, link
from pd_core.identity import Identity, Part, parse_cluster
from pd_core.policies import POLICIES
from pd_router import classes
from pd_router.classes import NO_PROMISES, Promises
from pd_router.hedging import DEFAULT_SHARE, Hedge
from pd_router.pulls import USUAL
from pd_router.routing import DEFAULT, DISAGGREGATE, Routing

MAX_PROCESSES = 32
LOG_LEVELS = ("debug", "info", "warning", "error")
_PORT_MAX = 65535
_COLLECTOR = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?", re.ASCII)
_MEMBER = re.compile(r"(\d+)/(\d+):(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Member:
    """Which process of a router this one is, and the socket of its admin port."""

    index: int
    count: int
    admin_fd: int


@dataclass(frozen=True)
class Settings:
    """Bytes and seconds."""

    model: str
    router_name: str
    http: Address
    admin: Address
    control: Address
    reuse_port: bool = False
    processes: int = 1
    member: Member | None = None  # None: the router itself
    log_level: str = "info"
    drain_timeout_s: float = 60.0
    request_timeout_s: float = 600.0
    max_body_bytes: int = 8 * 1024 * 1024
    max_requests: int = 4096
    max_queued: int = 4096
    queue_wait_s: float = 30.0
    hold_s: float = 0.0  # 0: without a worker there is nothing to wait for
    routing: Routing = DEFAULT
    promises: Promises = NO_PROMISES
    allow_trace: bool = False
    class_header: bool = False
    api_keys: Path | None = None
    live_page: bool = True
    trace_endpoint: str | None = None  # of an OpenTelemetry collector; None: no spans
    trace_ratio: float = 1.0
    tls_dir: Path | None = None
    tls_cluster: Identity | None = None
    token_file: Path | None = None


def parse(arguments: Sequence[str]) -> Settings:
    """Exits with status 2 and a word on what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m pd_router",
        description="Speaks the OpenAI API to clients and places their requests on workers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="the name that clients send")
    add("--router-name", required=True, metavar="POD")
    add("--http", required=True, type=address, metavar="HOST:PORT", help="the clients' port")
    add("--admin", required=True, type=address, metavar="HOST:PORT", help="metrics and debug")
    add("--control", required=True, type=address, metavar="HOST:PORT", help="the workers' port")
    add("--reuse-port", action="store_true", help="let another process share the clients' port")
    add("--processes", type=_processes, default=Settings.processes, metavar="N",
        help="share the clients' port; the control ports are N from the one given on")  # fmt: skip
    add("--member", type=_member, help=argparse.SUPPRESS)  # what a parent tells its processes
    add(
        "--log-level",
        choices=LOG_LEVELS,
        default=Settings.log_level,
        help="from info on there is a line for each request",
    )
    add("--drain-timeout-s", type=_positive, default=Settings.drain_timeout_s, metavar="S")
    add("--request-timeout-s", type=_positive, default=Settings.request_timeout_s, metavar="S")
    add("--max-body-bytes", type=_count, default=Settings.max_body_bytes, metavar="N")
    add("--max-requests", type=_count, default=Settings.max_requests, metavar="N")
    add("--max-queued", type=_count, default=Settings.max_queued, metavar="N")
    add("--queue-wait-s", type=_positive, default=Settings.queue_wait_s, metavar="S")
    add("--hold-s", type=_positive, default=Settings.hold_s, metavar="S",
        help="so long requests wait for a worker: one is started for them")  # fmt: skip
    _add_routing(parser)
    add("--admission", type=_promises, default=NO_PROMISES, dest="promises", metavar="JSON",
        help='{"classes": [{"name", "priority", "ttft", "tpot", "share"}], "limits": '
        '{"requestsPerMinute", "tokensPerMinute", "burstSeconds"}, "clients": {NAME: {"class", '
        '"limits", "weight"}}, "slo": {"ttft", "tpot"}}; goals in seconds')  # fmt: skip
    add("--class-header", action="store_true", help="clients may name their class of service")
    add("--no-live-page", action="store_false", dest="live_page",
        help="no page for people on the admin port")  # fmt: skip
    add("--allow-trace", action="store_true", help="clients may ask why these workers")
    add("--trace-endpoint", type=_collector, metavar="URL",
        help="requests' spans go there by OTLP over HTTP; such as http://otel:4318")  # fmt: skip
    add("--trace-ratio", type=_ratio, default=Settings.trace_ratio, metavar="SHARE",
        help="of the requests whose client hasn't decided whether they are traced")  # fmt: skip
    add("--api-keys", type=Path, metavar="FOLDER",
        help="a file for each client, a line for each of its keys; else all may ask")  # fmt: skip
    add("--tls-dir", type=Path, metavar="FOLDER",
        help="with ca.crt, tls.crt and tls.key: TLS to and from all workers")  # fmt: skip
    add("--tls-cluster", type=_cluster, metavar="NAMESPACE/NAME",
        help="the PDCluster whose workers are let in")  # fmt: skip
    add("--token-file", type=Path, metavar="FILE",
        help="a token a line: the first is proven to workers, any is taken from them")  # fmt: skip
    given = vars(parser.parse_args(arguments))
    names = ("policy", "disaggregate", "session_kv_limit", "link")
    after, share = given.pop("hedge"), given.pop("hedge_share")
    pulls = USUAL if given.pop("copies") == "auto" else None
    try:
        hedge = Hedge(None if after == "auto" else after, share) if after is not None else None
        routing = Routing(**{name: given.pop(name) for name in names}, pulls=pulls, hedge=hedge)
    except ValueError as error:
        parser.error(str(error))
    settings = Settings(**given, routing=routing)
    if (
        settings.processes > 1
        and not 0 < settings.control.port <= _PORT_MAX + 1 - settings.processes
    ):
        parser.error(f"argument --control: {settings.processes} processes need as many ports")
    if (settings.tls_dir is None) != (settings.tls_cluster is None):
        parser.error("--tls-dir and --tls-cluster go together")
    return settings


def _collector(text: str) -> str:
    if not _COLLECTOR.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no http:// or https:// URL")
    if not _is_there("opentelemetry.exporter.otlp.proto.http"):
        raise argparse.ArgumentTypeError("tracing isn't installed: pip install pdcluster[tracing]")
    return text


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor what it is a part of
        return False


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share between 0 and 1")
    return ratio


def _cluster(text: str) -> Identity:
    try:
        return parse_cluster(text, Part.ROUTER)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_routing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--policy", choices=POLICIES, default=DEFAULT.policy, help="how workers are chosen")
    add("--disaggregate", choices=DISAGGREGATE, default=DEFAULT.disaggregate,
        help="auto: a prompt may be computed where it's decoded, when that is faster")  # fmt: skip
    add("--copies", choices=("auto", "never"), default="auto",
        help="auto: a prompt's beginning is copied between workers, if that is faster")  # fmt: skip
    add("--session-kv-limit", type=_positive, default=DEFAULT.session_kv_limit, metavar="SHARE",
        help="a decode worker whose KV is fuller doesn't keep its sessions")  # fmt: skip
    add("--link", type=_link, default=DEFAULT.link, metavar="NAME|RATE",
        help="between workers, until hand-overs have shown its speed")  # fmt: skip
    add("--hedge", type=_hedge, metavar="S|auto",
        help="a prefill that gives nothing for so long is begun elsewhere, too")  # fmt: skip
    add("--hedge-share", type=_positive, default=DEFAULT_SHARE, metavar="SHARE",
        help="of the requests in flight, so many may have two prefills")  # fmt: skip


def _hedge(text: str) -> float | str:
    return text if text == "auto" else _positive(text)


def _link(text: str) -> Link:
    try:
        return link(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _promises(text: str) -> Promises:
    try:
        return classes.read(json.loads(text))
    except (classes.BadAdmission, json.JSONDecodeError, RecursionError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def address(text: str) -> Address:
    """host:port, with an IPv6 host in brackets."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: give HOST:PORT")
    if int(port) > _PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: a port is at most {_PORT_MAX}")
    return Address(host, int(port))


def _processes(text: str) -> int:
    count = _count(text)
    if count > MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {MAX_PROCESSES} processes")
    return count


def _member(text: str) -> Member:
    found = _MEMBER.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give I/N:FD")
    return Member(*map(int, found.groups()))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of seconds above 0")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return int(text)
