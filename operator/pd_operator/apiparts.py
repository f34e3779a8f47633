"""PURE. Reads the parts of a PDCluster: the model, a pool's device and engine, templates."""

import re
from collections.abc import Mapping
from typing import Any

from pd_operator.apitypes import (
    Accelerator,
    Builtin,
    Claim,
    Engine,
    EnvVar,
    HostPath,
    HuggingFace,
    Model,
    ModelImage,
    Retention,
    Source,
    Template,
    Toleration,
    Volume,
    VolumeMount,
)
from pd_operator.fields import (
    LABEL_KEY,
    LABEL_VALUE,
    NAME_PATTERN,
    OBJECT_PATTERN,
    Node,
    quantity_bytes,
    show,
)

BUILTIN_MODELS = ("smollm2-135m-instruct",)
OWN_VOLUMES = (
    "home", "tmp", "models", "source", "draft-models", "draft-source", "shm", "kv-store",
    "api-keys", "peer-tls", "peer-token",
)  # fmt: skip
OWN_PATHS = (
    "/tmp", "/models", "/source", "/draft-models", "/draft-source", "/dev/shm", "/home/pdcluster",
    "/etc/pdcluster/api-keys", "/var/lib/pdcluster/kv", "/etc/pdcluster/tls",
    "/etc/pdcluster/token",
)  # fmt: skip

_MODEL_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+")
_ABSOLUTE_PATH = re.compile(r"/[^\0]*")
_MOUNT_PATH = re.compile(r"/[^\0:]*")
_RELATIVE_PATH = re.compile(r"(?!/)(?!.*(^|/)\.\.(/|$))[^\0]+")
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ANYTHING = re.compile(r"\S+")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def model(spec: Node) -> Model:
    spec.required("model", "model: {name: …, source: …}")
    node = spec.child_or_empty("model")
    if spec.has("model"):
        node.required("name", "the name that clients send, such as name: smollm2")
        node.required("source", "one, such as source: {builtin: smollm2-135m-instruct}")
    describe = "letters, digits and any of . _ - : / between them"
    name = node.text("name", _MODEL_NAME, describe, 128)
    source = node.child("source")
    made = Model(
        name,
        Builtin("") if source is None else _source(source),
        node.choice("dtype", "auto", _DTYPES),
        node.integer("maxModelLen", 0, 1, 100_000_000),
    )
    node.not_yet("quantization", "adapters", "trustRemoteCode")
    node.close()
    return made


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
            describe = "an image, such as image: repo:tag"
            return ModelImage(node.text("image", _ANYTHING, describe, 512))
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
        node.text("tokenSecret", OBJECT_PATTERN, "the name of a Secret"),
    )
    node.close()
    return result


def _claim(source: Node) -> Claim:
    node = source.child_or_empty("persistentVolumeClaim")
    node.required("claimName", "the claim's name, such as claimName: models")
    result = Claim(
        node.text("claimName", OBJECT_PATTERN, "the name of a PersistentVolumeClaim"),
        node.text("path", _RELATIVE_PATH, "a path inside the claim, without .. or a leading /"),
    )
    node.close()
    return result


def accelerator(node: Node | None) -> Accelerator | None:
    if node is None:
        return None
    resource = node.text("resource", _RESOURCE, "a resource, such as nvidia.com/gpu")
    product = node.text("product", LABEL_VALUE, "the node label's value", 63)
    count = node.raw("count") if node.has("count") else 1
    if count != 1 or isinstance(count, bool):
        remedy = "write count: 1 (a worker uses one device until tensor parallelism comes)"
        node.error("count", f"is {show(count)}", remedy)
    node.close()
    return Accelerator(resource or "nvidia.com/gpu", 1, product)


