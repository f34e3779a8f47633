"""PURE. The PDCluster object: what a user writes, read with all its rules.

With `apiparts` the only module that knows the object's field names. `parse` takes the
document as YAML or the API server gives it and either returns a `Cluster` with every
default filled in, or raises `InvalidCluster` with everything that is wrong at once. The
CRD in crds/ has the same fields, defaults, bounds and rules.
"""

import re
from collections.abc import Mapping

from pd_operator import apiparts, routerparts
from pd_operator.apitypes import (
    Accelerator,
    Builtin,
    CertManagerMissing,
    Claim,
    Cluster,
    Colocate,
    Engine,
    EnvVar,
    HostPath,
    HuggingFace,
    InvalidCluster,
    Model,
    ModelImage,
    Pool,
    Ratio,
    Role,
    Rollout,
    Router,
    Scaling,
    ScalingMode,
    Slo,
    Source,
    Target,
    Template,
    TlsMode,
    Toleration,
    Volume,
    VolumeMount,
)
from pd_operator.fields import LABEL_KEY, NAME_PATTERN, FieldError, Node, show

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "UPGRADE_ANNOTATION",
    "Accelerator",
    "Builtin",
    "CertManagerMissing",
    "Claim",
    "Cluster",
    "Colocate",
    "Engine",
    "EnvVar",
    "HostPath",
    "HuggingFace",
    "InvalidCluster",
    "Model",
    "ModelImage",
    "Pool",
    "Ratio",
    "Role",
    "Rollout",
    "Router",
    "Scaling",
    "ScalingMode",
    "Slo",
    "Source",
    "Target",
    "Template",
    "TlsMode",
    "Toleration",
    "Volume",
    "VolumeMount",
    "check_update",
    "parse",
]

GROUP = "pdcluster.dev"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "PDCluster"
UPGRADE_ANNOTATION = f"{GROUP}/upgrade"
"""Another value of it lets the pools have what a newer operator would make of them."""
MAX_NAME_LENGTH = 40
MAX_REPLICAS = 1000

_CLUSTER_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_POOLS_REMEDY = "write either prefill and decode, or colocated"
_METADATA = (
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp",
    "finalizers", "generateName", "generation", "labels", "managedFields", "ownerReferences",
    "resourceVersion", "selfLink", "uid",
)  # fmt: skip


def parse(document: object) -> Cluster:
    """A `Cluster` from a document; raises `InvalidCluster` with all that is wrong."""
    errors: list[FieldError] = []
    cluster = _cluster(Node(document, "", errors), errors)
    if errors or cluster is None:
        raise InvalidCluster(errors)
    return cluster


def check_update(old: Cluster, new: Cluster) -> None:
    """Raises `InvalidCluster` where a field changed that can't change."""
    errors = []
    for path, before, after in (
        ("metadata.name", old.name, new.name),
        ("metadata.namespace", old.namespace, new.namespace),
        ("spec.model.name", old.model.name, new.model.name),
    ):
        if before != after:
            problem = f"changed from {show(before)} to {show(after)}, but can't change"
            errors.append(FieldError(path, problem, "make another PDCluster"))
    if errors:
        raise InvalidCluster(errors)


def doubts(cluster: Cluster) -> list[FieldError]:
    """What is taken, and may not be what is meant."""
    longest = cluster.model.max_model_tokens
    found = []
    for pool in cluster.pools:
        held = pool.engine.kv_cache_tokens
        if held is None or longest <= held + 1:  # the last token needs no KV
            continue
        problem = f"is {held}, fewer than spec.model.maxModelLen ({longest}) has"
        remedy = (
            "longer prompts are refused, answers end there; write as many, or a smaller maxModelLen"
        )
        found.append(FieldError(f"spec.{pool.role}.engine.kvCacheTokens", problem, remedy))
    if cluster.kv_quantization != "none" and cluster.transport == "auto":
        problem = (
            f"is {cluster.kv_quantization}, which is for KV that goes over a network, and "
            "transport auto takes shared memory between processes of one machine"
        )
        remedy = "KV is as it was computed there; write transport: tcp to have it quantized always"
        found.append(FieldError("spec.kvTransfer.quantization", problem, remedy))
    return found


def _cluster(node: Node, errors: list[FieldError]) -> Cluster | None:
    if errors:
        return None
    if not _is_ours(node):
        return None
    metadata = node.child_or_empty("metadata")
    name, namespace, uid, generation, upgrade = _metadata(metadata)
    spec = node.child("spec")
    written = node.raw("spec")
    node.raw("status")
    node.close()
    if spec is None:
        node.error("spec", "is missing", "write at least spec.model and the pools")
    if spec is None or not spec.is_mapping:
        return None
    model = apiparts.model(spec)
    slo = _slo(spec.child_or_empty("slo"))
    pools = _pools(spec, slo)
    security = spec.child_or_empty("security")
    router = _router(spec.child_or_empty("router"), slo, security)
    router = routerparts.traced(router, spec.child("tracing"))
    tls = _tls(security.child_or_empty("tls"))
    security.close()
    transport, quantization, colocate = _kv_transfer(spec.child_or_empty("kvTransfer"), pools)
    rollout = _rollout(spec.child_or_empty("rollout"))
    gpus, ratio = _budget(spec, pools)
    spec.close()
    return Cluster(
        name, namespace, uid, generation, model, slo, pools, router, transport, colocate,
        rollout, gpus, ratio, upgrade, written if isinstance(written, Mapping) else {},
        kv_quantization=quantization, tls=tls,
    )  # fmt: skip


