"""PURE. The pod templates of workers and routers."""

import hashlib
import json
import math

from pd_operator import podparts
from pd_operator.api import GROUP, Cluster, Pool, Role
from pd_operator.modelfiles import model_files
from pd_operator.podparts import SCRATCH_MOUNTS, SCRATCH_VOLUMES, Manifest, Settings

HTTP_PORT = 8000
ADMIN_PORT = 9090
CONTROL_PORT = 7000
WORK_PORT = 7001
KV_PORT = 7002
HEALTH_PORT = 9090
WORKER_PORTS = {"work": WORK_PORT, "kv": KV_PORT, "health": HEALTH_PORT}
ROUTER_PORTS = {"http": HTTP_PORT, "admin": ADMIN_PORT, "control": CONTROL_PORT}

CLUSTER_LABEL = f"{GROUP}/cluster"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
ROUTER = "router"

HTTP_BIND_ENV = "PD_HTTP_BIND"
GRACE_MARGIN_S = 15
"""How much longer than the drain a pod may take to end: closing sockets, freeing memory."""
ROUTER_PRESTOP_S = 5
"""How long a router goes on after it left the Service, until every node has noticed."""
STARTUP_S = 1800


def control_name(cluster: str) -> str:
    """The headless Service behind which the routers' control ports are."""
    return f"{cluster}-control"


def selector(cluster: Cluster, component: str = "") -> dict[str, str]:
    """Labels of everything of a cluster, or of one of its components."""
    labels = {
        "app.kubernetes.io/name": "pdcluster",
        "app.kubernetes.io/instance": cluster.name,
        "app.kubernetes.io/managed-by": "pdcluster-operator",
        CLUSTER_LABEL: cluster.name,
    }
    if component:
        labels |= {"app.kubernetes.io/component": component, ROLE_LABEL: component}
    return labels


def worker_template(cluster: Cluster, pool: Pool, settings: Settings) -> Manifest:
    """A worker's pod. Whatever differs here makes another revision."""
    template = pool.template
    image = template.image or settings.engine_image
    model = model_files(cluster.model.source, image, template, settings)
    shm_volumes, shm_mounts = _shared_memory(pool)
    fields = {
        "command": list(settings.engine_command),
        "args": _engine_args(cluster, pool, model.path, pair_revision(cluster, settings)),
        "env": podparts.env(_engine_env(pool), template),
        "ports": podparts.container_ports(WORKER_PORTS),
        # Until it is loaded only this one runs: loading may stop the loop for seconds.
        "startupProbe": podparts.probe("/readyz", "health", period_s=1, failures=STARTUP_S),
        "readinessProbe": podparts.probe("/readyz", "health", period_s=2, failures=3),
        "livenessProbe": podparts.liveness("/livez", "health"),
        "volumeMounts": [*SCRATCH_MOUNTS, *model.mounts, *shm_mounts],
        **_worker_resources(pool),
    }
    made = podparts.pod(
        selector(cluster, pool.role.value),
        template,
        [podparts.container("engine", image, template, fields)],
        model.init_containers,
        [*SCRATCH_VOLUMES, *model.volumes, *shm_volumes],
        _drain_grace_s(cluster),
    )
    if pool.accelerator and pool.accelerator.product:
        by_product = {f"{pool.accelerator.resource}.product": pool.accelerator.product}
        made["spec"]["nodeSelector"] = by_product | made["spec"].get("nodeSelector", {})
    return made


