"""PURE. The PDCluster object: what a user writes, as frozen dataclasses.

The only module that knows the object's field names. `parse` takes the document as YAML
or the API server gives it and either returns a `Cluster` with every default filled in,
or raises `InvalidCluster` with everything that is wrong at once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pd_operator.fields import NAME_PATTERN, FieldError, Node, show

GROUP = "pdcluster.dev"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "PDCluster"
BUILTIN_MODELS = ("smollm2-135m-instruct",)
MAX_NAME_LENGTH = 40
MAX_REPLICAS = 1000

_MODEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ABSOLUTE_PATH = re.compile(r"/[^\0]*")
_RELATIVE_PATH = re.compile(r"(?!/)(?!.*(^|/)\.\.(/|$))[^\0]+")
_ANYTHING = re.compile(r"\S+")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_METADATA = (
    "annotations", "creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp",
    "finalizers", "generateName", "generation", "labels", "managedFields", "ownerReferences",
    "resourceVersion", "selfLink", "uid",
)  # fmt: skip


class Role(StrEnum):
    """What the workers of a pool do."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class InvalidCluster(Exception):
    """The document is no valid PDCluster; `errors` says everything that is wrong."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that comes with a Python package."""

    name: str


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A repository of the hub, at a revision ("" is its default branch)."""

    repo: str
    revision: str
    token_secret: str


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder in a PersistentVolumeClaim."""

    claim_name: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelImage:
    """An image whose /models folder holds the model."""

    image: str


@dataclass(frozen=True, slots=True)
class HostPath:
    """A Hugging Face folder or a GGUF file on this machine."""

    path: str


Source = Builtin | HuggingFace | Claim | ModelImage | HostPath


@dataclass(frozen=True, slots=True)
class Model:
    """`max_model_tokens` 0 means the model's own limit."""

    name: str
    source: Source
    dtype: str
    max_model_tokens: int


@dataclass(frozen=True, slots=True)
class Target:
    """`percentile` of all requests within `target_s`."""

    percentile: float
    target_s: float


