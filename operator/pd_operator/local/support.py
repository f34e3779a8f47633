"""PURE. What a PDCluster may ask for that this machine's backend hasn't."""

from pd_operator.api import (
    Claim,
    Cluster,
    HuggingFace,
    InvalidCluster,
    ModelImage,
    Pool,
    ScalingMode,
    Source,
    Template,
    TlsMode,
)
from pd_operator.fields import FieldError

_KUBERNETES = "is for Kubernetes"
_IDLE = "has no effect on this machine"
_HARMLESS = "it may stay there"


def check(cluster: Cluster) -> None:
    """Raises `InvalidCluster` with everything that can't be had here."""
    errors = [*_sources(cluster), *_tls(cluster)]
    for path, template in _templates(cluster):
        errors += _volumes(path, template)
    for pool in cluster.pools:
        errors += [*_accelerator(pool), *_scaling(pool)]
    if errors:
        raise InvalidCluster(errors)


def notes(cluster: Cluster) -> list[FieldError]:
    """Fields without an effect here: true on Kubernetes, and harmless."""
    found = []
    if cluster.colocate:
        found.append(FieldError("spec.kvTransfer.colocate", _IDLE, _HARMLESS))
    for path, template in _templates(cluster):
        for field, value in (
            ("spec.nodeSelector", template.node_selector),
            ("spec.tolerations", template.tolerations),
            ("spec.priorityClassName", template.priority_class),
            ("spec.runtimeClassName", template.runtime_class),
            ("spec.imagePullSecrets", template.image_pull_secrets),
            ("spec.containers[0].image", template.image),
            ("spec.containers[0].resources", template.requests or template.limits),
        ):
            if value:
                found.append(FieldError(f"{path}.{field}", _IDLE, _HARMLESS))
    return found


def _templates(cluster: Cluster) -> list[tuple[str, Template]]:
    pools = [(f"spec.{pool.role}.template", pool.template) for pool in cluster.pools]
    return [*pools, ("spec.router.template", cluster.router.template)]


_SOURCE_FIELDS: dict[type[Source], str] = {
    HuggingFace: "huggingFace",
    Claim: "persistentVolumeClaim",
    ModelImage: "image",
}


def _sources(cluster: Cluster) -> list[FieldError]:
    remedy = "write builtin, or hostPath with a folder or a GGUF file"
    return [
        FieldError(f"{path}.{_SOURCE_FIELDS[type(source)]}", _KUBERNETES, remedy)
        for path, source in cluster.sources
        if type(source) in _SOURCE_FIELDS
    ]


def _tls(cluster: Cluster) -> list[FieldError]:
    if cluster.tls is not TlsMode.CERT_MANAGER:
        return []
    problem = f"is CertManager, which {_KUBERNETES}"
    return [FieldError("spec.security.tls.mode", problem, "write Auto or Disabled")]


def _scaling(pool: Pool) -> list[FieldError]:
    if pool.scaling is None or pool.scaling.mode is ScalingMode.SLO:
        return []
    problem = f"is External, which {_KUBERNETES}"
    return [FieldError(f"spec.{pool.role}.scaling.mode", problem, "write SLO, or replicas")]


def _volumes(path: str, template: Template) -> list[FieldError]:
    """Of a claim, a ConfigMap or a Secret there is nothing on this machine."""
    return [
        FieldError(f"{path}.spec.volumes[{index}].{kind}", _KUBERNETES, "write emptyDir")
        for index, volume in enumerate(template.volumes)
        for kind in volume.source
        if kind != "emptyDir"
    ]


def _accelerator(pool: Pool) -> list[FieldError]:
    if pool.accelerator is None:
        return []
    remedy = "leave it out to run on the CPU"
    return [FieldError(f"spec.{pool.role}.accelerator", _KUBERNETES, remedy)]
