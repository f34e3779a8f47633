"""PURE. The pod templates of workers and routers."""

import hashlib
import json
import math

from pd_core.identity import Part
from pd_operator import peertokens, podparts, tlsobjects
from pd_operator.api import Cluster, Engine, Pool, Role
from pd_operator.fields import canonical_quantity, quantity_bytes
from pd_operator.manifests import CLUSTER_LABEL as CLUSTER_LABEL
from pd_operator.manifests import REVISION_LABEL as REVISION_LABEL
from pd_operator.manifests import ROLE_LABEL as ROLE_LABEL
from pd_operator.manifests import ROUTER as ROUTER
from pd_operator.manifests import WORKER_LABEL, component, control_name, router_name, workers_name
from pd_operator.manifests import selector as selector
from pd_operator.modelfiles import DRAFT_MODEL, ModelFiles, model_files
from pd_operator.podparts import HOSTNAME, SCRATCH_MOUNTS, SCRATCH_VOLUMES, Manifest, Settings
from pd_operator.routerparts import NO_LIVE_PAGE

HTTP_PORT = 8000
ADMIN_PORT = 9090
CONTROL_PORT = 7000
WORK_PORT = 7001
KV_PORT = 7002
HEALTH_PORT = 9090
WORKER_PORTS = {"work": WORK_PORT, "kv": KV_PORT, "health": HEALTH_PORT}
ROUTER_PORTS = {"http": HTTP_PORT, "admin": ADMIN_PORT, "control": CONTROL_PORT}

HTTP_BIND_ENV = "PD_HTTP_BIND"
GRACE_MARGIN_S = 15
"""How much longer than the drain a pod may take to end: closing sockets, freeing memory."""
ROUTER_PRESTOP_S = 5
"""How long a router goes on after it left the Service, until every node has noticed."""
API_KEYS_PATH = "/etc/pdcluster/api-keys"
KV_STORE_PATH = "/var/lib/pdcluster/kv"
SHM_SIZE = "8Gi"
"""At most: it counts as the container's memory, as far as it is used."""
_LONGEST_HOLD_S = 300.0
_STORE_MARGIN_KIB = 64 << 10
"""A pod is evicted when a volume is over its limit, file system's overhead included."""


def worker_template(cluster: Cluster, role: Role, settings: Settings) -> Manifest:
    """A worker's pod. Whatever differs here makes another revision."""
    pool = next(pool for pool in cluster.pools if pool.role is role)
    template = pool.template
    image = template.image or settings.engine_image
    model = model_files(cluster.model.source, image, template, settings)
    draft = _draft_model(pool, image, settings)
    shm_volumes, shm_mounts = _shared_memory(pool)
    store_volumes, store_mounts = _kv_store(pool)
    peer_volumes, peer_mounts = _peers(cluster, Part.WORKER, settings)
    fields = {
        "command": list(settings.engine_command),
        "args": [
            *_engine_args(cluster, pool, model.path, pair_revision(cluster, settings)),
            *_peer_flags(cluster, settings),
            *([f"--draft-model={draft.path}"] if draft.path else []),
        ],
        "env": podparts.env(_engine_env(pool), template),
        "ports": podparts.container_ports(WORKER_PORTS),
        # Until it is loaded only this one runs: loading may stop the loop for seconds.
        "startupProbe": podparts.probe(
            "/readyz", "health", period_s=1, failures=math.ceil(pool.start_timeout_s)
        ),
        "readinessProbe": podparts.probe("/readyz", "health", period_s=2, failures=3),
        "livenessProbe": podparts.liveness("/livez", "health"),
        "volumeMounts": [
            *SCRATCH_MOUNTS, *model.mounts, *draft.mounts, *shm_mounts, *store_mounts,
            *peer_mounts, *podparts.own_mounts(template),
        ],
        **_worker_resources(cluster, pool, settings),
    }  # fmt: skip
    made = podparts.pod(
        workers_name(cluster.name),
        selector(cluster, role.value) | {WORKER_LABEL: cluster.name} | tlsobjects.labels(cluster),
        template,
        [podparts.container("engine", image, template, fields)],
        (*model.init_containers, *draft.init_containers),
        [
            *SCRATCH_VOLUMES, *model.volumes, *draft.volumes, *shm_volumes, *store_volumes,
            *peer_volumes,
        ],
        _drain_grace_s(cluster),
    )  # fmt: skip
    if pool.accelerator and pool.accelerator.product:
        by_product = {f"{pool.accelerator.resource}.product": pool.accelerator.product}
        made["spec"]["nodeSelector"] = by_product | made["spec"].get("nodeSelector", {})
    made["spec"] |= _placement(cluster, role)
    return made