@dataclass(frozen=True, slots=True)
class Slo:
    ttft: Target | None = None
    tpot: Target | None = None


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What one worker gets; `product` is the whole value of the node's label, or ""."""

    resource: str
    count: int
    product: str


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine settings of a pool. 0 chunk tokens: whole prompts; 0 threads: torch decides.

    Exactly one of `kv_cache_tokens` and `kv_cache_fraction` is set.
    """

    chunk_tokens: int
    max_batch_tokens: int
    block_tokens: int
    max_running: int
    max_queued: int
    threads: int
    kv_cache_tokens: int | None
    kv_cache_fraction: float | None


@dataclass(frozen=True, slots=True)
class EnvVar:
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Toleration:
    """As in Kubernetes; "" leaves a field out."""

    key: str
    operator: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Template:
    """Overrides of a pod template, merged into what the operator renders."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    priority_class: str = ""
    image: str = ""
    image_pull_policy: str = ""
    env: tuple[EnvVar, ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pool:
    role: Role
    replicas: int
    accelerator: Accelerator | None
    engine: Engine
    template: Template

    @property
    def gpus_each(self) -> int:
        return self.accelerator.count if self.accelerator else 0


@dataclass(frozen=True, slots=True)
class Router:
    replicas: int
    template: Template


@dataclass(frozen=True, slots=True)
class Rollout:
    max_surge: int
    max_unavailable: int
    drain_timeout_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """A whole PDCluster. `gpus` bounds the GPUs of all pools; None is no bound."""

    name: str
    namespace: str
    uid: str
    generation: int
    model: Model
    slo: Slo
    pools: tuple[Pool, ...]
    router: Router
    transport: str
    rollout: Rollout
    gpus: int | None

    def pool(self, role: Role) -> Pool | None:
        return next((pool for pool in self.pools if pool.role is role), None)


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


def _cluster(node: Node, errors: list[FieldError]) -> Cluster | None:
    if errors:
        return None
    if not _is_ours(node):
        return None
    metadata = node.child_or_empty("metadata")
    name, namespace, uid, generation = _metadata(metadata)
    spec = node.child("spec")
    node.raw("status")
    node.close()
    if spec is None:
        node.error("spec", "is missing", "write at least spec.model and the pools")
    if spec is None or not spec.is_mapping:
        return None
    model = _model(spec)
    slo = _slo(spec.child_or_empty("slo"))
    pools = _pools(spec)
    router = _router(spec.child_or_empty("router"))
    transport = _transport(spec.child_or_empty("kvTransfer"))
    rollout = _rollout(spec.child_or_empty("rollout"))
    gpus = _budget(spec, pools)
    spec.not_yet("security", "tracing")
    spec.close()
    return Cluster(
        name, namespace, uid, generation, model, slo, pools, router, transport, rollout, gpus
    )


def _is_ours(node: Node) -> bool:
    """Another kind of object has fields of its own: nothing more is said about it."""
    before = len(node.errors)
    for name, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        node.required(name, f"{name}: {expected}")
        if node.has(name) and node.raw(name) != expected:
            node.error(name, f"is {show(node.raw(name))}", f"write {expected}")
    return len(node.errors) == before


def _metadata(node: Node) -> tuple[str, str, str, int]:
    node.required("name", "a name, such as name: chat")
    describe = "small letters, digits and '-', with a letter or digit at both ends"
    name = node.text("name", NAME_PATTERN, describe, MAX_NAME_LENGTH)
    namespace = node.text("namespace", NAME_PATTERN, describe, 63) or "default"
    uid, generation = node.raw("uid"), node.raw("generation")
    for other in _METADATA:
        node.raw(other)
    node.close()
    return (
        name,
        namespace,
        uid if isinstance(uid, str) else "",
        generation if isinstance(generation, int) else 0,
    )


def _model(spec: Node) -> Model:
    spec.required("model", "model: {name: …, source: …}")
    node = spec.child_or_empty("model")
    if spec.has("model"):
        node.required("name", "the name that clients send, such as name: smollm2")
        node.required("source", "one, such as source: {builtin: smollm2-135m-instruct}")
    describe = "letters, digits and any of . _ - : / between them"
    name = node.text("name", _MODEL_NAME, describe, 128)
    source = node.child("source")
    model = Model(
        name,
        Builtin("") if source is None else _source(source),
        node.choice("dtype", "auto", ("auto", "float32", "bfloat16", "float16")),
        node.integer("maxModelLen", 0, 1, 100_000_000),
    )
    node.not_yet("quantization", "adapters", "trustRemoteCode")
    node.close()
    return model


_SOURCES = ("builtin", "huggingFace", "persistentVolumeClaim", "image", "hostPath")


def _source(node: Node) -> Source:
    given = [name for name in _SOURCES if node.has(name)]
    node.close()
    if len(given) != 1:
        problem = f"names {' and '.join(given)}" if given else "names no source"
        node.error("", problem, f"write exactly one of {', '.join(_SOURCES)}")
        return Builtin("")
    match given[0]:
        case "builtin":
            return Builtin(node.choice("builtin", "", BUILTIN_MODELS))
        case "huggingFace":
            return _hugging_face(node)
        case "persistentVolumeClaim":
            return _claim(node)
        case "image":
            return ModelImage(node.text("image", _ANYTHING, "an image, such as image: repo:tag"))
        case _:
            describe = "an absolute path of a Hugging Face folder or a GGUF file"
            return HostPath(node.text("hostPath", _ABSOLUTE_PATH, describe, 4096))


def _hugging_face(source: Node) -> HuggingFace:
    value = source.raw("huggingFace")
    if isinstance(value, str):
        remedy = f"write huggingFace: {{repo: {value}}}"
        source.error("huggingFace", f"is {show(value)}, not a mapping", remedy)
        return HuggingFace("", "", "")
    node = source.child_or_empty("huggingFace")
    node.required("repo", "the repository, such as repo: HuggingFaceTB/SmolLM2-135M-Instruct")
    result = HuggingFace(
        node.text("repo", _REPO, "owner/name"),
        node.text("revision", _ANYTHING, "a branch, tag or commit"),
        node.text("tokenSecret", NAME_PATTERN, "the name of a Secret"),
    )
    node.close()
    return result


def _claim(source: Node) -> Claim:
    node = source.child_or_empty("persistentVolumeClaim")
    node.required("claimName", "the claim's name, such as claimName: models")
    result = Claim(
        node.text("claimName", NAME_PATTERN, "the name of a PersistentVolumeClaim"),
        node.text("path", _RELATIVE_PATH, "a path inside the claim, without .. or a leading /"),
    )
    node.close()
    return result


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
        node.number("percentile", 99.0, above=0, below=100),
        node.duration("target", 1.0, 0.001, 3600),
    )
    node.close()
    return target