def engine(node: Node, device: Accelerator | None, decodes: bool) -> Engine:
    tokens, fraction = node.has("kvCacheTokens"), node.has("kvCacheFraction")
    if tokens and fraction:
        problem = "stands beside kvCacheTokens"
        node.error("kvCacheFraction", problem, "write one of them, never both")
    kv_tokens = node.integer("kvCacheTokens", 16384, 1, 1_000_000_000)
    kv_fraction = node.number("kvCacheFraction", 0.9, above=0, below=1)
    draft_tokens, draft_model = _speculation(node, decodes)
    by_fraction = fraction or (device is not None and not tokens)
    made = Engine(
        chunk_tokens=node.integer("chunkTokens", 512, 0, 1_000_000),
        max_batch_tokens=node.integer("maxBatchTokens", 2048, 1, 1_000_000),
        block_tokens=node.integer("blockTokens", 16, 1, 256),
        dtype=node.choice("dtype", "", _DTYPES),
        max_running=node.integer("maxRunning", 64, 1, 4096),
        max_queued=node.integer("maxQueued", 256, 1, 100_000),
        threads=node.integer("threads", 0, 0, 1024),
        kv_cache_tokens=None if by_fraction else kv_tokens,
        kv_cache_fraction=kv_fraction if by_fraction else None,
        draft_tokens=draft_tokens,
        retention=_retention(node.child("retention")),
        draft_model=draft_model,
    )
    if made.chunk_tokens > made.max_batch_tokens:
        problem = f"is {made.chunk_tokens}, above maxBatchTokens ({made.max_batch_tokens})"
        node.error("chunkTokens", problem, "write at most maxBatchTokens")
    if made.kv_cache_tokens is not None and made.kv_cache_tokens < made.block_tokens:
        problem = f"is {made.kv_cache_tokens}, less than a block ({made.block_tokens} tokens)"
        node.error("kvCacheTokens", problem, "write at least blockTokens")
    node.not_yet("attention", "cudaGraphs")
    node.close()
    return made


def _speculation(node: Node, decodes: bool) -> tuple[int | None, Source | None]:
    """Guesses a step, and the draft model, if there is one."""
    if node.has("speculation") and not decodes:
        problem = "is for workers that decode"
        node.error("speculation", problem, "write it in decode.engine, or leave it out")
    speculation = node.child("speculation")
    if speculation is None:
        return None, None
    method = speculation.choice("method", "ngram", ("none", "ngram", "draft"))
    most = speculation.integer("maxDraftTokens", 8, 1, 64)
    draft = speculation.child("draftModel")
    if (method == "draft") != (draft is not None):
        problem = "and method: draft go together"
        speculation.error("draftModel", problem, "write both or neither")
    speculation.close()
    return most if method != "none" else 0, _draft_source(draft)


def _draft_source(node: Node | None) -> Source | None:
    if node is None:
        return None
    node.required("source", "where it comes from, as in spec.model.source")
    source = node.child("source")
    node.close()
    return None if source is None else _source(source)


def _retention(node: Node | None) -> Retention | None:
    if node is None:
        return None
    made = Retention(
        node.duration("ttl", 0.0, 1, 8760 * 3600) or None,
        node.number("maxShare", 1.0, above=0, below=1),
        node.quantity("hostMemory"),
        node.quantity("disk"),
    )
    none = not node.has("hostMemory") or (
        made.host_memory and quantity_bytes(made.host_memory) == 0
    )
    if made.disk and none:
        problem = "is written through host memory, of which there is none"
        node.error("disk", problem, 'write hostMemory too, such as "2Gi"')
    node.close()
    return made


def template(node: Node | None, container: str) -> Template:
    """Overrides of the pods whose only container has this name."""
    if node is None:
        return Template()
    metadata, spec = node.child_or_empty("metadata"), node.child_or_empty("spec")
    node.close()
    labels, annotations = metadata.labels("labels"), metadata.texts("annotations")
    metadata.close()
    volumes = tuple(_volume(item) for item in spec.children("volumes"))
    _unique(spec, "volumes", [volume.name for volume in volumes])
    mine = _container(spec, container)
    resources = mine.child_or_empty("resources")
    made = Template(
        labels=labels,
        annotations=annotations,
        node_selector=spec.labels("nodeSelector"),
        tolerations=tuple(_toleration(item) for item in spec.children("tolerations")),
        priority_class=spec.text("priorityClassName", OBJECT_PATTERN, "a PriorityClass's name"),
        runtime_class=spec.text("runtimeClassName", OBJECT_PATTERN, "a RuntimeClass's name"),
        image_pull_secrets=tuple(_secret_name(item) for item in spec.children("imagePullSecrets")),
        volumes=volumes,
        image=mine.text("image", _ANYTHING, "an image, such as repo:tag", 512),
        image_pull_policy=mine.choice("imagePullPolicy", "", ("Always", "IfNotPresent", "Never")),
        env=_env(mine),
        requests=resources.quantities("requests"),
        limits=resources.quantities("limits"),
        volume_mounts=_mounts(mine, volumes),
    )
    spec.not_yet("affinity", "initContainers", "topologySpreadConstraints", "securityContext")
    for one in (resources, spec):
        one.close()
    mine.not_yet("envFrom", "securityContext")
    mine.close()
    return made


