"""PURE. Whether an object is as we want it, and which objects nobody wants any more."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pd_operator.api import KIND
from pd_operator.manifests import APPLIED_ANNOTATION, ROLE_LABEL
from pd_operator.observed import Observed, Ref
from pd_operator.podparts import Manifest
from pd_operator.tlsobjects import TLS_LABEL, in_use

_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "ports": ("containerPort", "port", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
"""Lists that the API server merges by key: others may add items, which an apply leaves."""
_WHOLE = frozenset({"ingress", "egress"})
"""Below these a list is one value, and its owner's alone."""
_SWEPT = frozenset(
    {
        "Certificate",
        "ConfigMap",
        "Issuer",
        "NetworkPolicy",
        "PDPool",
        "PodDisruptionBudget",
        "PodMonitor",
        "PrometheusRule",
        "Secret",
        "Service",
        "ServiceAccount",
    }
)


def is_applied(manifest: Manifest, existing: Manifest | None) -> bool:
    """Whether an object has all that we say, and nothing that we said and say no more."""
    if existing is None:
        return False
    annotations = existing["metadata"].get("annotations") or {}
    ours = manifest["metadata"]["annotations"][APPLIED_ANNOTATION]
    return annotations.get(APPLIED_ANNOTATION) == ours and _is_within(manifest, existing)


def _is_within(wanted: object, found: object, name: str = "", whole: bool = False) -> bool:
    """Whether `found` has every field of `wanted`, and maybe more."""
    if wanted == found:  # of most parts this is quickly said, and all there is to say
        return True
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            key in found and _is_within(value, found[key], key, whole or key in _WHOLE)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        if not isinstance(found, list):
            return False
        if name in _KEYS and not whole:
            return _has_items(wanted, found, _KEYS[name])
        return len(wanted) == len(found) and all(
            _is_within(a, b, "", whole) for a, b in zip(wanted, found, strict=True)
        )
    return False


def _has_items(wanted: Sequence[Manifest], found: Sequence[Manifest], keys: Sequence[str]) -> bool:
    by_key = {tuple(item.get(key) for key in keys): item for item in found}
    return all(
        _is_within(item, by_key.get(tuple(item.get(key) for key in keys))) for item in wanted
    )


def unwanted(observed: Observed, wanted: Iterable[Ref]) -> Iterator[Ref]:
    """Objects that we made and want no more. StatefulSets go by rollout; what belongs to one
    stays as long as it does, what a pool has once as long as the pool has any, and what pods have
    their certificates from as long as there is one."""
    kept = {*wanted, *(Ref("Service", item.name) for item in observed.sets)}
    roles = {item.role.value for item in observed.sets}
    modes = in_use(observed.objects.values())
    for ref, item in observed.objects.items():
        if ref.kind not in _SWEPT or ref in kept or not _is_made_by_us(item):
            continue
        labels = item["metadata"].get("labels") or {}
        if labels.get(TLS_LABEL) in modes:
            continue  # a pod that lives on may have to start again
        role = labels.get(ROLE_LABEL)
        if ref.kind in ("PDPool", "PodDisruptionBudget") and role in roles:
            continue
        yield ref


def _is_made_by_us(item: Manifest) -> bool:
    """Labels are copied to objects that aren't ours; owner and annotation aren't."""
    metadata = item["metadata"]
    owners = metadata.get("ownerReferences") or ()
    return APPLIED_ANNOTATION in (metadata.get("annotations") or {}) and any(
        owner.get("controller") and owner.get("kind") == KIND for owner in owners
    )
