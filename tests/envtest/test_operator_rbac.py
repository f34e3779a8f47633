"""The operator may do what rbac.yaml says, and needs all of it: every verb of every rule is
used in a full story, and without a rule something fails.
"""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.api import install_crds
from e2e.cluster.audit import Audit
from e2e.cluster.envtest import EnvTest
from pd_operator import reconcile
from pd_operator.podparts import Settings
from pd_operator.resources import BY_KIND, CERTIFICATE, ISSUER, SECRET
from tests.envtest.access import rules
from tests.envtest.operating import Watching, looking_on, operating
from tests.envtest.podstub import running
from tests.foreign import CERT_MANAGER, MONITORING
from tests.pd_operator.objects import cluster, document, rendered

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 115.0
CERTIFYING = (SECRET, CERTIFICATE, ISSUER)
AUTO = {"spec.security": {"tls": {"mode": "Auto"}}}
Pair = tuple[str, str]


def pairs(given: list[dict[str, Any]]) -> set[Pair]:
    """(verb, resource) of rules."""
    return {(v, r) for rule in given for r in rule["resources"] for v in rule["verbs"]}


@pytest.fixture
def monitoring(own_kube: EnvTest, tmp_path: Path):
    """Kinds of others, so that the rules about them are needed."""
    file = tmp_path / "monitoring.yaml"
    file.write_text(yaml.safe_dump_all([*MONITORING, *CERT_MANAGER]))
    names = install_crds(own_kube.api, [file])
    yield
    for name in names:
        own_kube.api.delete("apiextensions.k8s.io/v1", "CustomResourceDefinition", name)


async def everything(there: Watching) -> None:
    """What makes the operator use all its rights."""
    await there.create(document(**AUTO))
    await there.until_ready("chat")
    await there.edit("chat", {"decode": {"replicas": 2, "engine": {"maxRunning": 8}}})
    await there.until_ready("chat")
    two = {"colocated": None, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    one = {"prefill": None, "decode": None, "colocated": {"replicas": 1}}
    for edit in (one, two):
        await there.edit("chat", edit)
        await there.until_ready("chat")
    await with_cert_manager(there)
    await there.edit("chat", {"security": None})

    async def no_certificates() -> bool:
        lists = [await there.api.list(one, there.namespace) for one in CERTIFYING]
        left = [one["metadata"]["name"] for listed in lists for one in listed.items]
        return left == ["chat-token"]

    await there.until("its certificates have gone", no_certificates)


async def with_cert_manager(there: Watching) -> None:
    """Its objects too, of names that somebody has for a while."""
    taken = (("Certificate", "chat-cert-router"), ("Issuer", "chat-cert-ca"))
    for kind, name in taken:
        await make(there, kind, name)
    await there.edit("chat", {"security": {"tls": {"mode": "CertManager"}}})
    await there.until_condition("chat", "Ready", "NameTaken")
    for kind, name in taken:
        await there.delete(kind, name)
    await there.until_ready("chat")


def test_every_right_is_used(
    own_kube: EnvTest, namespace: str, audit: Audit, run, monitoring, monkeypatch
):
    del monitoring
    monkeypatch.setattr(reconcile, "RETRY_S", 0.5)
    given = rules("namespaced", "certificates", "lease")
    account = own_kube.service_account(namespace, "full", rules=given)
    user = f"{namespace}:full"

    async def scenario() -> None:
        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            running(own_kube.kubeconfig, namespace),
        ):
            # Something of each kind is there already: to be looked at, and to be let alone.
            this = cluster(**AUTO, **{"metadata.namespace": namespace})
            taken = (*TAKEN, ("StatefulSet", rendered(this).pools[0].name))
            for kind, name in taken:
                await make(there, kind, name)
            async with operating(account, namespace):
                await there.create(document(**AUTO))
                await there.until_condition("chat", "Ready", "NameTaken")
                for kind, name in taken:
                    await there.delete(kind, name)
                await there.until_ready("chat")
                await there.delete("PDCluster", "chat")
                await there.until_empty()
                await everything(there)
            # An operator that is told to make less takes away what it made before.
            less = Settings(network_policies=False, monitors=False)
            async with operating(account, namespace, settings=less):

                async def gone() -> bool:
                    kinds = ("NetworkPolicy", "PodMonitor", "PrometheusRule")
                    lists = [await there.api.list(BY_KIND[one], namespace) for one in kinds]
                    return not any(one.items for one in lists)

                await there.until("policies and monitors have gone", gone)

    run(scenario(), DEADLINE_S)
    used = set()
    for one in audit.requests(user=user):
        resource = f"{one.resource}/{one.subresource}" if one.subresource else one.resource
        used.add((one.verb, resource))
        # An apply that makes an object needs both rights.
        if one.verb == "patch" and one.code == 201:
            used.add(("create", resource))
        assert one.code != 403, one
    assert pairs(given) - used == set()


