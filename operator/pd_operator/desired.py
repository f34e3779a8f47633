"""PURE. What a PDCluster becomes: (cluster, replicas, settings) -> Kubernetes manifests.

For each pool a StatefulSet with its headless Service, named by the hash of what makes its
pods differ; all else exists once: routers, accounts, policies, budgets, PDPools, monitors.
Everything is in the form that the API server gives back, or what exists would never equal
what is desired: canonical quantities, no empty values, protocols spelled out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pd_operator import certmanager, children, monitors, pins, podspec, policies
from pd_operator.api import (
    CertManagerMissing,
    Cluster,
    HostPath,
    InvalidCluster,
    Pool,
    Role,
    TlsMode,
)
from pd_operator.fields import FieldError
from pd_operator.manifests import (
    REVISION_LABEL,
    owned,
    selector,
    set_name,
)
from pd_operator.manifests import revision_of as revision_of
from pd_operator.podparts import Manifest, Settings


@dataclass(frozen=True, slots=True)
class DesiredPool:
    """One pool at the revision that the object asks for."""

    role: Role
    revision: str
    replicas: int
    gpus_each: int
    service: Manifest
    stateful_set: Manifest

    @property
    def name(self) -> str:
        return str(self.stateful_set["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Desired:
    """Everything that should exist, pools apart: they change by rollout."""

    pools: tuple[DesiredPool, ...]
    surroundings: tuple[Manifest, ...]
    max_surge: int = 1
    max_unavailable: int = 0
    pending_timeout_s: float = 300.0
    gpus: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def pool(self, role: Role) -> DesiredPool | None:
        return next((pool for pool in self.pools if pool.role is role), None)


def fixed_replicas(cluster: Cluster) -> dict[Role, int]:
    """The replicas of pools that aren't scaled, and those that scaled ones start with."""
    return {pool.role: pool.replicas for pool in cluster.pools}


def render(cluster: Cluster, replicas: Mapping[Role, int], settings: Settings) -> Desired:
    """The manifests of a cluster. The same input always gives the same output.

    Raises InvalidCluster where the object asks for what can't be had where it is to run.
    """
    check_supported(cluster, settings)
    return Desired(
        pools=tuple(_pool(cluster, pool, replicas[pool.role], settings) for pool in cluster.pools),
        surroundings=(
            *certmanager.objects(cluster),
            *children.accounts(cluster),
            *policies.network_policies(cluster, settings),
            *children.router(cluster, settings),
            *(children.pool_handle(cluster, pool) for pool in cluster.pools),
            *children.disruption_budgets(cluster),
            *monitors.monitors(cluster, settings),
        ),
        max_surge=cluster.rollout.max_surge,
        max_unavailable=cluster.rollout.max_unavailable,
        pending_timeout_s=cluster.rollout.pending_timeout_s,
        gpus=cluster.gpus,
        labels=selector(cluster),
    )


def check_supported(
    cluster: Cluster, settings: Settings, absent: frozenset[str] = frozenset()
) -> None:
    """Raises InvalidCluster with what these settings, or kinds that aren't there, don't allow."""
    errors = []
    for path, source in cluster.sources:
        if isinstance(source, HostPath) and not settings.host_paths:
            problem = "is for `pdcluster up` on one machine: restricted pods can't mount it"
            remedy = "write persistentVolumeClaim, image or huggingFace"
            errors.append(FieldError(f"{path}.hostPath", problem, remedy))
    if cluster.router.api_keys and settings.host_paths:
        problem = "names a Secret, and on one machine there are none"
        errors.append(FieldError("spec.security.apiKeys", problem, "leave it out"))
    if cluster.tls is TlsMode.AUTO and not settings.certificates:
        problem = "is Auto, and this operator has no right to keep certificates"
        remedy = "install its chart with certificates.enabled=true, or write another mode"
        errors.append(FieldError("spec.security.tls.mode", problem, remedy))
    if cluster.transport not in settings.transports:
        problem = f"is {cluster.transport}, and pods share no memory"
        remedy = f"write {' or '.join(settings.transports)}"
        errors.append(FieldError("spec.kvTransfer.transport", problem, remedy))
    if errors:
        raise InvalidCluster(errors)
    if cluster.tls is TlsMode.CERT_MANAGER and absent & certmanager.KINDS:
        problem = f"is CertManager, and there is none here ({certmanager.GROUP})"
        remedy = "install it, or write Auto or Disabled"
        raise CertManagerMissing([FieldError("spec.security.tls.mode", problem, remedy)])


def _pool(cluster: Cluster, pool: Pool, replicas: int, settings: Settings) -> DesiredPool:
    # From here on only what makes pods differ is there, so that nothing else can.
    inputs = pins.inputs_of(cluster, pool.role)
    template = podspec.worker_template(inputs, pool.role, settings)
    revision = revision_of(template)
    name = set_name(cluster.name, pool.role, revision)
    labels = selector(cluster, pool.role.value) | {REVISION_LABEL: revision}
    template["metadata"]["labels"] |= labels
    stateful_set = owned(
        cluster, "apps/v1", "StatefulSet", name, labels,
        {
            "spec": {
                "replicas": replicas,
                "serviceName": name,
                "podManagementPolicy": "Parallel",
                "revisionHistoryLimit": 1,
                "selector": {"matchLabels": labels},
                "template": template,
            }
        },
    )  # fmt: skip
    service = children.pool_service(cluster, pool.role, name, revision)
    stateful_set = pins.recorded(stateful_set, cluster, pool.role, settings.version)
    return DesiredPool(pool.role, revision, replicas, pool.gpus_each, service, stateful_set)
