"""`security.tls.mode: CertManager` on a real API server, with cert-manager's kinds and without it:
what it is asked for, what is said while they or its certificates are missing, what goes with the
mode.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.api import install_crds
from e2e.cluster.envtest import EnvTest
from pd_operator import informer
from pd_operator.podparts import Manifest
from pd_operator.resources import CERTIFICATE, ISSUER
from tests import foreign
from tests.envtest.operating import Scene, scene
from tests.envtest.test_operator import at_rest
from tests.pd_operator.objects import document

pytestmark = pytest.mark.usefixtures("crds")
DEADLINE_S = 100.0
MODE = {"security": {"tls": {"mode": "CertManager"}}}


@pytest.fixture
def cert_manager(own_kube: EnvTest, tmp_path: Path) -> Iterator[Path]:
    kinds, file = foreign.CERT_MANAGER, tmp_path / "cert-manager.yaml"
    with foreign.written(own_kube.api, kinds, file) as found:
        yield found


async def objects(stage: Scene) -> dict[str, Manifest]:
    """By kind and name."""
    found = {}
    for resource in (CERTIFICATE, ISSUER):
        for one in (await stage.there.api.list(resource, stage.there.namespace)).items:
            found[f"{resource.kind} {one['metadata']['name']}"] = one
    return found


def test_it_is_asked_once_it_is_there(
    own_kube: EnvTest, namespace: str, run: Any, cert_manager: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(informer, "ABSENT_S", 0.2)

    async def scenario() -> None:
        async with scene(own_kube.kubeconfig, namespace) as stage:
            there = stage.there
            await there.create(document())
            await there.until_ready("chat")
            before = await there.objects()
            await there.edit("chat", MODE)
            told = await there.until_condition("chat", "Ready", "CertManagerMissing")
            assert "install it, or write Auto or Disabled" in told["message"]
            names = {one["metadata"]["name"] for one in before}
            assert {one["metadata"]["name"] for one in await there.objects()} == names

            install_crds(own_kube.api, [cert_manager])
            await there.until_ready("chat")
            found = await objects(stage)
            assert sorted(found) == [
                "Certificate chat-cert-ca",
                "Certificate chat-cert-router",
                "Certificate chat-cert-workers",
                "Issuer chat-cert-ca",
                "Issuer chat-cert-root",
            ]
            router = found["Certificate chat-cert-router"]
            assert router["spec"]["uris"] == [f"spiffe://pdcluster/{namespace}/chat/router"]
            await at_rest(stage)

            await fails(stage, "chat-cert-router", "False")
            told = await there.until_condition("chat", "Ready", "CertificateNotIssued")
            assert "chat-cert-router: cert-manager says: no issuer" in told["message"]
            await fails(stage, "chat-cert-router", "True")
            await there.until_ready("chat")

            await there.edit("chat", {"security": None})

            async def gone() -> bool:
                return not await objects(stage)

            await there.until("what it was asked for has gone", gone)
            await there.until_ready("chat")

    run(scenario(), DEADLINE_S)


async def fails(stage: Scene, name: str, ready: str) -> None:
    """What cert-manager would write."""
    condition = {"type": "Ready", "status": ready, "message": "no issuer"}
    body = {
        "apiVersion": CERTIFICATE.api_version,
        "kind": "Certificate",
        "metadata": {"name": name, "namespace": stage.there.namespace},
        "status": {"conditions": [condition]},
    }
    await stage.there.api.apply(CERTIFICATE, body, manager="cert-manager", subresource="status")