def router_template(cluster: Cluster, settings: Settings) -> Manifest:
    """A router's pod."""
    template = cluster.router.template
    image = template.image or settings.router_image
    fields = {
        "command": list(settings.router_command),
        "args": [
            f"--model={cluster.model.name}",
            "--router-name=$(POD_NAME)",
            f"--http=$({HTTP_BIND_ENV})",
            f"--admin=$(POD_IP):{ADMIN_PORT}",
            f"--control=$(POD_IP):{CONTROL_PORT}",
            f"--drain-timeout-s={cluster.rollout.drain_timeout_s:g}",
        ],
        "env": podparts.env({HTTP_BIND_ENV: f"$(POD_IP):{HTTP_PORT}"}, template),
        "ports": podparts.container_ports(ROUTER_PORTS),
        # A router is ready when it serves HTTP, with workers or without: a Service without
        # endpoints would refuse connections where clients should get a 503.
        "startupProbe": podparts.probe("/health", "http", period_s=1, failures=60),
        "readinessProbe": podparts.probe("/health", "http", period_s=2, failures=3),
        "livenessProbe": podparts.liveness("/health", "admin"),
        "lifecycle": {"preStop": {"sleep": {"seconds": ROUTER_PRESTOP_S}}},
        "volumeMounts": [*SCRATCH_MOUNTS],
        **podparts.resources(template.requests, template.limits),
    }
    return podparts.pod(
        selector(cluster, ROUTER),
        template,
        [podparts.container(ROUTER, image, template, fields)],
        (),
        SCRATCH_VOLUMES,
        ROUTER_PRESTOP_S + _drain_grace_s(cluster),
    )


def pair_revision(cluster: Cluster, settings: Settings) -> str:
    """8 hex digits of what both workers of a pair should have in common.

    Unlike a pool's revision it doesn't change when one pool's own settings do, so a pool
    that rolls alone goes on working with the other.
    """
    images = sorted({pool.template.image or settings.engine_image for pool in cluster.pools})
    blocks = sorted({pool.engine.block_tokens for pool in cluster.pools})
    text = json.dumps([repr(cluster.model), images, blocks])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _engine_args(cluster: Cluster, pool: Pool, model_path: str, revision: str) -> list[str]:
    engine = pool.engine
    flags: dict[str, object] = {
        "role": "both" if pool.role is Role.COLOCATED else pool.role.value,
        "model": model_path,
        "served-name": cluster.model.name,
        "worker-name": "$(POD_NAME)",
        "revision": revision,
        "host": "$(POD_IP)",
        "work-port": WORK_PORT,
        "kv-port": KV_PORT,
        "health-port": HEALTH_PORT,
        "routers": f"{control_name(cluster.name)}:{CONTROL_PORT}",
        "dtype": cluster.model.dtype,
        "max-model-len": cluster.model.max_model_tokens,
        "block-tokens": engine.block_tokens,
        "chunk-tokens": engine.chunk_tokens,
        "max-batch-tokens": engine.max_batch_tokens,
        "max-running": engine.max_running,
        "max-queued": engine.max_queued,
        "threads": engine.threads,
        "drain-timeout-s": f"{cluster.rollout.drain_timeout_s:g}",
    }
    if engine.kv_cache_tokens is not None:
        flags["kv-cache-tokens"] = engine.kv_cache_tokens
    else:
        flags["kv-cache-fraction"] = f"{engine.kv_cache_fraction:g}"
    return [f"--{name}={value}" for name, value in flags.items()]


def _engine_env(pool: Pool) -> dict[str, str]:
    """Nothing is fetched at run time; OpenMP must know its threads before it is loaded."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if pool.engine.threads:
        env["OMP_NUM_THREADS"] = str(pool.engine.threads)
    return env


def _worker_resources(pool: Pool) -> Manifest:
    """A device is requested and limited alike, as Kubernetes wants it."""
    device = {}
    if pool.accelerator:
        device = {pool.accelerator.resource: str(pool.accelerator.count)}
    return podparts.resources(
        dict(pool.template.requests) | device, dict(pool.template.limits) | device
    )


def _shared_memory(pool: Pool) -> tuple[list[Manifest], list[Manifest]]:
    """GPU libraries want more of /dev/shm than a container's 64 MiB."""
    if pool.accelerator is None:
        return [], []
    volume = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    return [volume], [{"name": "shm", "mountPath": "/dev/shm"}]


def _drain_grace_s(cluster: Cluster) -> int:
    return math.ceil(cluster.rollout.drain_timeout_s) + GRACE_MARGIN_S