def _draft_model(pool: Pool, image: str, settings: Settings) -> ModelFiles:
    source = pool.engine.draft_model
    if source is None:
        return ModelFiles("")
    return model_files(source, image, pool.template, settings, DRAFT_MODEL)


def _placement(cluster: Cluster, role: Role) -> Manifest:
    """Over many nodes, but near each other where the user says what near is.

    Each worker wants to be near any worker of its cluster, itself included: with a wish to be
    near the other role, the first of each would wait for ever.
    """
    place = cluster.colocate
    found: Manifest = {}
    if place is None or place.topology_key != HOSTNAME:
        spread = podparts.spread(component(cluster, role.value))
        found["topologySpreadConstraints"] = [spread]
    if place is None:
        return found
    term = {
        "topologyKey": place.topology_key,
        "labelSelector": {"matchLabels": {WORKER_LABEL: cluster.name}},
    }
    wish: Manifest = {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 100, "podAffinityTerm": term}
    ]}  # fmt: skip
    if place.required:
        wish = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return found | {"affinity": {"podAffinity": wish}}


def _hold(cluster: Cluster) -> list[str]:
    """Requests wait for a pool that is away only because nobody asked. So long as its worker
    may take to start: the router ends each wait at the request's own deadline, too."""
    starts = [
        pool.start_timeout_s
        for pool in cluster.pools
        if pool.role is not Role.PREFILL and pool.scaling and pool.scaling.min_replicas == 0
    ]
    # Whoever waits for one that can't start is better told so than kept.
    return [f"--hold-s={min(max(starts), _LONGEST_HOLD_S):g}"] if starts else []


def router_template(cluster: Cluster, settings: Settings) -> Manifest:
    """A router's pod."""
    template = cluster.router.template
    keys, key_mounts = _api_keys(cluster.router.api_keys)
    peer_volumes, peer_mounts = _peers(cluster, Part.ROUTER, settings)
    processes = cluster.router.processes
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
            *([f"--processes={processes}"] if processes > 1 else []),
            *_hold(cluster),
            *cluster.router.flags,
            *([f"--api-keys={API_KEYS_PATH}"] if keys else []),
            *([] if settings.live_page else [NO_LIVE_PAGE]),
            *_peer_flags(cluster, settings),
        ],
        "env": podparts.env({HTTP_BIND_ENV: f"$(POD_IP):{HTTP_PORT}"}, template),
        "ports": podparts.container_ports(ROUTER_PORTS),
        # A router is ready when it serves HTTP, with workers or without: a Service without
        # endpoints would refuse connections where clients should get a 503.
        "startupProbe": podparts.probe("/health", "http", period_s=1, failures=60),
        "readinessProbe": podparts.probe("/health", "http", period_s=2, failures=3),
        # Others stand in for a worker that is ended, but with a router its streams end, and on
        # a node without a core to spare it may be late for some seconds.
        "livenessProbe": podparts.liveness("/health", "admin", podparts.PATIENT_FAILURES),
        "lifecycle": {"preStop": {"sleep": {"seconds": ROUTER_PRESTOP_S}}},
        "volumeMounts": [
            *SCRATCH_MOUNTS, *key_mounts, *peer_mounts, *podparts.own_mounts(template)
        ],
        **podparts.resources(template.requests, template.limits),
    }  # fmt: skip
    made = podparts.pod(
        router_name(cluster.name),
        selector(cluster, ROUTER) | tlsobjects.labels(cluster),
        template,
        [podparts.container(ROUTER, image, template, fields)],
        (),
        [*SCRATCH_VOLUMES, *keys, *peer_volumes],
        ROUTER_PRESTOP_S + _drain_grace_s(cluster),
    )
    made["spec"]["topologySpreadConstraints"] = [podparts.spread(component(cluster, ROUTER))]
    return made


