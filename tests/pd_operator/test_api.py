"""The PDCluster object: defaults, every kind of mistake (tests/cases/bad_pdclusters) with its
pinned message, and that all mistakes of a document are found at once.
"""

from typing import Any

import pytest

from pd_operator import api
from pd_operator.api import (
    Builtin,
    Claim,
    EnvVar,
    HostPath,
    HuggingFace,
    ModelImage,
    Role,
    ScalingMode,
    VolumeMount,
)
from tests.pd_operator import corpus
from tests.pd_operator.objects import cluster, document

_GPU = {"resource": "nvidia.com/gpu"}


def messages(body: object) -> list[str]:
    with pytest.raises(api.InvalidCluster) as caught:
        api.parse(body)
    return [str(error) for error in caught.value.errors]


def check(case: corpus.Case) -> None:
    if case.before is None:
        api.parse(case.document)
    else:
        api.check_update(api.parse(case.before), api.parse(case.document))


@pytest.mark.parametrize("name", corpus.CASES)
def test_a_mistake_has_a_path_a_problem_and_a_remedy(name: str) -> None:
    case = corpus.CASES[name]
    with pytest.raises(api.InvalidCluster) as caught:
        check(case)
    assert tuple(str(error) for error in caught.value.errors) == case.says


def test_there_are_many_kinds_of_mistakes() -> None:
    assert len({case.says for case in corpus.CASES.values()}) > 100


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_what_is_no_mapping_is_refused(body: object) -> None:
    [message] = messages(body)
    assert message.startswith("the document: is ")


def test_all_mistakes_are_found_at_once() -> None:
    found = messages(
        document(**{"spec.prefill.replicas": -1, "spec.slo.ttft": {}, "spec.router.x": 1})
    )
    assert [message.split(":")[0] for message in found] == [
        "spec.slo.ttft.target",
        "spec.prefill.replicas",
        "spec.router.x",
    ]


def test_defaults() -> None:
    made = cluster(**{"spec.prefill": {}, "spec.decode": {}})
    assert made.namespace == "default"
    assert [pool.role for pool in made.pools] == [Role.PREFILL, Role.DECODE]
    assert [pool.replicas for pool in made.pools] == [1, 1]
    engine = made.pools[0].engine
    assert (engine.chunk_tokens, engine.max_batch_tokens, engine.block_tokens) == (512, 2048, 16)
    assert (engine.kv_cache_tokens, engine.kv_cache_fraction) == (16384, None)
    assert (made.rollout.max_surge, made.rollout.max_unavailable) == (1, 0)
    assert (made.rollout.drain_timeout_s, made.rollout.pending_timeout_s) == (60, 300)
    assert made.pools[0].start_timeout_s == 1800
    assert (made.transport, made.gpus, made.router.replicas) == ("auto", None, 1)
    assert (made.colocate, made.ratio, made.upgrade) == (None, None, "")
    assert made.model.max_model_tokens == 0


def test_a_device_changes_the_default_of_the_cache() -> None:
    made = cluster(**{"spec.decode.accelerator": _GPU})
    decode = made.pool(Role.DECODE)
    assert decode is not None
    assert (decode.engine.kv_cache_tokens, decode.engine.kv_cache_fraction) == (None, 0.9)


def test_a_scaled_pool_starts_at_its_least() -> None:
    scaling = {"maxReplicas": 8, "minReplicas": 2, "scaleDownWindow": "10m"}
    made = cluster(**{"spec.slo.ttft": {"target": "1s"}, "spec.prefill": {"scaling": scaling}})
    prefill = made.pools[0]
    assert (prefill.replicas, prefill.max_replicas) == (2, 8)
    assert prefill.scaling == api.Scaling(ScalingMode.SLO, 2, 8, 60.0, 10.0, 600.0)


