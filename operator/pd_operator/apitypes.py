"""PURE. The PDCluster object as frozen values, with every default filled in.

`api` parses documents into them and is what others import.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pd_operator.fields import FieldError


class Role(StrEnum):
    """What the workers of a pool do."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class InvalidCluster(Exception):
    """The document is no valid PDCluster; `errors` says everything that is wrong."""

    reason = "InvalidSpec"

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("\n".join(str(error) for error in errors))
        self.errors = tuple(errors)


class CertManagerMissing(InvalidCluster):
    """The document is valid, where cert-manager is."""

    reason = "CertManagerMissing"


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


class TlsMode(StrEnum):
    """Whether a PDCluster's processes speak TLS to each other, and who makes certificates."""

    AUTO = "Auto"
    CERT_MANAGER = "CertManager"
    DISABLED = "Disabled"


class ScalingMode(StrEnum):
    """Who decides how many workers a pool has."""

    SLO = "SLO"
    EXTERNAL = "External"


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds of a pool's size, and how far back its demand is looked at."""

    mode: ScalingMode
    min_replicas: int
    max_replicas: int
    window_s: float
    panic_window_s: float
    scale_down_window_s: float


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What one worker gets; `product` is the whole value of the node's label, or ""."""

    resource: str
    count: int
    product: str


@dataclass(frozen=True, slots=True)
class Retention:
    """How long KV that nobody uses stays, and where. None: as long as there's room; the
    stores are canonical quantities, "" for none.
    """

    ttl_s: float | None
    max_share: float
    host_memory: str
    disk: str


@dataclass(frozen=True, slots=True)
class Engine:
    """Engine settings of a pool. 0 chunk tokens: whole prompts; 0 threads: torch decides;
    0 draft tokens: no speculation, None: as the engine does by itself; `draft_model` guesses
    beside what stands in the text; "" dtype: the model's.

    Exactly one of `kv_cache_tokens` and `kv_cache_fraction` is set.
    """

    chunk_tokens: int
    max_batch_tokens: int
    block_tokens: int
    dtype: str
    max_running: int
    max_queued: int
    threads: int
    kv_cache_tokens: int | None
    kv_cache_fraction: float | None
    draft_tokens: int | None
    retention: Retention | None
    draft_model: Source | None = None


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
class Volume:
    """`source` is the field of a pod's volume, canonical: {"configMap": {"name": "a"}}."""

    name: str
    source: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class VolumeMount:
    name: str
    path: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Template:
    """Overrides of a pod template, merged into what the operator renders."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    priority_class: str = ""
    runtime_class: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    volumes: tuple[Volume, ...] = ()
    image: str = ""
    image_pull_policy: str = ""
    env: tuple[EnvVar, ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    volume_mounts: tuple[VolumeMount, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """`replicas` of a scaled pool are the fewest: where it starts."""

    role: Role
    replicas: int
    scaling: Scaling | None
    accelerator: Accelerator | None
    start_timeout_s: float
    engine: Engine
    template: Template

    @property
    def gpus_each(self) -> int:
        return self.accelerator.count if self.accelerator else 0

    @property
    def max_replicas(self) -> int:
        return self.scaling.max_replicas if self.scaling else self.replicas


@dataclass(frozen=True, slots=True)
class Router:
    """`flags`: how it chooses workers and what it promises, where that isn't the default.
    `api_keys`: the Secret with the keys; "" lets everybody ask."""

    replicas: int
    template: Template
    flags: tuple[str, ...] = ()
    api_keys: str = ""
    processes: int = 1  # of each router, on one port
    collector_port: int = 0  # where its spans go; 0: nowhere


@dataclass(frozen=True, slots=True)
class Colocate:
    """Workers go where the node label `topology_key` has one value."""

    topology_key: str
    required: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """`pending_timeout_s`: how long a new worker may find no node."""

    max_surge: int
    max_unavailable: int
    drain_timeout_s: float
    pending_timeout_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Bounds of prefill replicas divided by decode replicas."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """A whole PDCluster. `gpus` bounds the GPUs of all pools; None is no bound.

    `spec` is what was parsed, as it was written.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    model: Model
    slo: Slo
    pools: tuple[Pool, ...]
    router: Router
    transport: str
    colocate: Colocate | None
    rollout: Rollout
    gpus: int | None
    ratio: Ratio | None
    upgrade: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    kv_quantization: str = "none"  # on the wire
    tls: TlsMode = TlsMode.DISABLED

    def pool(self, role: Role) -> Pool | None:
        return next((pool for pool in self.pools if pool.role is role), None)

    @property
    def sources(self) -> tuple[tuple[str, Source], ...]:
        """Where its models come from, each with the field that says so."""
        drafts = (
            (
                f"spec.{pool.role.value}.engine.speculation.draftModel.source",
                pool.engine.draft_model,
            )
            for pool in self.pools
        )
        found = (("spec.model.source", self.model.source), *drafts)
        return tuple((path, source) for path, source in found if source is not None)