def _peers(
    cluster: Cluster, part: Part, settings: Settings
) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts of what a process shows and proves to its peers."""
    volumes, mounts = tlsobjects.volume(cluster, part)
    if settings.tokens:
        volume, mount = peertokens.volume(cluster)
        volumes, mounts = [*volumes, volume], [*mounts, mount]
    return volumes, mounts


def _peer_flags(cluster: Cluster, settings: Settings) -> list[str]:
    return [*tlsobjects.flags(cluster), *(peertokens.flags() if settings.tokens else ())]


def _api_keys(secret: str) -> tuple[list[Manifest], list[Manifest]]:
    """The volume and its mount. Without the Secret the router runs and lets nobody in; it sees
    the Secret when that comes."""
    if not secret:
        return [], []
    volume = {"name": "api-keys", "secret": {"secretName": secret, "optional": True}}
    mount = {"name": "api-keys", "mountPath": API_KEYS_PATH, "readOnly": True}
    return [volume], [mount]


def pair_revision(cluster: Cluster, settings: Settings) -> str:
    """8 hex digits of what both workers of a pair should have in common.

    Unlike a pool's revision it doesn't change when one pool's own settings do, so a pool
    that rolls alone goes on working with the other: KV in other blocks is converted.
    """
    images = sorted({pool.template.image or settings.engine_image for pool in cluster.pools})
    text = json.dumps([repr(cluster.model), images])
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
        "dtype": engine.dtype or cluster.model.dtype,
        "kv-transport": cluster.transport,
        "kv-quantization": cluster.kv_quantization,
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
    if engine.draft_tokens is not None:
        flags["draft-tokens"] = engine.draft_tokens
    return [f"--{name}={value}" for name, value in (flags | _retention(engine)).items()]


def _retention(engine: Engine) -> dict[str, object]:
    kept = engine.retention
    if kept is None:
        return {}
    flags: dict[str, object] = {"kv-idle-share": f"{kept.max_share:g}"}
    if kept.ttl_s is not None:
        flags["kv-ttl-s"] = f"{kept.ttl_s:g}"
    if kept.host_memory:
        flags["kv-host-bytes"] = quantity_bytes(kept.host_memory)
    if kept.disk:
        flags["kv-disk-bytes"] = quantity_bytes(kept.disk)
        flags["kv-disk-folder"] = KV_STORE_PATH
    return flags


def _engine_env(pool: Pool) -> dict[str, str]:
    """Nothing is fetched at run time; OpenMP must know its threads before it is loaded."""
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if pool.engine.threads:
        env["OMP_NUM_THREADS"] = str(pool.engine.threads)
    return env


def _worker_resources(cluster: Cluster, pool: Pool, settings: Settings) -> Manifest:
    """A worker with a device gets what it asks for and nothing beyond: where only one of
    requests and limits is given, the other is the same. Between pods nixl goes by RDMA."""
    template = pool.template
    devices = {}
    if pool.accelerator is not None:
        devices[pool.accelerator.resource] = str(pool.accelerator.count)
    if cluster.transport == "nixl" and not settings.host_paths:
        devices[settings.rdma_resource] = "1"
    if not devices:
        return podparts.resources(template.requests, template.limits)
    return podparts.resources(
        {**template.limits, **template.requests, **devices},
        {**template.requests, **template.limits, **devices},
    )


def _shared_memory(pool: Pool) -> tuple[list[Manifest], list[Manifest]]:
    """GPU libraries want more of /dev/shm than a container's 64 MiB."""
    if pool.accelerator is None:
        return [], []
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}}
    return [volume], [{"name": "shm", "mountPath": "/dev/shm"}]


def _kv_store(pool: Pool) -> tuple[list[Manifest], list[Manifest]]:
    """The disk for kept KV: it outlives the container, and not the pod."""
    kept = pool.engine.retention
    if kept is None or not kept.disk:
        return [], []
    limit = canonical_quantity(f"{-(-quantity_bytes(kept.disk) // 1024) + _STORE_MARGIN_KIB}Ki")
    volume = {"name": "kv-store", "emptyDir": {"sizeLimit": limit}}
    return [volume], [{"name": "kv-store", "mountPath": KV_STORE_PATH}]


def _drain_grace_s(cluster: Cluster) -> int:
    return math.ceil(cluster.rollout.drain_timeout_s) + GRACE_MARGIN_S