def test_where_workers_go_and_how_many_there_may_be() -> None:
    made = cluster(
        **{
            "spec.kvTransfer.colocate": {"topologyKey": "example.com/rack", "policy": "Required"},
            "spec.budget.ratio": {"min": 0.5, "max": 2},
            "metadata.annotations": {"pdcluster.dev/upgrade": "now"},
        }
    )
    assert made.colocate == api.Colocate("example.com/rack", required=True)
    assert (made.gpus, made.ratio) == (None, api.Ratio(0.5, 2.0))
    assert made.upgrade == "now"
    assert made.spec["decode"] == {"replicas": 1}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"builtin": "smollm2-135m-instruct"}, Builtin("smollm2-135m-instruct")),
        ({"hostPath": "/models/a.gguf"}, HostPath("/models/a.gguf")),
        ({"image": "models/llama:3"}, ModelImage("models/llama:3")),
        (
            {"huggingFace": {"repo": "a/b", "revision": "main", "tokenSecret": "hub"}},
            HuggingFace("a/b", "main", "hub"),
        ),
        (
            {"persistentVolumeClaim": {"claimName": "models", "path": "llama/3"}},
            Claim("models", "llama/3"),
        ),
        ({"persistentVolumeClaim": {"claimName": "models"}}, Claim("models", "")),
    ],
)
def test_sources(source: Any, expected: object) -> None:
    assert cluster(**{"spec.model.source": source}).model.source == expected


@pytest.mark.parametrize("name", ["meta-llama/Llama-3:8b", "a", "GPT_4.1"])
def test_model_names_may_look_like_paths(name: str) -> None:
    assert cluster(**{"spec.model.name": name}).model.name == name


def test_a_whole_document() -> None:
    engine = {
        "name": "engine",
        "image": "engine:2",
        "imagePullPolicy": "Never",
        "env": [{"name": "A", "value": "1"}, {"name": "B"}],
        "resources": {"requests": {"cpu": 2}, "limits": {"memory": "1024Mi"}},
        "volumeMounts": [{"name": "torch", "mountPath": "/torch", "readOnly": True}],
    }
    claim = {"claimName": "torch", "readOnly": False}
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    made = cluster(
        **{
            "metadata.uid": "u-1",
            "metadata.generation": 4,
            "metadata.managedFields": [],
            "status": {"anything": 1},
            "spec.slo": {"ttft": {"percentile": 99.9, "target": "500ms"}},
            "spec.colocated": {
                "replicas": 3,
                "template": {
                    "metadata": {"labels": {"team": "a"}},
                    "spec": {
                        "nodeSelector": {"zone": "b"},
                        "tolerations": [toleration],
                        "runtimeClassName": "nvidia",
                        "imagePullSecrets": [{"name": "registry"}],
                        "volumes": [{"name": "torch", "persistentVolumeClaim": claim}],
                        "containers": [engine],
                    },
                },
            },
            "spec.prefill": ...,
            "spec.decode": ...,
            "spec.rollout": {"maxSurge": 0, "maxUnavailable": 1, "drainTimeout": "1m30s"},
        }
    )
    [pool] = made.pools
    assert (made.uid, made.generation) == ("u-1", 4)
    assert made.slo.ttft == api.Target(99.9, 0.5)
    assert made.slo.tpot is None
    assert pool.template.env == (EnvVar("A", "1"), EnvVar("B", ""))
    assert (pool.template.requests, pool.template.limits) == ({"cpu": "2"}, {"memory": "1Gi"})
    assert pool.template.tolerations[0].effect == "NoSchedule"
    assert pool.template.runtime_class == "nvidia"
    assert pool.template.image_pull_secrets == ("registry",)
    [volume] = pool.template.volumes
    assert volume.source == {"persistentVolumeClaim": {"claimName": "torch"}}
    assert pool.template.volume_mounts == (VolumeMount("torch", "/torch", True),)
    assert made.rollout.drain_timeout_s == 90


def test_quantization_that_auto_may_pass_over_is_a_doubt() -> None:
    def doubts(**transfer: str) -> list[str]:
        return [one.path for one in api.doubts(cluster(**{"spec.kvTransfer": transfer}))]

    assert doubts(quantization="int8") == ["spec.kvTransfer.quantization"]
    assert doubts(quantization="int8", transport="tcp") == doubts(transport="auto") == []


def test_only_names_are_immutable() -> None:
    old = cluster()
    api.check_update(old, cluster(**{"spec.model.dtype": "float32", "spec.decode.replicas": 5}))
    with pytest.raises(api.InvalidCluster) as caught:
        api.check_update(old, cluster(**{"spec.model.name": "b", "metadata.name": "other"}))
    assert [str(error) for error in caught.value.errors] == [
        'metadata.name: changed from "chat" to "other", but can\'t change; make another PDCluster',
        'spec.model.name: changed from "smollm2" to "b", but can\'t change; make another PDCluster',
    ]