def _pools(spec: Node) -> tuple[Pool, ...]:
    nodes = {role: spec.child(role.value) for role in Role}
    given = {role: node for role, node in nodes.items() if node is not None}
    remedy = "write either prefill and decode, or colocated"
    if Role.COLOCATED in given and len(given) > 1:
        spec.error("colocated", "stands beside prefill or decode", remedy)
    elif not given:
        spec.error("", "has no pool", remedy)
    elif set(given) == {Role.PREFILL} or set(given) == {Role.DECODE}:
        there = next(iter(given))
        missing = Role.DECODE if there is Role.PREFILL else Role.PREFILL
        spec.error(missing.value, f"is missing beside {there}", remedy)
    pools = tuple(_pool(role, node) for role, node in given.items())
    if len({pool.engine.block_tokens for pool in pools}) > 1:
        sizes = " and ".join(f"{pool.role} {pool.engine.block_tokens}" for pool in pools)
        remedy = "write the same blockTokens in both pools"
        spec.error("decode.engine.blockTokens", f"differs between pools: {sizes}", remedy)
    return pools


def _pool(role: Role, node: Node) -> Pool:
    if node.has("replicas") and node.has("scaling"):
        node.error("scaling", "stands beside replicas", "write replicas or scaling, never both")
    else:
        node.not_yet("scaling")
    accelerator = _accelerator(node.child("accelerator"))
    pool = Pool(
        role,
        node.integer("replicas", 1, 0, MAX_REPLICAS),
        accelerator,
        _engine(node.child_or_empty("engine"), accelerator),
        _template(node.child("template"), "engine"),
    )
    node.not_yet("speculation", "sessionRetention", "parallelism")
    node.close()
    return pool


def _accelerator(node: Node | None) -> Accelerator | None:
    if node is None:
        return None
    resource = node.text("resource", _ANYTHING, "a resource, such as nvidia.com/gpu")
    product = node.text("product", _ANYTHING, "the node label's value", 63)
    count = node.raw("count") if node.has("count") else 1
    if count != 1 or isinstance(count, bool):
        remedy = "write count: 1 (a worker uses one device until tensor parallelism comes)"
        node.error("count", f"is {show(count)}", remedy)
    node.close()
    return Accelerator(resource or "nvidia.com/gpu", 1, product)


def _engine(node: Node, accelerator: Accelerator | None) -> Engine:
    tokens, fraction = node.has("kvCacheTokens"), node.has("kvCacheFraction")
    if tokens and fraction:
        problem = "stands beside kvCacheTokens"
        node.error("kvCacheFraction", problem, "write one of them, never both")
    kv_tokens = node.integer("kvCacheTokens", 16384, 1, 1_000_000_000)
    kv_fraction = node.number("kvCacheFraction", 0.9, above=0, below=1)
    by_fraction = fraction or (accelerator is not None and not tokens)
    engine = Engine(
        chunk_tokens=node.integer("chunkTokens", 512, 0, 1_000_000),
        max_batch_tokens=node.integer("maxBatchTokens", 2048, 1, 1_000_000),
        block_tokens=node.integer("blockTokens", 16, 1, 256),
        max_running=node.integer("maxRunning", 64, 1, 4096),
        max_queued=node.integer("maxQueued", 256, 1, 100_000),
        threads=node.integer("threads", 0, 0, 1024),
        kv_cache_tokens=None if by_fraction else kv_tokens,
        kv_cache_fraction=kv_fraction if by_fraction else None,
    )
    if engine.chunk_tokens > engine.max_batch_tokens:
        problem = f"is {engine.chunk_tokens}, above maxBatchTokens ({engine.max_batch_tokens})"
        node.error("chunkTokens", problem, "write at most maxBatchTokens")
    if engine.kv_cache_tokens is not None and engine.kv_cache_tokens < engine.block_tokens:
        problem = f"is {engine.kv_cache_tokens}, less than a block ({engine.block_tokens} tokens)"
        node.error("kvCacheTokens", problem, "write at least blockTokens")
    node.not_yet("attention", "cudaGraphs", "hostCacheTokens")
    node.close()
    return engine