def _is_ours(node: Node) -> bool:
    """Another kind of object has fields of its own: nothing more is said about it."""
    before = len(node.errors)
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        node.required(name, f"{name}: {expected}")
        if node.has(name) and node.raw(name) != expected:
            node.error(name, f"is {show(node.raw(name))}", f"write {expected}")
    return len(node.errors) == before


def _metadata(node: Node) -> tuple[str, str, str, int, str]:
    node.required("name", "a name, such as name: chat")
    characters = "small letters, digits and '-', with a letter"
    at_ends = f"{characters} at the beginning and a letter or digit at the end"
    name = node.text("name", _CLUSTER_NAME, at_ends, MAX_NAME_LENGTH)
    describe = f"{characters} or digit at both ends"
    namespace = node.text("namespace", NAME_PATTERN, describe, 63) or "default"
    uid, generation, annotations = node.raw("uid"), node.raw("generation"), node.raw("annotations")
    for other in _METADATA:
        node.raw(other)
    node.close()
    return (
        name,
        namespace,
        uid if isinstance(uid, str) else "",
        generation if isinstance(generation, int) else 0,
        str(annotations.get(UPGRADE_ANNOTATION, "")) if isinstance(annotations, Mapping) else "",
    )


def _slo(node: Node) -> Slo:
    targets = [_target(node.child(name)) for name in ("ttft", "tpot")]
    node.not_yet("itl", "e2e")
    node.close()
    return Slo(*targets)


def _target(node: Node | None) -> Target | None:
    if node is None:
        return None
    node.required("target", 'a duration, such as target: "500ms"')
    target = Target(
        node.number("percentile", 99.0, above=1, below=100),
        node.duration("target", 1.0, 0.001, 3600),
    )
    node.close()
    return target


def _pools(spec: Node, slo: Slo) -> tuple[Pool, ...]:
    nodes = {role: spec.child(role.value) for role in Role}
    given = {role: node for role, node in nodes.items() if node is not None}
    if Role.COLOCATED in given and len(given) > 1:
        spec.error("colocated", "stands beside prefill or decode", _POOLS_REMEDY)
    elif not given:
        spec.error("", "has no pool", _POOLS_REMEDY)
    elif set(given) == {Role.PREFILL} or set(given) == {Role.DECODE}:
        there = next(iter(given))
        missing = Role.DECODE if there is Role.PREFILL else Role.PREFILL
        spec.error(missing.value, f"is missing beside {there}", _POOLS_REMEDY)
    pools = tuple(_pool(role, node) for role, node in given.items())
    for pool in pools:
        _check_target(spec, pool, slo)
    return pools


def _check_target(spec: Node, pool: Pool, slo: Slo) -> None:
    """A pool can't scale on a target that nobody has set."""
    if pool.scaling is None or pool.scaling.mode is ScalingMode.EXTERNAL:
        return
    wanted = {
        Role.PREFILL: ("slo.ttft", slo.ttft),
        Role.DECODE: ("slo.tpot", slo.tpot),
        Role.COLOCATED: ("slo.ttft or slo.tpot", slo.ttft or slo.tpot),
    }
    name, target = wanted[pool.role]
    if target is None:
        problem = "scales on a target that is missing"
        spec.error(f"{pool.role}.scaling", problem, f"write {name}, or mode: External")


def _pool(role: Role, node: Node) -> Pool:
    scaling = None
    if node.has("replicas") and node.has("scaling"):
        node.error("scaling", "stands beside replicas", "write replicas or scaling, never both")
    else:
        scaling = _scaling(node.child("scaling"))
    accelerator = apiparts.accelerator(node.child("accelerator"))
    replicas = node.integer("replicas", 1, 0, MAX_REPLICAS)
    pool = Pool(
        role,
        scaling.min_replicas if scaling else replicas,
        scaling,
        accelerator,
        node.duration("startTimeout", 1800.0, 10.0, 24 * 3600),
        apiparts.engine(node.child_or_empty("engine"), accelerator, role is not Role.PREFILL),
        apiparts.template(node.child("template"), "engine"),
    )
    node.not_yet("parallelism")
    node.close()
    return pool


