"""What this machine's backend refuses or passes over, with the field's path."""

from typing import Any

import pytest

from pd_operator.api import InvalidCluster
from pd_operator.local import support
from tests.pd_operator.objects import cluster


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spec.model.source": {"huggingFace": {"repo": "a/b"}}},
            "spec.model.source.huggingFace: is for Kubernetes; write builtin, or hostPath with "
            "a folder or a GGUF file",
        ),
        (
            {"spec.model.source": {"image": "a:b"}},
            "spec.model.source.image: is for Kubernetes; write builtin, or hostPath with a "
            "folder or a GGUF file",
        ),
        (
            {"spec.model.source": {"persistentVolumeClaim": {"claimName": "m"}}},
            "spec.model.source.persistentVolumeClaim: is for Kubernetes; write builtin, or "
            "hostPath with a folder or a GGUF file",
        ),
        (
            {"spec.security": {"tls": {"mode": "CertManager"}}},
            "spec.security.tls.mode: is CertManager, which is for Kubernetes; write Auto or "
            "Disabled",
        ),
        (
            {"spec.decode.accelerator": {"resource": "nvidia.com/gpu"}},
            "spec.decode.accelerator: is for Kubernetes; leave it out to run on the CPU",
        ),
        (
            {
                "spec.decode": {"scaling": {"mode": "External", "maxReplicas": 3}},
            },
            "spec.decode.scaling.mode: is External, which is for Kubernetes; write SLO, or "
            "replicas",
        ),
        (
            {
                "spec.router.template.spec.volumes": [
                    {"name": "a", "emptyDir": {}},
                    {"name": "b", "configMap": {"name": "c"}},
                ]
            },
            "spec.router.template.spec.volumes[1].configMap: is for Kubernetes; write emptyDir",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCluster) as caught:
        support.check(cluster(**changes))
    assert [str(error) for error in caught.value.errors] == [message]


def test_what_is_accepted() -> None:
    for changes in (
        {},
        {"spec.model.source": {"hostPath": "/m"}},
        {"spec.kvTransfer.transport": "tcp"},
        {"spec.kvTransfer.transport": "nixl"},
    ):
        support.check(cluster(**changes))


def test_what_has_no_effect_is_said() -> None:
    engine = {"name": "engine", "resources": {"limits": {"memory": "8Gi"}}}
    spec = {"nodeSelector": {"zone": "a"}, "containers": [engine]}
    made = cluster(**{"spec.decode.template": {"spec": spec}})
    assert [str(one) for one in support.notes(made)] == [
        "spec.decode.template.spec.nodeSelector: has no effect on this machine; it may stay there",
        "spec.decode.template.spec.containers[0].resources: has no effect on this machine; "
        "it may stay there",
    ]
    assert support.notes(cluster()) == []