TAKEN = (
    ("Service", "chat-router"),
    ("ServiceAccount", "chat-router"),
    ("Deployment", "chat-router"),
    ("PodDisruptionBudget", "chat-router"),
    ("NetworkPolicy", "chat-router"),
    ("PDPool", "chat-decode"),
    ("Secret", "chat-tls-ca"),
    ("PodMonitor", "chat"),
    ("PrometheusRule", "chat"),
)
"""Names that a PDCluster `chat` needs."""


async def make(there: Watching, kind: str, name: str) -> None:
    """An object of that kind, as little as the API server takes."""
    labels = {"app": name}
    container = {"name": "one", "image": "one"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    specs: dict[str, dict[str, Any]] = {
        "Service": {"spec": {"ports": [{"port": 1}]}},
        "Deployment": {
            "spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
        },
        "StatefulSet": {
            "spec": {
                "replicas": 0,
                "serviceName": name,
                "selector": {"matchLabels": labels},
                "template": template,
            }
        },
        "PodDisruptionBudget": {"spec": {"selector": {"matchLabels": labels}}},
        "NetworkPolicy": {"spec": {"podSelector": {"matchLabels": labels}}},
    }
    resource = BY_KIND[kind]
    await there.api.create(
        resource,
        {
            "apiVersion": resource.api_version,
            "kind": kind,
            "metadata": {"name": name, "namespace": there.namespace},
            **specs.get(kind, {}),
        },
    )


def test_without_any_rule_something_fails(
    own_kube: EnvTest, audit: Audit, run, monitoring, monkeypatch
):
    del monitoring
    monkeypatch.setattr(reconcile, "RETRY_S", 0.5)
    whole = {part: rules(part) for part in ("namespaced", "certificates", "lease")}
    all_rules = [one for given in whole.values() for one in given]
    cases = [
        (part, number, [one for one in all_rules if one != removed])
        for part, given in whole.items()
        for number, removed in enumerate(given)
    ]

    async def refused(part: str, number: int, kept: list[Any]) -> None:
        namespace = f"rbac-{secrets.token_hex(4)}"
        for kind, metadata in (
            ("Namespace", {"name": namespace}),
            ("ServiceAccount", {"name": "default", "namespace": namespace}),
        ):
            own_kube.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata})
        account = own_kube.service_account(namespace, "less", rules=kept)
        removed = rules(part)[number]

        async def seen() -> bool:
            return any(
                one.code == 403 and one.resource in {r.split("/")[0] for r in removed["resources"]}
                for one in audit.requests(user=f"{namespace}:less")
            )

        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            running(own_kube.kubeconfig, namespace),
            operating(account, namespace, clean=False),
        ):
            await there.create(document(**AUTO))
            await there.until(f"without {removed} something is refused", seen)

    async def scenario() -> None:
        slots = asyncio.Semaphore(4)

        async def one(case: tuple[str, int, list[Any]]) -> None:
            async with slots:
                await refused(*case)

        await asyncio.gather(*(one(case) for case in cases))

    run(scenario(), DEADLINE_S)


def test_a_cluster_wide_operator_needs_to_list_leases(
    own_kube: EnvTest, namespace: str, audit: Audit, run
):
    """Without that right it can't tell which namespaces are its own, and writes nothing."""
    account = own_kube.service_account(
        namespace, "blind", rules=rules("lease"), cluster_rules=rules("namespaced", "certificates")
    )

    async def scenario() -> None:
        async with (
            looking_on(own_kube.kubeconfig, namespace) as there,
            operating(account, "", lease_namespace=namespace),
        ):
            await there.create(document())
            await asyncio.sleep(3)
            assert "status" not in await there.cluster("chat")

    run(scenario(), DEADLINE_S)
    assert [one.code for one in audit.requests(user=f"{namespace}:blind", verb="list")].count(403)
    writes = audit.writes(user=f"{namespace}:blind")
    assert {one.resource for one in writes} == {"leases"}