def _container(spec: Node, name: str) -> Node:
    """The one container of the template, or one without fields."""
    given = spec.children("containers")
    for item in given:
        item.required("name", f"name: {name}")
        if item.has("name") and item.raw("name") != name:
            item.error("name", f"is {show(item.raw('name'))}", f"write name: {name}")
    if len(given) > 1:
        spec.error("containers", f"has {len(given)} items", f"write one, named {name}")
    return given[-1] if given else Node({}, spec.at("containers"), spec.errors)


def _unique(node: Node, name: str, keys: list[str]) -> None:
    for index, key in enumerate(keys):
        if key and key in keys[:index]:
            node.error(f"{name}[{index}]", f"repeats {show(key)}", "write each only once")


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
    _unique(container, "env", [item.name for item in result])
    return tuple(result)


def _toleration(node: Node) -> Toleration:
    made = Toleration(
        node.text("key", LABEL_KEY, "a taint's key"),
        node.choice("operator", "", ("Exists", "Equal")),
        node.text("value", LABEL_VALUE, "a taint's value", 63),
        node.choice("effect", "", ("NoSchedule", "PreferNoSchedule", "NoExecute")),
    )
    if made.operator == "Exists" and node.has("value"):
        node.error("value", "has no meaning beside operator: Exists", "leave it out")
    if node.is_mapping and made.operator != "Exists" and not node.has("key"):
        remedy = "write a taint's key, or operator: Exists for all taints"
        node.error("key", "is missing", remedy)
    node.close()
    return made


def _secret_name(node: Node) -> str:
    node.required("name", "the Secret's name")
    name = node.text("name", OBJECT_PATTERN, "the name of a Secret")
    node.close()
    return name


_VOLUME_SOURCES = ("persistentVolumeClaim", "configMap", "secret", "emptyDir")


def _volume(node: Node) -> Volume:
    node.required("name", "what volumeMounts call it")
    describe = "small letters, digits and '-', with a letter or digit at both ends"
    name = node.text("name", NAME_PATTERN, describe, 63)
    if name in OWN_VOLUMES:
        remedy = f"write another name than {', '.join(OWN_VOLUMES)}"
        node.error("name", f"is {show(name)}, the operator's own", remedy)
    given = [kind for kind in _VOLUME_SOURCES if node.has(kind)]
    before = len(node.errors)
    node.close()
    if not given and len(node.errors) > before:
        return Volume(name, {})
    if len(given) != 1:
        problem = f"names {' and '.join(given)}" if given else "names no source"
        node.error("", problem, f"write exactly one of {', '.join(_VOLUME_SOURCES)}")
        return Volume(name, {})
    source = node.child_or_empty(given[0])
    made = _volume_source(given[0], source)
    source.close()
    return Volume(name, {given[0]: made})


def _volume_source(kind: str, node: Node) -> Mapping[str, Any]:
    """The source as the API server would give it back: nothing empty, nothing false."""
    match kind:
        case "persistentVolumeClaim":
            node.required("claimName", "the claim's name, such as claimName: models")
            claim = node.text("claimName", OBJECT_PATTERN, "the name of a PersistentVolumeClaim")
            read_only = {"readOnly": True} if node.flag("readOnly", False) else {}
            return {"claimName": claim, **read_only}
        case "configMap":
            node.required("name", "the ConfigMap's name")
            return {"name": node.text("name", OBJECT_PATTERN, "the name of a ConfigMap")}
        case "secret":
            node.required("secretName", "the Secret's name")
            return {"secretName": node.text("secretName", OBJECT_PATTERN, "the name of a Secret")}
        case _:
            fields = {
                "medium": node.choice("medium", "", ("Memory",)),
                "sizeLimit": node.quantity("sizeLimit"),
            }
            return {name: value for name, value in fields.items() if value}


def _mounts(container: Node, volumes: tuple[Volume, ...]) -> tuple[VolumeMount, ...]:
    known = [volume.name for volume in volumes]
    result = []
    for item in container.children("volumeMounts"):
        item.required("name", "one of volumes")
        item.required("mountPath", "an absolute path, such as mountPath: /data")
        name = item.text("name", NAME_PATTERN, "one of volumes", 63)
        path = item.text("mountPath", _MOUNT_PATH, "an absolute path without :", 1024)
        if name and name not in known:
            item.error(
                "name", f"is {show(name)}, a volume that isn't there", "write one of volumes"
            )
        if path in OWN_PATHS:
            item.error("mountPath", f"is {show(path)}, the operator's own", "write another path")
        result.append(VolumeMount(name, path, item.flag("readOnly", False)))
        item.close()
    _unique(container, "volumeMounts", [mount.path for mount in result])
    return tuple(result)
