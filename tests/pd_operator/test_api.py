"""The PDCluster object: defaults, every kind of mistake with its pinned message, and that
all mistakes of a document are found at once.
"""

from typing import Any

import pytest

from pd_operator import api
from pd_operator.api import Builtin, Claim, EnvVar, HostPath, HuggingFace, ModelImage, Role
from tests.pd_operator.objects import cluster, document

_ENGINE = "spec.prefill.engine"
_TEMPLATE = "spec.decode.template"
_GPU = {"resource": "nvidia.com/gpu"}
_WHOLE = "write a whole number from"

BAD: dict[str, tuple[Any, str]] = {
    # name: (changes, the message as a whole)
    "other version": (
        {"apiVersion": "pdcluster.dev/v2"},
        'apiVersion: is "pdcluster.dev/v2"; write pdcluster.dev/v1alpha1',
    ),
    "other kind": ({"kind": "Pod"}, 'kind: is "Pod"; write PDCluster'),
    "no name": (
        {"metadata.name": ...},
        "metadata.name: is missing; write a name, such as name: chat",
    ),
    "name with capitals": (
        {"metadata.name": "Chat"},
        "metadata.name: is \"Chat\"; write small letters, digits and '-', with a letter or "
        "digit at both ends",
    ),
    "name too long": (
        {"metadata.name": "a" * 41},
        f'metadata.name: is "{"a" * 41}", 41 characters long; write at most 40 characters',
    ),
    "name a number": (
        {"metadata.name": 7},
        "metadata.name: is 7, not text; write small letters, digits and '-', with a letter or "
        "digit at both ends",
    ),
    "unknown metadata": (
        {"metadata.lables": {}},
        "metadata.lables: is not a known field; did you mean labels?",
    ),
    "unknown top field": (
        {"specs": {}},
        "specs: is not a known field; did you mean spec?",
    ),
    "no spec": ({"spec": ...}, "spec: is missing; write at least spec.model and the pools"),
    "spec a list": ({"spec": []}, "spec: is a list, not a mapping; write a mapping"),
    "unknown field far from any": (
        {"spec.rollout.zzz": 1},
        "spec.rollout.zzz: is not a known field; known here: drainTimeout, maxSurge, "
        "maxUnavailable",
    ),
    "no model": ({"spec.model": ...}, "spec.model: is missing; write model: {name: …, source: …}"),
    "no model name": (
        {"spec.model.name": ...},
        "spec.model.name: is missing; write the name that clients send, such as name: smollm2",
    ),
    "model name with a blank": (
        {"spec.model.name": "my model"},
        'spec.model.name: is "my model"; write letters, digits and any of . _ - : / between them',
    ),
    "no source": (
        {"spec.model.source": ...},
        "spec.model.source: is missing; write one, such as source: "
        "{builtin: smollm2-135m-instruct}",
    ),
    "source empty": (
        {"spec.model.source": {}},
        "spec.model.source: names no source; write exactly one of builtin, huggingFace, "
        "persistentVolumeClaim, image, hostPath",
    ),
    "two sources": (
        {"spec.model.source.hostPath": "/m"},
        "spec.model.source: names builtin and hostPath; write exactly one of builtin, "
        "huggingFace, persistentVolumeClaim, image, hostPath",
    ),
    "unknown builtin": (
        {"spec.model.source.builtin": "llama"},
        'spec.model.source.builtin: is "llama"; write one of smollm2-135m-instruct',
    ),
    "relative hostPath": (
        {"spec.model.source": {"hostPath": "models/a"}},
        'spec.model.source.hostPath: is "models/a"; write an absolute path of a Hugging Face '
        "folder or a GGUF file",
    ),
    "huggingFace as text": (
        {"spec.model.source": {"huggingFace": "meta-llama/Llama-3-8B"}},
        'spec.model.source.huggingFace: is "meta-llama/Llama-3-8B", not a mapping; write '
        "huggingFace: {repo: meta-llama/Llama-3-8B}",
    ),
    "huggingFace without repo": (
        {"spec.model.source": {"huggingFace": {"revision": "main"}}},
        "spec.model.source.huggingFace.repo: is missing; write the repository, such as repo: "
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "claim path leaves the claim": (
        {"spec.model.source": {"persistentVolumeClaim": {"claimName": "m", "path": "a/../.."}}},
        'spec.model.source.persistentVolumeClaim.path: is "a/../.."; write a path inside the '
        "claim, without .. or a leading /",
    ),
    "unknown dtype": (
        {"spec.model.dtype": "int8"},
        'spec.model.dtype: is "int8"; write one of auto, float32, bfloat16, float16',
    ),
    "maxModelLen zero": (
        {"spec.model.maxModelLen": 0},
        f"spec.model.maxModelLen: is 0; {_WHOLE} 1 to 100000000",
    ),
    "target without unit": (
        {"spec.slo.ttft": {"target": "500"}},
        'spec.slo.ttft.target: is "500", not a duration; write a duration from 1ms to 1h, such '
        'as "500ms", "30s" or "5m"',
    ),
    "target a number": (
        {"spec.slo.ttft": {"target": 500}},
        "spec.slo.ttft.target: is 500, not a duration; write a duration from 1ms to 1h, such "
        'as "500ms", "30s" or "5m"',
    ),
    "target out of bounds": (
        {"spec.slo.tpot": {"target": "2h"}},
        'spec.slo.tpot.target: is "2h"; write a duration from 1ms to 1h',
    ),
    "no target": (
        {"spec.slo.tpot": {"percentile": 95}},
        'spec.slo.tpot.target: is missing; write a duration, such as target: "500ms"',
    ),
    "percentile 0": (
        {"spec.slo.ttft": {"percentile": 0, "target": "1s"}},
        "spec.slo.ttft.percentile: is 0; write a number above 0 and below 100",
    ),
    "percentile 100": (
        {"spec.slo.ttft": {"percentile": 100, "target": "1s"}},
        "spec.slo.ttft.percentile: is 100; write a number above 0 and below 100",
    ),
    "percentile NaN": (
        {"spec.slo.ttft": {"percentile": float("nan"), "target": "1s"}},
        "spec.slo.ttft.percentile: is nan; write a number above 0 and below 100",
    ),
    "no pools": (
        {"spec.prefill": ..., "spec.decode": ...},
        "spec: has no pool; write either prefill and decode, or colocated",
    ),
    "decode missing": (
        {"spec.decode": ...},
        "spec.decode: is missing beside prefill; write either prefill and decode, or colocated",
    ),
    "prefill missing": (
        {"spec.prefill": ...},
        "spec.prefill: is missing beside decode; write either prefill and decode, or colocated",
    ),
    "colocated beside pools": (
        {"spec.colocated": {}},
        "spec.colocated: stands beside prefill or decode; write either prefill and decode, or "
        "colocated",
    ),
    "empty pool": (
        {"spec.decode": None},
        "spec.decode: is empty, not a mapping; write {} for the defaults",
    ),
    "replicas text": (
        {"spec.prefill.replicas": "2"},
        f'spec.prefill.replicas: is "2"; {_WHOLE} 0 to 1000, without quotes',
    ),
    "replicas negative": (
        {"spec.prefill.replicas": -1},
        f"spec.prefill.replicas: is -1; {_WHOLE} 0 to 1000",
    ),
    "replicas true": (
        {"spec.prefill.replicas": True},
        f"spec.prefill.replicas: is true; {_WHOLE} 0 to 1000",
    ),
    "replicas half": (
        {"spec.prefill.replicas": 1.5},
        f"spec.prefill.replicas: is 1.5; {_WHOLE} 0 to 1000",
    ),
    "replicas huge": (
        {"spec.decode.replicas": 10**30},
        f"spec.decode.replicas: is {10**30}; {_WHOLE} 0 to 1000",
    ),
    "replicas and scaling": (
        {"spec.prefill.scaling": {"minReplicas": 1}},
        "spec.prefill.scaling: stands beside replicas; write replicas or scaling, never both",
    ),
    "scaling": (
        {"spec.prefill": {"scaling": {"minReplicas": 1}}},
        "spec.prefill.scaling: is not supported yet; leave it out",
    ),
    "speculation": (
        {"spec.decode.speculation": {}},
        "spec.decode.speculation: is not supported yet; leave it out",
    ),
    "two devices": (
        {"spec.decode.accelerator": _GPU | {"count": 2}},
        "spec.decode.accelerator.count: is 2; write count: 1 (a worker uses one device until "
        "tensor parallelism comes)",
    ),
    "unknown engine field": (
        {f"{_ENGINE}.chunkToken": 3},
        f"{_ENGINE}.chunkToken: is not a known field; did you mean chunkTokens?",
    ),
    "chunk above batch": (
        {f"{_ENGINE}.chunkTokens": 4096},
        f"{_ENGINE}.chunkTokens: is 4096, above maxBatchTokens (2048); write at most "
        "maxBatchTokens",
    ),
    "cache smaller than a block": (
        {f"{_ENGINE}.kvCacheTokens": 8},
        f"{_ENGINE}.kvCacheTokens: is 8, less than a block (16 tokens); write at least blockTokens",
    ),
    "cache said twice": (
        {f"{_ENGINE}.kvCacheTokens": 1600, f"{_ENGINE}.kvCacheFraction": 0.5},
        f"{_ENGINE}.kvCacheFraction: stands beside kvCacheTokens; write one of them, never both",
    ),
    "cache fraction 1": (
        {f"{_ENGINE}.kvCacheFraction": 1},
        f"{_ENGINE}.kvCacheFraction: is 1; write a number above 0 and below 1",
    ),
    "block sizes differ": (
        {f"{_ENGINE}.blockTokens": 32},
        "spec.decode.engine.blockTokens: differs between pools: prefill 32 and decode 16; write "
        "the same blockTokens in both pools",
    ),
    "other container": (
        {f"{_TEMPLATE}.spec.containers": [{"name": "sidecar"}]},
        f'{_TEMPLATE}.spec.containers[0].name: is "sidecar"; write name: engine',
    ),
    "two containers": (
        {f"{_TEMPLATE}.spec.containers": [{"name": "engine"}, {"name": "engine"}]},
        f"{_TEMPLATE}.spec.containers: has 2 items; write one, named engine",
    ),
    "containers a mapping": (
        {f"{_TEMPLATE}.spec.containers": {"name": "engine"}},
        f"{_TEMPLATE}.spec.containers: is a mapping, not a list; write a list of mappings",
    ),
    "env a number": (
        {
            f"{_TEMPLATE}.spec.containers": [
                {"name": "engine", "env": [{"name": "OMP_NUM_THREADS", "value": 1}]}
            ]
        },
        f"{_TEMPLATE}.spec.containers[0].env[0].value: is 1, not text; put the value in quotes",
    ),
    "quantity": (
        {
            f"{_TEMPLATE}.spec.containers": [
                {"name": "engine", "resources": {"limits": {"memory": "8GB"}}}
            ]
        },
        f'{_TEMPLATE}.spec.containers[0].resources.limits.memory: is "8GB", not a quantity; '
        'write a quantity, such as 2, "500m" or "8Gi"',
    ),
    "label a number": (
        {f"{_TEMPLATE}.metadata.labels": {"tier": 1}},
        f"{_TEMPLATE}.metadata.labels.tier: is 1, not text; put the value in quotes",
    ),
    "affinity": (
        {f"{_TEMPLATE}.spec.affinity": {}},
        f"{_TEMPLATE}.spec.affinity: is not supported yet; leave it out",
    ),
    "no router": ({"spec.router.replicas": 0}, f"spec.router.replicas: is 0; {_WHOLE} 1 to 100"),
    "router processes": (
        {"spec.router.processes": 2},
        "spec.router.processes: is not supported yet; leave it out",
    ),
    "unknown transport": (
        {"spec.kvTransfer.transport": "rdma"},
        'spec.kvTransfer.transport: is "rdma"; write one of auto, tcp, shm, nixl',
    ),
    "quantized KV": (
        {"spec.kvTransfer.quantization": "int8"},
        "spec.kvTransfer.quantization: other than none is not supported yet; write none",
    ),
    "security": (
        {"spec.security.tls": {}},
        "spec.security: is not supported yet; leave it out",
    ),
    "rollout can't move": (
        {"spec.rollout.maxSurge": 0},
        "spec.rollout.maxUnavailable: is 0 as is maxSurge, so no rollout could move; write 1 "
        "for one of them",
    ),
    "drain too short": (
        {"spec.rollout.drainTimeout": "500ms"},
        'spec.rollout.drainTimeout: is "500ms"; write a duration from 1s to 24h',
    ),
    "budget too small": (
        {
            "spec.budget.gpus": 2,
            "spec.prefill": {"replicas": 1, "accelerator": _GPU},
            "spec.decode": {"replicas": 2, "accelerator": _GPU},
        },
        "spec.budget.gpus: is 2, but the pools' replicas need 3; raise it or lower the replicas",
    ),
    "budget without number": (
        {"spec.budget": {}},
        "spec.budget.gpus: is missing; write the number of GPUs, such as gpus: 16",
    ),
}


def messages(body: object) -> list[str]:
    with pytest.raises(api.InvalidCluster) as caught:
        api.parse(body)
    return [str(error) for error in caught.value.errors]


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_has_a_path_a_problem_and_a_remedy(name: str) -> None:
    changes, message = BAD[name]
    assert messages(document(**changes)) == [message]


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
    assert made.rollout.drain_timeout_s == 60
    assert (made.transport, made.gpus, made.router.replicas) == ("auto", None, 1)
    assert made.model.max_model_tokens == 0


def test_a_device_changes_the_default_of_the_cache() -> None:
    made = cluster(**{"spec.decode.accelerator": _GPU})
    decode = made.pool(Role.DECODE)
    assert decode is not None
    assert (decode.engine.kv_cache_tokens, decode.engine.kv_cache_fraction) == (None, 0.9)


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
    }
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
    assert made.rollout.drain_timeout_s == 90


def test_only_names_are_immutable() -> None:
    old = cluster()
    api.check_update(old, cluster(**{"spec.model.dtype": "float32", "spec.decode.replicas": 5}))
    with pytest.raises(api.InvalidCluster) as caught:
        api.check_update(old, cluster(**{"spec.model.name": "b", "metadata.name": "other"}))
    assert [str(error) for error in caught.value.errors] == [
        'metadata.name: changed from "chat" to "other", but can\'t change; make another PDCluster',
        'spec.model.name: changed from "smollm2" to "b", but can\'t change; make another PDCluster',
    ]
