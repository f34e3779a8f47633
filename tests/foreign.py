"""Kinds of others that the operator uses where they are: their CRDs, as bare as can be."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from e2e.cluster.api import Api, Manifest


def kinds(group: str, **named: str) -> list[Manifest]:
    """CRDs of others, as far as tests need them: the plural of each kind."""
    return [_kind(group, kind, plural) for kind, plural in named.items()]


def _kind(group: str, kind: str, plural: str) -> Manifest:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [version],
        },
    }


@contextmanager
def written(api: Api, made: Sequence[Manifest], file: Path) -> Iterator[Path]:
    """A file with these kinds, for who installs them meanwhile; in the end they are taken away."""
    file.write_text(yaml.safe_dump_all(made))
    yield file
    for one in made:
        api.delete(one["apiVersion"], one["kind"], one["metadata"]["name"])


MONITORING = kinds(
    "monitoring.coreos.com", PodMonitor="podmonitors", PrometheusRule="prometheusrules"
)
CERT_MANAGER = kinds("cert-manager.io", Certificate="certificates", Issuer="issuers")