def _template(node: Node | None, container: str) -> Template:
    if node is None:
        return Template()
    metadata, spec = node.child_or_empty("metadata"), node.child_or_empty("spec")
    node.close()
    labels, annotations = metadata.texts("labels"), metadata.texts("annotations")
    metadata.close()
    containers = spec.children("containers")
    node_selector = spec.texts("nodeSelector")
    tolerations = tuple(_toleration(item) for item in spec.children("tolerations"))
    priority_class = spec.text("priorityClassName", NAME_PATTERN, "a PriorityClass's name")
    spec.not_yet("affinity", "volumes", "initContainers", "topologySpreadConstraints")
    spec.close()
    mine = Node({}, spec.at("containers"), spec.errors)
    for item in containers:
        item.required("name", f"name: {container}")
        if item.has("name") and item.raw("name") != container:
            item.error("name", f"is {show(item.raw('name'))}", f"write name: {container}")
        mine = item
    if len(containers) > 1:
        spec.error("containers", f"has {len(containers)} items", f"write one, named {container}")
    resources = mine.child_or_empty("resources")
    requests, limits = resources.quantities("requests"), resources.quantities("limits")
    resources.close()
    template = Template(
        labels, annotations, node_selector, tolerations, priority_class,
        mine.text("image", _ANYTHING, "an image, such as repo:tag"),
        mine.choice("imagePullPolicy", "", ("Always", "IfNotPresent", "Never")),
        _env(mine), requests, limits,
    )  # fmt: skip
    mine.not_yet("volumeMounts", "envFrom", "securityContext")
    mine.close()
    return template


def _env(container: Node) -> tuple[EnvVar, ...]:
    result = []
    for item in container.children("env"):
        item.required("name", "the variable's name")
        name = item.text("name", _ENV_NAME, "letters, digits and _, not beginning with a digit")
        value = item.raw("value") if item.has("value") else ""
        if not isinstance(value, str):
            item.error("value", f"is {show(value)}, not text", "put the value in quotes")
        elif name:
            result.append(EnvVar(name, value))
        item.not_yet("valueFrom")
        item.close()
    return tuple(result)


def _toleration(node: Node) -> Toleration:
    toleration = Toleration(
        node.text("key", _ANYTHING, "a taint's key"),
        node.choice("operator", "", ("Exists", "Equal")),
        node.text("value", _ANYTHING, "a taint's value"),
        node.choice("effect", "", ("NoSchedule", "PreferNoSchedule", "NoExecute")),
    )
    node.close()
    return toleration


def _router(node: Node) -> Router:
    router = Router(
        node.integer("replicas", 1, 1, 100), _template(node.child("template"), "router")
    )
    node.not_yet("routing", "admission", "processes")
    node.close()
    return router


def _transport(node: Node) -> str:
    transport = node.choice("transport", "auto", ("auto", "tcp", "shm", "nixl"))
    if node.choice("quantization", "none", ("none", "int8", "int4")) != "none":
        node.error("quantization", "other than none is not supported yet", "write none")
    node.not_yet("colocate")
    node.close()
    return transport


def _rollout(node: Node) -> Rollout:
    rollout = Rollout(
        node.integer("maxSurge", 1, 0, MAX_REPLICAS),
        node.integer("maxUnavailable", 0, 0, MAX_REPLICAS),
        node.duration("drainTimeout", 60.0, 1.0, 24 * 3600),
    )
    if rollout.max_surge == 0 and rollout.max_unavailable == 0:
        problem = "is 0 as is maxSurge, so no rollout could move"
        node.error("maxUnavailable", problem, "write 1 for one of them")
    node.close()
    return rollout


def _budget(spec: Node, pools: tuple[Pool, ...]) -> int | None:
    node = spec.child("budget")
    if node is None:
        return None
    node.required("gpus", "the number of GPUs, such as gpus: 16")
    gpus = node.integer("gpus", 1, 0, 1_000_000)
    node.not_yet("ratio")
    needed = sum(pool.replicas * pool.gpus_each for pool in pools)
    if needed > gpus:
        problem = f"is {gpus}, but the pools' replicas need {needed}"
        node.error("gpus", problem, "raise it or lower the replicas")
    node.close()
    return gpus
