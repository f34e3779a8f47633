"""A worker's settings: flags in, one frozen value out."""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_core.identity import Identity, Part, parse_cluster

ROLES = ("prefill", "decode", "both")
TRANSPORTS = ("auto", "tcp", "shm", "nixl")
QUANTIZATIONS = ("none", "int8", "int4")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `python -m pd_engine` was told. Ports are bound on `host`."""

    role: str
    model: str
    served_name: str
    worker_name: str
    revision: str
    host: str
    work_port: int
    kv_port: int
    health_port: int
    routers: tuple[str, ...]
    dtype: str
    max_model_tokens: int
    block_tokens: int
    chunk_tokens: int
    max_batch_tokens: int
    max_running: int
    max_queued: int
    kv_cache_tokens: int
    kv_cache_fraction: float
    drain_timeout_s: float
    step_timeout_s: float
    max_step_s: float
    draft_tokens: int
    threads: int
    kv_lease_s: float
    kv_transport: str = "auto"
    kv_quantization: str = "none"
    kv_rate_limit: float = 0.0
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_folder: str = ""
    kv_ttl_s: float = math.inf
    kv_idle_share: float = 1.0
    tls_dir: Path | None = None
    tls_cluster: Identity | None = None
    token_file: Path | None = None
    log_steps: bool = False
    draft_model: str = ""

    @property
    def imports(self) -> bool:
        """Whether it takes KV over from prefill workers."""
        return self.role != "prefill"


def _at_least(low: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {low}")
        return value

    return integer


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must lie between 0 and 1")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must lie between 0 and 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: must be a positive number of seconds")
    return value


def _routers(text: str) -> tuple[str, ...]:
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        if not re.fullmatch(r".+:\d{1,5}", address):
            raise argparse.ArgumentTypeError(f"{address!r}: write HOST:PORT")
    return addresses


def _cluster(text: str) -> Identity:
    try:
        return parse_cluster(text, Part.WORKER)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(argv: Sequence[str]) -> Settings:
    """Flags -> Settings; argparse ends the process with a message for wrong ones."""
    p = argparse.ArgumentParser(prog="python -m pd_engine", description=__doc__)
    p.add_argument("--role", choices=ROLES, required=True)
    p.add_argument("--model", required=True, help="folder with a model in Hugging Face format")
    p.add_argument("--served-name", required=True, help="the model's name as clients send it")
    p.add_argument("--worker-name", required=True, help="this worker's name, e.g. the pod's")
    p.add_argument("--revision", default="", help="revision of the pool")
    p.add_argument("--host", required=True, help="address to bind and to announce")
    p.add_argument("--work-port", type=_at_least(0), default=7001)
    p.add_argument("--kv-port", type=_at_least(0), default=7002)
    p.add_argument("--health-port", type=_at_least(0), default=9090)
    p.add_argument("--routers", type=_routers, default=(), help="HOST:PORT,… of control ports")
    p.add_argument("--dtype", choices=DTYPES, default="auto")
    p.add_argument(
        "--max-model-len",
        dest="max_model_tokens",
        type=_at_least(0),
        default=0,
        help="tokens that a request may have, prompt and output (0: the model's own limit)",
    )
    p.add_argument("--block-tokens", type=_at_least(1), default=16)
    p.add_argument(
        "--chunk-tokens",
        type=_at_least(0),
        default=512,
        help="prompt tokens computed in one step (0: whole prompts)",
    )
    p.add_argument("--max-batch-tokens", type=_at_least(1), default=2048)
    p.add_argument("--max-running", type=_at_least(1), default=64)
    p.add_argument("--max-queued", type=_at_least(1), default=256)
    size = p.add_mutually_exclusive_group()
    size.add_argument("--kv-cache-tokens", type=_at_least(1), default=0)
    size.add_argument(
        "--kv-cache-fraction",
        type=_fraction,
        default=0.2,
        help="share of the memory that is free at start",
    )
    p.add_argument("--drain-timeout-s", type=_seconds, default=60.0)
    p.add_argument(
        "--step-timeout-s",
        type=_seconds,
        default=300.0,
        help="a step that takes longer turns liveness red",
    )
    p.add_argument(
        "--max-step-s",
        type=_seconds,
        default=0.5,
        help="a step takes no more of the prompts than it computes in this time",
    )
    p.add_argument(
        "--draft-tokens",
        type=_at_least(0),
        default=8,
        help="guesses of next tokens that a step may try for one sequence (0: none)",
    )
    p.add_argument(
        "--draft-model",
        default="",
        metavar="FOLDER",
        help="a small model with the same tokenizer that guesses too (none: only what stands in"
        " a request already is guessed)",
    )
    p.add_argument("--threads", type=_at_least(0), default=0, help="0: torch's default")
    p.add_argument(
        "--kv-transport",
        choices=TRANSPORTS,
        default="auto",
        help="auto: shared memory where all workers are on this machine, else nixl where there"
        " is RDMA and no TLS, else tcp; nixl needs the package nixl-cu13",
    )
    p.add_argument(
        "--kv-quantization",
        choices=QUANTIZATIONS,
        default="none",
        help="of KV that goes over a network; shared memory carries it as it is",
    )
    p.add_argument(
        "--kv-rate-limit",
        type=float,
        default=0.0,
        help="bytes a second that all KV sent from here may take (0: as fast as it goes)",
    )
    p.add_argument(
        "--kv-host-bytes",
        type=_at_least(0),
        default=0,
        help="host memory for KV that the pool has no room for (0: none)",
    )
    p.add_argument(
        "--kv-disk-bytes",
        type=_at_least(0),
        default=0,
        help="disk for KV that leaves host memory, in --kv-disk-folder (0: none)",
    )
    p.add_argument("--kv-disk-folder", default="", help="a folder that no other worker has")
    p.add_argument(
        "--kv-ttl-s",
        type=_seconds,
        default=math.inf,
        help="KV that nobody used for so long is dropped, wherever it is",
    )
    p.add_argument(
        "--kv-idle-share",
        type=_share,
        default=1.0,
        help="most of the pool that may be prefixes which nobody uses now",
    )
    p.add_argument("--kv-lease-s", type=_seconds, default=30.0)
    p.add_argument(
        "--tls-dir",
        type=Path,
        help="folder with ca.crt, tls.crt and tls.key: TLS to and from all peers",
    )
    p.add_argument(
        "--tls-cluster",
        type=_cluster,
        metavar="NAMESPACE/NAME",
        help="the PDCluster whose routers and workers are let in",
    )
    p.add_argument(
        "--token-file",
        type=Path,
        help="a token a line: the first is proven to all peers, any is taken from them",
    )
    p.add_argument(
        "--log-steps",
        action="store_true",
        default=os.environ.get("PD_LOG_STEPS", "") == "1",
        help="log what each step computes, and how long it took (also PD_LOG_STEPS=1)",
    )
    given = Settings(**vars(p.parse_args(argv)))
    if given.kv_disk_bytes and not (given.kv_disk_folder and given.kv_host_bytes):
        p.error("--kv-disk-bytes: needs --kv-disk-folder, and --kv-host-bytes to go through")
    if given.kv_quantization != "none" and given.kv_transport == "nixl":
        p.error("--kv-quantization: nixl carries KV as it is; leave it out, or take tcp")
    if given.draft_model and not given.draft_tokens:
        p.error("--draft-model: nothing is guessed with --draft-tokens 0; leave one of them out")
    if (given.tls_dir is None) != (given.tls_cluster is None):
        p.error("--tls-dir and --tls-cluster go together")
    return given