def _scaling(node: Node | None) -> Scaling | None:
    if node is None:
        return None
    node.required("maxReplicas", "the most workers, such as maxReplicas: 8")
    # A mode that is none doesn't bring a complaint about missing targets as well.
    default = ScalingMode.EXTERNAL if node.has("mode") else ScalingMode.SLO
    scaling = Scaling(
        ScalingMode(node.choice("mode", default, tuple(ScalingMode))),
        node.integer("minReplicas", 1, 0, MAX_REPLICAS),
        node.integer("maxReplicas", MAX_REPLICAS, 1, MAX_REPLICAS),
        node.duration("window", 60.0, 1.0, 3600),
        node.duration("panicWindow", 10.0, 1.0, 3600),
        node.duration("scaleDownWindow", 300.0, 1.0, 24 * 3600),
    )
    if scaling.min_replicas > scaling.max_replicas:
        problem = f"is {scaling.min_replicas}, above maxReplicas ({scaling.max_replicas})"
        node.error("minReplicas", problem, "write at most maxReplicas")
    if scaling.panic_window_s > scaling.window_s:
        node.error("panicWindow", "is longer than window", "write at most window")
    node.close()
    return scaling


def _router(node: Node, slo: Slo, security: Node) -> Router:
    keys = security.child("apiKeys")
    secret, clients = ("", {}) if keys is None else routerparts.api_keys(keys)
    router = Router(
        node.integer("replicas", 1, 1, 100),
        apiparts.template(node.child("template"), "router"),
        routerparts.flags(node, slo, clients, keys),
        secret,
        node.integer("processes", 1, 1, 32),
    )
    node.close()
    return router


def _tls(node: Node) -> TlsMode:
    mode = node.choice("mode", TlsMode.DISABLED, tuple(TlsMode))
    node.close()
    return TlsMode(mode)


def _kv_transfer(node: Node, pools: tuple[Pool, ...]) -> tuple[str, str, Colocate | None]:
    transport = node.choice("transport", "auto", ("auto", "tcp", "shm", "nixl"))
    quantization = node.choice("quantization", "none", ("none", "int8", "int4"))
    place = node.child("colocate")
    colocate = None
    if place is not None:
        place.required("topologyKey", "a node label, such as topologyKey: kubernetes.io/hostname")
        describe = "a node label's key, such as kubernetes.io/hostname"
        key = place.text("topologyKey", LABEL_KEY, describe, 317)
        policy = place.choice("policy", "Preferred", ("Preferred", "Required"))
        colocate = Colocate(key, policy == "Required")
        place.close()
        if any(pool.role is Role.COLOCATED for pool in pools):
            problem = "places prefill near decode, and a colocated pool has neither"
            node.error("colocate", problem, "leave it out")
    if transport in ("nixl", "shm") and quantization != "none":
        problem = f"is for tcp, and {transport} carries KV as it is"
        node.error("quantization", problem, "leave it out, or write transport: tcp")
    node.close()
    return transport, quantization, colocate


def _rollout(node: Node) -> Rollout:
    rollout = Rollout(
        node.integer("maxSurge", 1, 0, MAX_REPLICAS),
        node.integer("maxUnavailable", 0, 0, MAX_REPLICAS),
        node.duration("drainTimeout", 60.0, 1.0, 24 * 3600),
        node.duration("pendingTimeout", 300.0, 1.0, 24 * 3600),
    )
    if rollout.max_surge == 0 and rollout.max_unavailable == 0:
        problem = "is 0 as is maxSurge, so no rollout could move"
        node.error("maxUnavailable", problem, "write 1 for one of them")
    node.close()
    return rollout


def _budget(spec: Node, pools: tuple[Pool, ...]) -> tuple[int | None, Ratio | None]:
    node = spec.child("budget")
    if node is None:
        return None, None
    if node.is_mapping and not node.has("gpus") and not node.has("ratio"):
        node.error("", "is empty", "write gpus or ratio")
    gpus = node.integer("gpus", 1, 0, 1_000_000) if node.has("gpus") else None
    needed = sum(pool.replicas * pool.gpus_each for pool in pools)
    if gpus is not None and needed > gpus:
        problem = f"is {gpus}, but the pools' replicas need {needed}"
        remedy = "raise it or lower the replicas (minReplicas, where a pool is scaled)"
        node.error("gpus", problem, remedy)
    ratio = _ratio(node.child("ratio"), node, pools)
    node.close()
    return gpus, ratio


def _ratio(node: Node | None, budget: Node, pools: tuple[Pool, ...]) -> Ratio | None:
    if node is None:
        return None
    for name, example in (("min", "0.25"), ("max", "2")):
        node.required(name, f"prefill workers by decode worker, such as {name}: {example}")
    ratio = Ratio(
        node.number("min", 0.001, above=0, below=1000),
        node.number("max", 999.0, above=0, below=1000),
    )
    if ratio.low > ratio.high:
        node.error("min", f"is {ratio.low:g}, above max ({ratio.high:g})", "write at most max")
    node.close()
    by_role = {pool.role: pool for pool in pools}
    prefill, decode = by_role.get(Role.PREFILL), by_role.get(Role.DECODE)
    if Role.COLOCATED in by_role:
        problem = "compares prefill with decode, and a colocated pool has neither"
        budget.error("ratio", problem, "leave it out")
    elif prefill and decode and ratio.low <= ratio.high:
        most = prefill.max_replicas >= ratio.low * decode.replicas
        fewest = prefill.replicas <= ratio.high * decode.max_replicas
        if not (most and fewest):
            problem = "no replicas within the pools' bounds have such a ratio"
            budget.error("ratio", problem, "widen it or the pools' bounds")
    return ratio
