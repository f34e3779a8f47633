"""PURE. The kinds that the operator deals with, and where the API server has them."""

from dataclasses import dataclass

from pd_operator.api import GROUP


@dataclass(frozen=True, slots=True)
class Resource:
    """`optional` kinds may be missing, and may appear while the operator runs."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    optional: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of one object, or, without a name, of a list."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if namespace else ""
        parts = [root + place, self.plural, name, subresource]
        return "/".join(part for part in parts if part)


PDCLUSTER = Resource("PDCluster", "pdclusters", GROUP, "v1alpha1")
PDPOOL = Resource("PDPool", "pdpools", GROUP, "v1alpha1")
STATEFUL_SET = Resource("StatefulSet", "statefulsets", "apps")
DEPLOYMENT = Resource("Deployment", "deployments", "apps")
SERVICE = Resource("Service", "services")
SERVICE_ACCOUNT = Resource("ServiceAccount", "serviceaccounts")
SECRET = Resource("Secret", "secrets")
POD = Resource("Pod", "pods")
DISRUPTION_BUDGET = Resource("PodDisruptionBudget", "poddisruptionbudgets", "policy")
NETWORK_POLICY = Resource("NetworkPolicy", "networkpolicies", "networking.k8s.io")
POD_MONITOR = Resource("PodMonitor", "podmonitors", "monitoring.coreos.com", optional=True)
PROMETHEUS_RULE = Resource(
    "PrometheusRule", "prometheusrules", "monitoring.coreos.com", optional=True
)
CERTIFICATE = Resource("Certificate", "certificates", "cert-manager.io", optional=True)
ISSUER = Resource("Issuer", "issuers", "cert-manager.io", optional=True)
LEASE = Resource("Lease", "leases", "coordination.k8s.io")
EVENT = Resource("Event", "events", "events.k8s.io")

CHILDREN = (
    PDPOOL,
    STATEFUL_SET,
    DEPLOYMENT,
    SERVICE,
    SERVICE_ACCOUNT,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SECRET,
    POD_MONITOR,
    PROMETHEUS_RULE,
    CERTIFICATE,
    ISSUER,
)
"""What a PDCluster is made of."""

WATCHED = (PDCLUSTER, *CHILDREN, POD)
BY_KIND = {resource.kind: resource for resource in (*WATCHED, LEASE, EVENT)}
